"""`python -m rlrun` is `rlrun`: the program takes the place of this process, with its arguments, signals and exit status."""

import os
import sys

from rlrun import program

if __name__ == "__main__":
    path = program()
    os.execv(path, [path, *sys.argv[1:]])
