"""The tests. Here: bytecode, as they start hundreds of Python processes, and compiling takes half
of a start's time.
"""

import os
import sys
from pathlib import Path


def _keep_bytecode():
    """Where Python is told to write no bytecode, keeps it apart from the sources, for us and the
    processes we start.
    """
    if sys.dont_write_bytecode and sys.pycache_prefix is None:
        sys.dont_write_bytecode = False
        sys.pycache_prefix = str(Path(__file__).parents[1] / ".pytest_cache" / "bytecode")
        os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


_keep_bytecode()
