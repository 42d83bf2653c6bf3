"""``datatrove_ckpt.torch`` where torch is not installed, or not needed."""

from __future__ import annotations

import subprocess
import sys


def test_the_package_is_imported_without_torch() -> None:
    code = 'import sys, datatrove_ckpt.torch; sys.exit(bool({"torch", "pyarrow", "datasets"} & set(sys.modules)))'
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
