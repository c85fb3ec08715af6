"""The program rlrun, installed as `rlrun` beside this interpreter; `python -m rlrun` starts it."""

import os
import shutil
import sysconfig

__all__ = ["program"]


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
