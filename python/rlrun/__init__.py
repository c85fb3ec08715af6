"""The program rlrun, installed as `rlrun` beside this interpreter; `python -m rlrun` starts it.

`rlrun.training` is a client of `rlrun serve training`, and `rlrun.Client` its session; they are imported when they are used.
"""

import importlib
import os
import shutil
import sysconfig

__all__ = ["Client", "program", "training"]


def __getattr__(name):
    if name not in ("Client", "training"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    training = importlib.import_module("rlrun.training")
    return training if name == "training" else training.Client


def program():
    """The path of the program that this package was installed with; FileNotFoundError if it is gone."""
    schemes = [None, sysconfig.get_preferred_scheme("user")]
    paths = [sysconfig.get_path("scripts", scheme) if scheme else sysconfig.get_path("scripts") for scheme in schemes]
    # `pip install --target DIR` puts scripts into DIR/bin.
    paths.append(os.path.join(os.path.dirname(os.path.dirname(__file__)), "bin"))
    found = shutil.which("rlrun", path=os.pathsep.join(paths))
    if found is None:
        raise FileNotFoundError(f"the program rlrun is in none of {paths}; install the package again")
    return found
