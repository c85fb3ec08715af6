"""An environment in the convention of skyrl-gym."""


class EchoEnv:
    def __init__(self, env_config=None, extras=None):
        self.wanted = (extras or {}).get("answer", "")

    def init(self, prompt):
        return prompt + [{"role": "user", "content": "Say it."}], {}

    def step(self, action):
        right = action.strip() == self.wanted
        observations = [] if right else [{"role": "user", "content": f"No, not {action}."}]
        return {"observations": observations, "reward": float(right), "done": right, "metadata": {}}
