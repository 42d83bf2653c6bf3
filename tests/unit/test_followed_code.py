"""The identity follows a rollout into the user's other modules, and nowhere else."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from datatrove_ckpt.errors import CheckpointMismatch
from datatrove_ckpt.generation.run_identity import code_identity
from datatrove_ckpt.maintenance.verify import verify
from datatrove_ckpt.testing import FakeServer
from tests.jobs import documents, runner
from tests.unit.test_identity import load, run_json

PROMPTS = """
import dataclasses
import os
import socket
import textwrap
import time

START = "Rewrite: "
LONG = textwrap.dedent('''
    Please.
''').strip()
API_KEY = "s3cret-s3cret"
HOST = socket.gethostname()
STARTED = time.time()
TABLE = [1, 2]
calls = 0

def ending(text):
    global calls
    calls += 1
    return text + "!" + str((HOST, STARTED, TABLE, API_KEY) and "")

def beginning(text):
    return START + inner(text)

def inner(text):
    return text.strip()

def unused():
    return 1

@dataclasses.dataclass
class Words:
    text: str

    def joined(self):
        return " ".join(self.text.split())

    @property
    def first(self):
        return self.text[0]

    @staticmethod
    def plain():
        return ""
"""
ROLLOUTS = """
import json
import re
import my_prompts
from my_prompts import Words, ending

class Here:
    def shown(self):
        return "here"

here = Here()

async def rollout(document, generate):
    text = my_prompts.beginning(ending(document.text)) + Words(my_prompts.LONG).joined() + here.shown()
    return (await generate({"messages": [{"role": "user", "content": re.sub("x", "y", json.dumps(text))}]})).text
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Gives the rollout of a script that imports the module of prompts, with one change to the latter."""
    versions = 0

    def loaded(old: str = "", new: str = "", source: str = ROLLOUTS) -> Any:
        nonlocal versions
        versions += 1
        assert old in PROMPTS
        (tmp_path / f"my_prompts_{versions}.py").write_text(PROMPTS.replace(old, new) if old else PROMPTS)
        (tmp_path / f"rollouts_{versions}.py").write_text(source)
        monkeypatch.setitem(sys.modules, "my_prompts", load(tmp_path / f"my_prompts_{versions}.py", "my_prompts"))
        script = load(tmp_path / f"rollouts_{versions}.py", "my_rollouts")
        monkeypatch.setitem(sys.modules, "my_rollouts", script)
        return script.rollout

    return loaded


def followed(rollout: Any) -> dict[str, Any]:
    return {name: value for name, value in code_identity(rollout, None).fields.items() if name.startswith("imports.")}


def test_what_is_used_of_other_modules_is_described(modules: Any) -> None:
    found = followed(modules())
    assert sorted(found) == [
        "imports.my_prompts.API_KEY",
        "imports.my_prompts.LONG",
        "imports.my_prompts.START",
        "imports.my_prompts.Words.first code",
        "imports.my_prompts.Words.joined code",
        "imports.my_prompts.Words.plain code",
        "imports.my_prompts.beginning code",
        "imports.my_prompts.ending code",
        "imports.my_prompts.inner code",
        "imports.my_rollouts.Here.shown code",
    ]
    assert found["imports.my_prompts.LONG"] == "Please."
    assert found["imports.my_prompts.API_KEY"].startswith("hash ")
    assert all(value.startswith("source ") for name, value in found.items() if name.endswith(" code"))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (('text + "!"', 'text + "?"'), "imports.my_prompts.ending code"),
        (("text.strip()", "text"), "imports.my_prompts.inner code"),
        (('"Rewrite: "', '"Shorten: "'), "imports.my_prompts.START"),
        (("Please.", "Kindly."), "imports.my_prompts.LONG"),
        (('" ".join', '"-".join'), "imports.my_prompts.Words.joined code"),
    ],
)
def test_another_helper_is_another_run(tmp_path: Path, modules: Any, change: tuple[str, str], field: str) -> None:
    with FakeServer() as server:
        runner(tmp_path, server, modules()).run(documents(1))
        runner(tmp_path, server, modules("def unused():\n", "# a comment\ndef unused():\n    1\n")).run(documents(2))
        with pytest.raises(CheckpointMismatch) as refused:
            runner(tmp_path, server, modules(*change)).run(documents(2))
        assert [line.split(": ")[0].strip() for line in str(refused.value).splitlines() if " -> " in line] == [field]
        runner(tmp_path, server, modules(*change), accept_changes=True).run(documents(2))


def test_a_checkpoint_that_was_made_before_continues_and_is_described_then(tmp_path: Path, modules: Any) -> None:
    with FakeServer() as server:
        runner(tmp_path, server, modules()).run(documents(1), world_size=2)
        runner(tmp_path, server, modules()).run(documents(1), 1, world_size=2)
        for path in (run_json(tmp_path), tmp_path / "checkpoints" / "job.json"):
            kept = json.loads(path.read_bytes())
            path.write_text(json.dumps({name: kept[name] for name in kept if not name.startswith("imports.")}))
        assert verify(tmp_path / "checkpoints").problems == []
        runner(tmp_path, server, modules('text + "!"', 'text + "?"')).run(documents(2), world_size=2)
        assert "imports.my_prompts.ending code" in json.loads(run_json(tmp_path).read_bytes())
        with pytest.raises(CheckpointMismatch, match=r"imports.my_prompts.ending code"):
            runner(tmp_path, server, modules()).run(documents(2), world_size=2)


def test_packages_and_this_package_are_not_followed(modules: Any) -> None:
    source = (
        "import loguru, orjson\nfrom datatrove.data import Document\nfrom datatrove_ckpt import InferenceRunner\n"
        "async def rollout(document, generate):\n"
        "    return Document, InferenceRunner, orjson.dumps, loguru.logger, loguru.logger.info\n"
    )
    assert followed(modules(source=source)) == {}
