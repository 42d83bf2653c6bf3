"""Modules of a user, and a Python of each version."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from datatrove_ckpt.user_code import description, statements
from tests.jobs import runner

DATA = Path(__file__).parent / "data"


FOLDER = str(Path(description.__file__).parent)


MODULE = """
import functools
import json

PROMPT = "Rewrite: "
seen = 0

def helper(text):
    return PROMPT + text

def make(times):
    async def rollout(document, generate, style="plain"):
        global seen
        seen = seen + 1
        return helper(document.text) * times
    return rollout

class Asker:
    def __init__(self, words):
        self.words = words

    async def __call__(self, document, generate):
        return document.text[: self.words]

rollout = make(1)
"""


def load(path, name="rollouts_of_a_user"):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def as_main(folder, source, patch):
    """A program that Python runs."""
    path = folder / "main_script.py"
    path.write_text(source)
    module = load(path, "__main__")
    patch.setitem(sys.modules, "__main__", module)
    return module


def load_changed(folder, name, *changes, source=MODULE):
    """The module with changes to its source, each version in a file of its own."""
    for old, new in changes:
        assert old in source
        source = source.replace(old, new)
    path = folder / f"{name}.py"
    path.write_text(source)
    return load(path)


# The package's other modules need packages that other Pythons may not have.
DESCRIBE = """
import importlib.util, json, os, sys, types

def load(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

for name in ("datatrove_ckpt", "datatrove_ckpt.user_code"):
    sys.modules[name] = types.ModuleType(name)
for part in ("statements", "description"):
    walk = load(f"datatrove_ckpt.user_code.{part}", os.path.join(sys.argv[1], f"{part}.py"))
"""


DESCRIBE_SHAPES = (
    DESCRIBE
    + """
shapes = load("code_shapes", sys.argv[2])
found = {name: walk.describe({"rollout_fn": shape}).fields for name, shape in shapes.SHAPES.items()}
values = sys.modules['datatrove_ckpt.user_code.description']
found |= {name: values.type_name(cls) for name, cls in shapes.TYPES.items()}
print(json.dumps([sys.version_info[:2], found]))
"""
)


SHAPES = "2b283b931d1acb67f27d0d51cfcf04bb"
"""Of what is described on every Python.

If it changes, all unfinished runs are refused: raise ``_VERSION`` then.
"""


def python(minor):
    """A Python 3.``minor`` of this machine: this one, one on PATH, or one that pyenv or uv
    installed.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    uv = Path.home() / ".local" / "share" / "uv" / "python"
    found = [
        shutil.which(f"python3.{minor}"),
        *pyenv.glob(f"3.{minor}.*/bin/python"),
        *uv.glob(f"*-3.{minor}.*/bin/python3"),
    ]
    if sys.version_info[:2] == (3, minor):
        found.insert(0, sys.executable)
    for path in filter(None, found):
        # A shim of pyenv is there for versions, too, that are not chosen.
        command = [path, "-c", "import sys; print(sys.version_info[1])"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0 and done.stdout.strip() == str(minor):
            return str(path)
    return None


def check_hashes(minor, path):
    command = [path, "-W", "error", "-c", DESCRIBE_SHAPES, FOLDER, str(DATA / "code_shapes.py")]
    version, found = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert version == [3, minor]
    assert len(found) > 20
    assert statements.digest(json.dumps(found, sort_keys=True)) == SHAPES


class FakeUrl:
    url = "http://127.0.0.1:9"


def step_of(folder, rollout, **settings):
    return runner(folder, FakeUrl(), rollout, **settings)
