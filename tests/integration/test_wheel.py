"""The package as users install it, from a wheel: with programs that start by path, and files that
are no modules.

An editable install, which all other tests use, finds every file of the checkout, in the wheel or
not.
"""

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# The fixture builds a wheel, in an environment that pip makes for it.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def pip(tmp_path_factory):
    """The command of a pip: this environment's or, if it has none (uv makes such ones), a fresh
    environment's.
    """
    if find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    folder = tmp_path_factory.mktemp("pip")
    run([sys.executable, "-m", "venv", str(folder)], folder)
    return [str(folder / "bin/python"), "-m", "pip"]


@pytest.fixture(scope="module")
def target(tmp_path_factory, pip):
    """A folder with nothing but the installed wheel, which was built from a copy without any
    leftovers of builds.
    """
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(
        ROOT / "datatrove_ckpt",
        source / "datatrove_ckpt",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run([*pip, "wheel", "--no-deps", "--wheel-dir", str(folder), str(source)], folder)
    (wheel,) = folder.glob("*.whl")
    run(
        [
            *pip,
            "install",
            "--no-deps",
            "--no-compile",
            "--target",
            str(folder / "target"),
            str(wheel),
        ],
        folder,
    )
    return folder / "target"


def run(command, folder):
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_wheel_contains_every_file_of_the_package(target):
    def files(folder):
        found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
        return {str(path) for path in found if "__pycache__" not in path.parts}

    assert files(target / "datatrove_ckpt") == files(ROOT / "datatrove_ckpt")
