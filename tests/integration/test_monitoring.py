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
from types import SimpleNamespace

FOLDER = Path(os.environ["STAND_IN"])

def note(**fields):
    with (FOLDER / "calls.jsonl").open("a") as file:
        file.write(json.dumps(fields) + "\\n")

class MlflowClient:
    def __init__(self, tracking_uri):
        if os.environ.get("STAND_IN_DOES") == "fail":
            raise ConnectionError("no network, and the key is canary-of-a-key")
    def get_experiment_by_name(self, name):
        return SimpleNamespace(experiment_id=name)
    def search_runs(self, experiments, filter):
        data = SimpleNamespace(params={})
        return [SimpleNamespace(info=SimpleNamespace(run_id="1"), data=data)]
    def update_run(self, id, status):
        pass
    def log_batch(self, id, metrics=(), params=()):
        note(call="log", values=dict(metrics))
    def set_terminated(self, id, status):
        note(call="end", status=status)
"""


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """Where the stand-in writes what is asked of it."""
    folder = tmp_path / "stand_in"
    (folder / "mlflow").mkdir(parents=True)
    (folder / "mlflow/__init__.py").touch()
    (folder / "mlflow/tracking.py").write_text(STAND_IN)
    (folder / "mlflow/entities.py").write_text(
        "def Param(name, value): return name, value\n"
        "def Metric(name, value, at, step): return name, value\n"
    )
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("STAND_IN", str(folder))
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "canary-of-a-key")
    yield folder / "calls.jsonl"
    for name in ("mlflow", "mlflow.tracking", "mlflow.entities"):
        sys.modules.pop(name, None)


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
    lines = command("track", tmp_path / "checkpoints", "--mlflow", "http://texts").out.splitlines()
    assert lines == [
        "ConnectionError: no network, and the key is ***",
        "up to date again",
        "All is sent, and no task is at work.",
    ]
    *_, sent = made(calls, "log")
    assert sent["values"]["counts.read"] == 4
    assert [ended["status"] for ended in made(calls, "end")] == ["FINISHED"]
