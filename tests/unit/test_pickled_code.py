"""The identity of code that was pickled is the one that it had when the job was made."""

import copy
import functools
import sys
import types
from pathlib import Path
from types import ModuleType

import dill
import pytest

from datatrove_ckpt.user_code import code_identity, script_names
from datatrove_ckpt.user_code.script_names import ScriptNames, restore
from tests.user_modules import MODULE, as_main, load_changed, step_of

SOURCE = (
    MODULE
    + """
def nested(ending):
    helper = lambda text: text + ending
    async def rollout(document, generate, clean=None, add=None):
        return await generate({"messages": [{"role": "user", "content": helper(PROMPT + document.text)}]})
    return rollout
by_value = nested("!")
"""
)


def fields(step):
    return step.identity(1).fields


@pytest.fixture
def another_process(
    monkeypatch,
):
    """Pickles a step, and loads it as a process does that has not made it."""

    def load_elsewhere(step):
        pickled = step if isinstance(step, bytes) else dill.dumps(step)
        monkeypatch.setattr(code_identity, "_PROCESS", "another")
        return dill.loads(pickled)

    return load_elsewhere


def comment(path):
    path.write_text("# a comment\n" + path.read_text())


def edit(path):
    path.write_text(
        path.read_text()
        .replace("text + ending", "ending + text")
        .replace("document.text", "document.id")
    )


CHANGES = [edit, comment, Path.unlink]
MAKERS = {
    "nested function": lambda module: module.by_value,
    "partial of it": lambda module: functools.partial(module.by_value, add=lambda text: text * 2),
    "object": lambda module: module.Asker(3),
}


@pytest.mark.matrix("kind", MAKERS)
@pytest.mark.parametrize("change", CHANGES)
def test_code_that_travels_by_value_is_what_it_was(tmp_path, another_process, kind, change):
    module = load_changed(tmp_path, "script", source=SOURCE)
    shared = {} if kind == "object" else {"clean": lambda text: text.strip()}
    step = step_of(tmp_path, MAKERS[kind](module), shared_context=shared)
    made = fields(step)
    assert any("source " in str(value) for value in made.values())
    change(tmp_path / "script.py")
    assert fields(step) == made
    assert fields(copy.deepcopy(step)) == made
    loaded = another_process(step)
    assert fields(loaded) == made
    assert fields(another_process(loaded)) == made


def test_a_function_that_is_imported_by_name_is_what_is_imported(
    tmp_path, another_process, monkeypatch
):
    source = SOURCE + "async def named(document, generate):\n    return helper(document.text)\n"
    old = load_changed(tmp_path, "old", source=source)
    monkeypatch.setitem(sys.modules, "rollouts_of_a_user", old)
    step = step_of(tmp_path, old.named)
    made = fields(step)
    pickled = dill.dumps(step)
    changed = load_changed(tmp_path, "new", ("PROMPT + text", "text + PROMPT"), source=source)
    monkeypatch.setitem(sys.modules, "rollouts_of_a_user", changed)
    assert fields(step) == made
    loaded = another_process(pickled)
    assert loaded.rollout_fn is changed.named
    assert fields(loaded) == fields(step_of(tmp_path, changed.named))
    assert fields(loaded) != made


# names of the script -----------------------------------------------------------------------------

SCRIPT = """
import json

PROMPT = "Rewrite: "
lock = (number for number in range(3))
unused = open
text = "named like an attribute only"

class Base:
    def shown(self):
        return json.dumps(PROMPT)

class Words(Base):
    pass

def helper(document):
    return Words().shown(), document.text, lock, __name__

async def rollout(document, generate):
    return helper(document)
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    return as_main(tmp_path, SCRIPT, monkeypatch)


def test_the_names_that_a_function_of_the_script_uses_are_found(script):
    found = script_names.collect(functools.partial(script.rollout))
    assert sorted(found.values) == ["PROMPT", "Words", "helper", "json"]
    ((name, reason),) = found.left_out.items()
    assert (name, reason[:34]) == ("lock", "it cannot be pickled (TypeError: c")
    assert found.file == script.__file__


def test_names_are_put_only_where_the_script_is_not_loaded(script, monkeypatch):
    found = script_names.collect(script.rollout)
    script.PROMPT = "its own"
    script_names.restore(found)
    assert script.PROMPT == "its own"
    launcher = types.ModuleType("__main__")
    launcher.__file__ = "/bin/launch_pickled_pipeline"
    monkeypatch.setitem(sys.modules, "__main__", launcher)
    script_names.restore(found)
    assert {name for name in vars(launcher) if not name.startswith("__")} == set(found.values)
    assert vars(launcher)["PROMPT"] == "Rewrite: "


def test_a_function_of_a_module_carries_nothing(tmp_path, script):
    assert script_names.collect(load_changed(tmp_path, "module").rollout, None, {"a": 1}) is None


def test_a_step_among_the_names_of_the_script_is_pickled_once(tmp_path, script):
    exec("async def rollout(document, generate):\n    return runner, helper", vars(script))
    step = step_of(tmp_path, script.rollout)
    script.runner = step
    assert len(dill.dumps(step)) < 100_000
    with script_names.nothing_carried():
        assert "_script_names" not in step.__getstate__()
    assert "runner" in step.__getstate__()["_script_names"].values
    copied = copy.deepcopy(step)
    assert copied.rollout_fn is step.rollout_fn


def test_a_second_task_of_a_worker_leaves_what_the_first_has_changed(monkeypatch):
    notebook = ModuleType("__main__")  # without a file
    notebook.count = 1
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    restore(ScriptNames(None, {"count": 0, "limit": 3}, {}))
    assert (notebook.count, notebook.limit) == (1, 3)
