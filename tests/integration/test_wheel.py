"""The package as users install it, from a wheel: programs that start by path or by name, and files that are no modules.

An editable install, which all other tests use, finds every file of the checkout, in the wheel or not.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import pytest

from datatrove_ckpt.inference.servers.server import free_port

ROOT = Path(__file__).parents[2]
# The fixture builds a wheel, in an environment that pip makes for it.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def pip(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command of a pip: this environment's or, if it has none (uv makes such ones), a fresh environment's."""
    if find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    folder = tmp_path_factory.mktemp("pip")
    run([sys.executable, "-m", "venv", str(folder)], folder)
    return [str(folder / "bin" / "python"), "-m", "pip"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory, pip: list[str]) -> Path:
    """A folder with nothing but the installed wheel, which was built from a copy without any leftovers of builds."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(ROOT / "datatrove_ckpt", source / "datatrove_ckpt", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run([*pip, "wheel", "--no-deps", "--wheel-dir", str(folder), str(source)], folder)
    (wheel,) = folder.glob("*.whl")
    run([*pip, "install", "--no-deps", "--no-compile", "--target", str(folder / "target"), str(wheel)], folder)
    return folder / "target"


def run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def environment(path: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(path), **more}


def test_the_wheel_contains_every_file_of_the_package(target: Path) -> None:
    def files(folder: Path) -> set[str]:
        found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
        return {str(path) for path in found if "__pycache__" not in path.parts}

    assert files(target / "datatrove_ckpt") == files(ROOT / "datatrove_ckpt")


def test_the_dummy_server_starts_by_name(target: Path, tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "datatrove_ckpt.inference.servers.dummy", "--port", str(port)]
    with (
        (tmp_path / "log").open("wb") as log,
        subprocess.Popen(command, env=environment(target), cwd=tmp_path, stdout=log, stderr=log) as server,
    ):
        try:
            assert b"dummy-model" in first_answer(f"http://127.0.0.1:{port}/v1/models", server, tmp_path / "log")
        finally:
            server.terminate()


def first_answer(url: str, server: subprocess.Popen[bytes], log: Path) -> bytes:
    """Polls, because the server says nothing when it is ready."""
    while True:
        try:
            with urllib.request.urlopen(url, timeout=300) as answer:
                return bytes(answer.read())
        except urllib.error.URLError:
            assert server.poll() is None, log.read_text()
            time.sleep(0.05)


def test_a_request_cache_is_created_with_the_schema_of_the_wheel(target: Path, tmp_path: Path) -> None:
    code = (
        "import pathlib, datatrove_ckpt\n"
        "from datatrove_ckpt.checkpoint.request_cache import RequestCache\n"
        "RequestCache(pathlib.Path('replay.sqlite3'))\n"
        "print(datatrove_ckpt.__file__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(target), cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(target)
