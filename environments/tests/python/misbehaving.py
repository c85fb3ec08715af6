"""An environment that does what its row says."""

import os
import time


class Bad:
    def reset(self, row):
        self.what = row["what"]
        print("a line that nobody waits for")

    def step(self, text):
        if self.what == "hang":
            time.sleep(1000)
        if self.what == "fork":
            if os.fork() == 0:
                time.sleep(1000)
        if self.what == "die":
            os._exit(7)
        if self.what == "raise":
            raise RuntimeError("the board is gone")
        if self.what == "flood":
            return "x" * (65 << 20), 0.0, False
        if self.what == "nan":
            return "", float("nan"), True
        if self.what == "odd":
            return 3
        return "again", 0.5, False


class NoEnvironment:
    def go(self):
        pass
