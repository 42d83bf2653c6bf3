"""Which modules go along to machines that have none of the user's."""

import importlib
import sys
from pathlib import Path

import pytest

from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.user_code.script_names import own_files, own_modules


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes empty files beside a script in script/; the working folder is another one."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "script"), *sys.path])

    def write(*names, content="", folder="script"):
        for name in names:
            (tmp_path / folder / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / name).write_text(content)
        importlib.invalidate_caches()

    yield write
    for name in [name for name in sys.modules if name.startswith("own_")]:
        del sys.modules[name]


def names():
    return {name for files in own_modules().values() for name in files}


def test_imported_modules_and_packages_go_along_and_no_environment_or_hidden_file(
    write,
):
    package = {"own_a/__init__.py", "own_a/deep/b.py", "own_a/prompts/one.txt"}
    space = {
        "own_space/c.py",
        "own_space/deep/d.py",
        "own_space/deep/e/__init__.py",
        "own_space/deep/e/f.txt",
    }
    write(*package, *space, "own_flat.py", "own_other.py", "own_unused/__init__.py", "work.py")
    write(
        "own_a/.env",
        "own_a/.git/x.py",
        "own_a/__pycache__/x.pyc",
        "own_a/venv/pyvenv.cfg",
        "own_a/venv/lib/y.py",
    )
    write(
        "own_space/output/0.jsonl",
        "own_space/data.jsonl",
        "own_space/conda/conda-meta/x",
        "own_space/conda/lib/z.py",
    )
    for module in ("own_a", "own_space.deep.d", "own_flat", "json", "pytest", "datatrove_ckpt"):
        importlib.import_module(module)
    assert names() == {*package, *space, "own_flat.py"}
    assert own_files().keys() == names()


def test_those_in_the_working_folder_go_along_and_installed_ones_do_not(
    write, tmp_path, monkeypatch
):
    write("own_work.py", folder="work")
    write("own_path.py", folder="elsewhere")
    write("own_installed.py", folder="venv/site-packages")
    for folder in ("work", "elsewhere", "venv/site-packages"):
        sys.path.append(str(tmp_path / folder))
    for module in ("own_work", "own_path", "own_installed"):
        importlib.import_module(module)
    assert names() == {"own_work.py"}, (Path.cwd(), sys.modules["own_work"].__spec__)
    monkeypatch.chdir(tmp_path / "venv/site-packages")
    assert names() == set()


def test_what_is_too_large_or_secret_is_refused(write, monkeypatch):
    monkeypatch.setattr("datatrove_ckpt.user_code.script_names._MAX_BYTES", 2**10)
    write("own_b/__init__.py", "own_b/small.txt")
    write("own_b/table.bin", content="\n" * 2**10)
    importlib.import_module("own_b")
    assert own_files()["own_b/table.bin"]
    write("own_b/small.txt", content="more")
    with pytest.raises(
        ConfigError,
        match=r"at most 1 kB go along with the jobs\. The largest .*table\.bin \(1 kB\)",
    ):
        own_files()
    write("own_b/table.bin", content="KEY = 'hf_A1b2C3d4E5f6G7h8'")
    with pytest.raises(ConfigError, match=r"table\.bin: holds what may be a secret"):
        own_files()
