"""The package as users install it, from a wheel: with programs that start by path, and files that
are no modules.

An editable install, which all other tests use, finds every file of the checkout, in the wheel or
not.
"""

import shutil
import sys
from pathlib import Path

import pytest

from tests import processes

ROOT = Path(__file__).parents[2]
# The fixture builds a wheel, in an environment that pip makes for it.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def test_the_wheel_contains_every_file_of_the_package(tmp_path):
    """It is built from a copy without any leftovers of builds."""
    pytest.importorskip("pip")  # uv makes environments without it
    source = tmp_path / "source"
    shutil.copytree(
        ROOT / "datatrove_ckpt",
        source / "datatrove_ckpt",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-compile", "--target"]
    done = processes.run([*install, tmp_path / "target", source])
    assert done.returncode == 0, done.stdout + done.stderr

    def files(folder):
        found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
        return {str(path) for path in found if "__pycache__" not in path.parts}

    assert files(tmp_path / "target/datatrove_ckpt") == files(ROOT / "datatrove_ckpt")
