"""An environment of TRL with a tool that does not come back."""

import time


class HangingEnv:
    def reset(self, **row):
        return "Wait."

    def wait(self, seconds: float) -> str:
        """Takes a while."""
        time.sleep(seconds)
        return "done"
