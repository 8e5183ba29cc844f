"""matplotlib would read a `matplotlibrc` of the current folder, which may be a run folder of somebody else's: a pipe
there hangs every import of it, and settings are obeyed. Called first by every process that may import matplotlib.
"""

import importlib
import os
import sys
from contextlib import suppress


def ignore() -> None:
    """Imports matplotlib from elsewhere if the current folder has such a file; what MATPLOTLIBRC names still counts."""
    if not os.path.lexists("matplotlibrc") or "matplotlib" in sys.modules:
        return
    if named := os.environ.get("MATPLOTLIBRC"):
        os.environ["MATPLOTLIBRC"] = os.path.abspath(named)
    here = os.getcwd()
    os.chdir(os.path.abspath(os.sep))
    try:
        with suppress(ImportError):  # not installed
            importlib.import_module("matplotlib")
    finally:
        os.chdir(here)
