"""Two roles: one asks, one solves; the second gets a mark of the first, and both see only what they are told."""


class Debate:
    roles = ["asker", "solver"]

    def __init__(self, rounds=2):
        self.rounds = rounds

    def reset(self, row):
        self.round, self.question = 0, ""
        return f"ask about {row.get('topic', 'nothing')}"

    def step(self, text, role):
        if role == "asker":
            self.question = text
            return {"observation": f"solve {text}", "role": "solver", "reward": 0.0}
        self.round += 1
        right = float(text == self.question[::-1])
        other = "solver" if text != "cheat" else "judge"
        return {
            "observation": f"it said {text}",
            "role": "asker" if other == "solver" else "judge",
            "rewards": {"solver": right, "asker": 1.0 - right},
            "done": self.round == self.rounds,
        }
