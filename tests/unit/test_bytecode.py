"""The processes that tests start find compiled bytecode; else each of hundreds compiles all that it imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.pages import ROOT

CODE = """
import json, subprocess, sys, tests
code = "import sys; print(sys.pycache_prefix, sys.flags.dont_write_bytecode)"
child = subprocess.check_output([sys.executable, "-c", code])
print(json.dumps([sys.pycache_prefix, sys.dont_write_bytecode, child.decode().split()]))
"""


def begin_tests(**environment: str) -> object:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [sys.executable, "-c", CODE.strip()]
    return json.loads(subprocess.check_output(command, cwd=ROOT, env={**inherited, **environment}))


def test_where_python_writes_no_bytecode_tests_keep_their_own_apart_from_the_sources() -> None:
    apart = str(ROOT / ".pytest_cache" / "bytecode")
    assert begin_tests(PYTHONDONTWRITEBYTECODE="1") == [apart, False, [apart, "0"]]


def test_other_settings_of_bytecode_stay(tmp_path: Path) -> None:
    chosen = str(tmp_path)
    assert begin_tests(PYTHONPYCACHEPREFIX=chosen) == [chosen, False, [chosen, "0"]]
    assert begin_tests(PYTHONPYCACHEPREFIX=chosen, PYTHONDONTWRITEBYTECODE="1") == [chosen, True, [chosen, "1"]]
