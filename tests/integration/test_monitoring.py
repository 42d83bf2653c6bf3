"""What a run tells others while it works: metrics at a port, and nothing that could hold it up."""

import asyncio
import json
import random
import sys

import pytest

from datatrove_ckpt.cli import track
from datatrove_ckpt.config import MonitoringConfig
from datatrove_ckpt.generation.export import prometheus
from tests.jobs import ask, documents, runner
from tests.unit.test_metrics import PORT, get, samples, waited_for


@pytest.fixture
def host(monkeypatch):
    """An address of this machine's own that no other test has."""
    monkeypatch.setattr(prometheus, "_KEEP_ENDED_SECONDS", 3600.0)
    chance = random.SystemRandom()
    return f"127.{chance.randrange(1, 255)}.{chance.randrange(1, 255)}.{chance.randrange(1, 255)}"


def test_a_run_shows_its_numbers_while_it_works_and_at_its_end(tmp_path, host, server):
    seen = {}

    async def rollout(document, generate):
        if document.id == "id 5":
            seen.update(await asyncio.to_thread(waited_for, lambda: running(host)))
        return await ask(document, generate)

    def running(host):
        found = samples(get(host))
        return found if found.get("documents_total") == 5 else None

    settings = MonitoringConfig(run_name="books", metrics_port=PORT, metrics_host=host)
    job = runner(
        tmp_path, server, rollout, config={"max_concurrent_generations": 1, "max_concurrent_documents": 2},
        monitoring=settings,
    )  # fmt: skip
    job.run(documents(6), 3, 7)
    assert seen["rank_state running"] == 1
    assert seen["requests_total answered"] == 5
    found = samples(get(host), run="books", rank="3")
    assert found["rank_state done"] == 1
    assert found["rank_documents written"] == found["requests_total answered"] == 6
    assert found["rank_tokens completion"] == found["tokens_total completion"] > 0
    assert found["requests_in_flight"] == 0


# jobs that are tracked ---------------------------------------------------------------------------

STAND_IN = """
import json, os
from pathlib import Path

FOLDER = Path(os.environ["STAND_IN"])

def note(**fields):
    with (FOLDER / "calls.jsonl").open("a") as file:
        file.write(json.dumps(fields) + "\\n")

class Settings:
    def __init__(self, **settings):
        pass

class Run:
    def __init__(self, id):
        self.id = id
        self.summary = {}
    def define_metric(self, name, **settings):
        pass
    def log(self, values):
        self.summary |= values
        note(call="log", id=self.id, values=values)
    def finish(self, exit_code):
        note(call="finish", id=self.id, status=self.summary["status"], exit_code=exit_code)

def init(**settings):
    note(call="init", **{name: settings[name] for name in ("id", "project", "entity", "name", "config", "resume")})
    if os.environ.get("STAND_IN_DOES") == "fail":
        raise ConnectionError("no network, and the key is canary-of-a-key")
    return Run(settings["id"])
"""


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """Where the stand-in writes what is asked of it."""
    folder = tmp_path / "stand_in"
    folder.mkdir()
    (folder / "wandb.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("STAND_IN", str(folder))
    monkeypatch.setenv("WANDB_API_KEY", "canary-of-a-key")
    yield folder / "calls.jsonl"
    sys.modules.pop("wandb", None)


def made(calls, call=None):
    """The calls of this name, or all."""
    found = [json.loads(line) for line in calls.read_text().splitlines()] if calls.exists() else []
    return [one for one in found if call in (None, one["call"])]


def test_what_cannot_be_sent_is_said_without_secrets_and_sent_later(
    tmp_path,
    calls,
    monkeypatch,
    server,
    command,
):
    runner(tmp_path, server).run(documents(4))
    monkeypatch.setenv("STAND_IN_DOES", "fail")
    monkeypatch.setattr(track.time, "sleep", lambda seconds: monkeypatch.delenv("STAND_IN_DOES"))
    lines = command("track", tmp_path / "checkpoints", "--wandb", "texts").out.splitlines()
    assert lines == [
        "ConnectionError: no network, and the key is ***",
        "up to date again",
        "All is sent, and no task is at work.",
    ]
    (sent,) = made(calls, "log")
    assert sent["values"]["counts.read"] == 4
