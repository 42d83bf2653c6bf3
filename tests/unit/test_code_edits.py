"""The identity of the user's code, tried with edits of small projects:

``tests/data/code_edits_*.txt`` hold them.
"""

import asyncio
import importlib
import importlib.util
import json
import sys
import types
from contextlib import contextmanager

import pytest
from datatrove.data import Document
from datatrove.pipeline.writers import JsonlWriter

from datatrove_ckpt.checkpoint.identity import as_stored
from datatrove_ckpt.user_code.code_identity import code_identity
from tests.code_edits import rows


class Project:
    """A project in a folder of its own, loaded as a new process would."""

    def __init__(self, folder, files, flags, patch):
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        patch.setattr(sys, "dont_write_bytecode", True)
        patch.setattr(sys, "path", [str(folder), *sys.path])
        for line in files.get("environment", "").split():
            patch.setenv(*line.split("="))
        path = folder / ("script.py" if "script.py" in files else "asking.py")
        module_name = "__main__" if "main" in flags else path.stem
        spec = importlib.util.spec_from_file_location(module_name, path)
        self.script = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, module_name, self.script)
        spec.loader.exec_module(self.script)
        self.rollout, self.context = (
            self.script.rollout,
            getattr(self.script, "shared_context", None),
        )
        names = {"adapter", "expand_metadata"} & vars(self.script).keys()
        writer = getattr(self.script, "Writer", JsonlWriter)
        settings = {name: getattr(self.script, name) for name in names}
        self.writer = writer(
            str(folder.parent / "out"), "${rank}.jsonl", compression=None, **settings
        )

    def identity(self):
        """As a file keeps it."""
        fields = code_identity(self.rollout, self.context, output_writer=self.writer).fields
        return json.dumps(as_stored(fields), indent=1, sort_keys=True)

    def behaviour(self):
        """What it asks and writes for a document."""
        asked = []

        async def generate(payload):
            asked.append(repr(payload))
            return types.SimpleNamespace(text="Answer")

        async def run():
            document = Document(text="Ab c, d", id="id 1", metadata={"kind": "a", "n": 3})
            context = self.context() if callable(self.context) else self.context or {}
            result = await self.rollout(document, generate, **context)
            return result if isinstance(result, str | list) else "", repr(
                self.writer.adapter(document)
            )

        return asked, asyncio.run(run())


@contextmanager
def loading(folder):
    loaded = set(sys.modules)

    def purge():
        for name in set(sys.modules) - loaded:
            if str(getattr(sys.modules[name], "__file__", None) or folder).startswith(str(folder)):
                del sys.modules[name]

    with pytest.MonkeyPatch.context() as patch:

        def load_project(version, files, flags):
            purge()
            return Project(folder / version, files, flags, patch)

        yield load_project
    purge()


_before = {}


def before(load, row):
    """Identity and behaviour before an edit. Rows of one project share them."""
    key = frozenset(row.flags), frozenset(row.before.items())
    if key not in _before:
        project = load("before", row.before, row.flags)
        _before[key] = project.identity(), project.behaviour()
    return _before[key]


def is_seen(load, row):
    """Whether the edit changes both identity and behaviour; false: neither."""
    identity, behaviour = before(load, row)
    after = load("after", row.after, row.flags)
    if "ran" in row.flags:
        after.identity()
        after.behaviour()
    changed = after.identity() != identity
    assert (after.behaviour() != behaviour) == changed or row.flags & {"unstable", "refused"}
    return changed


@pytest.mark.parametrize("twentieth", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["seen", "harmless"])
def test_an_edit_that_changes_the_work_is_seen_and_no_other(ram, kind, twentieth):
    """By default each twentieth edit; ``slow``: the others."""
    wrong = []
    for number, row in enumerate(rows(kind)):
        if (number % 20 == 0) is not twentieth:
            continue
        try:
            with loading(ram / str(number)) as load:
                expected = kind == "seen" or "refused" in row.flags
                wrong += [row.name] if is_seen(load, row) is not expected else []
        except Exception as error:
            wrong.append(f"{row.name}: {error!r}")
    assert wrong == []
    assert number + 1 == {"seen": 532, "harmless": 196}[kind]


def test_false_alarms_are_few():
    """Edits that are seen although they change nothing; docs/recovery.md names their number."""
    assert sum("refused" in row.flags for row in rows("harmless")) == 9


def test_functions_that_one_statement_makes_are_told_apart(tmp_path, monkeypatch):
    (tmp_path / "several.py").write_text(
        "def make(kind):\n"
        "    def say(document, generate):\n        return 1\n"
        "    def sing(document, generate):\n        return 2\n"
        "    return say if kind else sing\n"
        "FIRST, SECOND = (lambda document, generate: 1), (lambda document, generate: 2)\n"
        "BY_NAME = {'a': lambda document, generate: 3, 'b': lambda document, generate: 3}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("several")
    rollouts = [module.make(True), module.make(False), module.FIRST, module.SECOND]
    rollouts += module.BY_NAME.values()
    described = [json.dumps(as_stored(code_identity(one, None).made.fields)) for one in rollouts]
    assert len({*described}) == len(rollouts)
    assert described[0] == json.dumps(as_stored(code_identity(module.make(True), None).made.fields))
