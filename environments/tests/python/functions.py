"""Functions that are tools."""

import os
import sys
import time
from typing import Literal


def area(width: float, height: float, unit: Literal["m", "km"] = "m") -> str:
    """The area of a rectangle.

    Args:
        width: of the rectangle
        height: of the rectangle
        unit: of both
    """
    return f"{width * height} {unit}2"


def misbehave(what: str):
    """Does what it is asked to."""
    if what == "raise":
        raise KeyError("no such key")
    if what == "hang":
        time.sleep(1000)
    if what == "die":
        os._exit(1)
    if what == "fork" and os.fork() == 0:
        time.sleep(1000)
    if what == "print":
        print("{no answer}" * 1000)
        sys.stderr.write("nor this\n")
        return "printed"
    if what == "flood":
        return "x" * (65 << 20)
    return "x" * 100_000


def _hidden():
    pass
