"""An environment as TRL's `environment_factory` takes it: its public methods are tools."""


class CounterEnv:
    """Counts up to the answer of its row."""

    def reset(self, answer="3", **row):
        self.value, self.target = 0, int(answer)
        return f"Count to {answer}."

    def increment(self, step: int, times: int = 1) -> int:
        """
        Increments the counter.

        Args:
            step: how far
            times: how often

        Returns:
            The counter.
        """
        if step < 0:
            raise ValueError("a step is at least 0")
        self.value += step * times
        return self.value

    def get_reward(self) -> float:
        return 1.0 if self.value == self.target else 0.0
