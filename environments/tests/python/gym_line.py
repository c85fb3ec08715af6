"""An environment in the convention of Gymnasium: text in, text out."""


class LineEnv:
    class Discrete:
        start, n = 0, 2

    action_space = Discrete()

    def __init__(self, length=3):
        self.length = length

    def reset(self, *, seed=None, options=None):
        self.place = 0
        return f"place 0 of {self.length}", {}

    def step(self, action):
        self.place += 1 if action == 1 else -1
        done = self.place >= self.length
        return f"place {self.place}", float(done), done, self.place < -5, {}
