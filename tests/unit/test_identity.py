"""Which changes of a user's code make another run of it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from datatrove_ckpt.errors import CheckpointMismatch
from datatrove_ckpt.generation.run_identity import code_identity
from datatrove_ckpt.testing import FakeServer
from tests.jobs import documents, runner

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


def load(folder: Path, name: str, *changes: tuple[str, str]) -> Any:
    """The module's rollout, with changes to its source. Each in a file of its own, as another version of one module."""
    source = MODULE
    for old, new in changes:
        assert old in source
        source = source.replace(old, new)
    path = folder / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("rollouts_of_a_user", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.rollout


PARTIAL = ("rollout = make(1)", "rollout = functools.partial(make(1), style='a')")
OBJECT = ("rollout = make(1)", "rollout = Asker(1)")


@pytest.mark.parametrize(
    ("before", "change", "field"),
    [
        ([], ("* times", "* times + '.'"), "rollout_fn code"),
        ([], ("make(1)", "make(2)"), "rollout_fn.times"),
        ([], ('style="plain"', 'style="fancy"'), "rollout_fn.style"),
        ([], ("return PROMPT + text", "return text + PROMPT"), "rollout_fn.helper code"),
        ([], ('"Rewrite: "', '"Shorten: "'), "rollout_fn.helper.PROMPT"),
        ([PARTIAL], ("style='a'", "style='b'"), "rollout_fn.style"),
        ([PARTIAL], ("* times", "* times + '.'"), "rollout_fn code"),
        ([OBJECT], ("Asker(1)", "Asker(2)"), "rollout_fn.words"),
        ([OBJECT], ("[: self.words]", "[self.words :]"), "rollout_fn.__call__ code"),
    ],
)
def test_another_rollout_is_another_run(
    tmp_path: Path, before: list[tuple[str, str]], change: tuple[str, str], field: str
) -> None:
    first, second = load(tmp_path, "first", *before), load(tmp_path, "second", *before, change)
    old, new = code_identity(first, None), code_identity(second, None)
    assert old[field] != new[field]
    with FakeServer() as server:
        runner(tmp_path, server, first).run(documents(1))
        with pytest.raises(CheckpointMismatch, match=f"  {field}: "):
            runner(tmp_path, server, second).run(documents(1))


@pytest.mark.parametrize(
    "change",
    [
        ("    async def rollout", "    # asks\n    async def rollout"),
        ("helper(document.text) * times", "(helper(\n            document.text\n        ) * times)"),
        ("seen = 0", "seen = 7"),
        ("import json\n", "import json, os\n"),
        ("class Asker:", "def unused():\n    return 1\n\nclass Asker:"),
    ],
)
def test_comments_layout_counters_and_what_it_does_not_use_are_no_part_of_it(
    tmp_path: Path, change: tuple[str, str]
) -> None:
    first, second = load(tmp_path, "first"), load(tmp_path, "second", change)
    assert code_identity(first, None) == code_identity(second, None)
