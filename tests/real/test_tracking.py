"""Tracking with the real libraries: MLflow's own file store, and Weights & Biases offline.

They come from PyPI: pip install mlflow-skinny wandb.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from datatrove_ckpt.checkpoint.layout import HISTORY, rank_folder
from datatrove_ckpt.config import MonitoringConfig
from datatrove_ckpt.config.monitoring import TrackedJob
from datatrove_ckpt.generation.export import exporter
from datatrove_ckpt.testing import FakeServer
from tests.histories import read_history
from tests.integration.test_monitoring import no_tracking_left
from tests.jobs import documents, runner
from tests.pages import ROOT
from tests.unit.test_metrics import waited_for
from tests.yaml_jobs import ENDPOINT, job_yaml, write_job

mlflow_tracking = pytest.importorskip("mlflow.tracking")
pytest.importorskip("wandb")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(exporter, "_DONE_SECONDS", 120.0)  # importing MLflow takes long on a busy machine
    monkeypatch.setattr(exporter, "_STOPPED_SECONDS", 120.0)
    with no_tracking_left():
        yield


def runs_of(folder: Path, monkeypatch: pytest.MonkeyPatch, experiment: str = "texts") -> tuple[Any, list[Any]]:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = mlflow_tracking.MlflowClient(folder.as_uri())
    found = client.get_experiment_by_name(experiment)
    return client, [] if found is None else client.search_runs([found.experiment_id])


def status_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of the first run; "" if there is none, or while MLflow writes its file, which is empty for a moment."""
    with suppress(AttributeError, IndexError):
        return str(runs_of(folder, monkeypatch)[1][0].info.status)
    return ""


def test_a_job_that_is_killed_and_stopped_is_one_run_of_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_OF_TEST", "canary-of-a-key")
    with FakeServer() as server:
        config = f"{ENDPOINT.replace('URL', server.url)}, api_key_env: KEY_OF_TEST, max_concurrent_generations: 2"
        job = job_yaml(config, 2).replace("workers: 1", "workers: 2")
        tracking = f"{{run_name: books, mlflow_uri: {tmp_path}/runs, mlflow_experiment: texts}}"
        job += f"          records_per_chunk: 2\n          drain_seconds: 0\n          monitoring: {tracking}\n"
        write_job(tmp_path, job, *([f"{name}{number}" for number in range(20)] for name in "ab"))
        command = [sys.executable, "-m", "datatrove_ckpt", "run", "job.yaml"]
        for number in (signal.SIGKILL, signal.SIGTERM, None):
            server._hold_after = None if number is None else len(server.payloads) + 9
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL) as process:
                try:
                    if number is not None:
                        waited_for(lambda: len(server.payloads) >= server._hold_after + 1)
                        # In the second attempt, the process that sends has found the run again.
                        waited_for(lambda: status_of(tmp_path / "runs", monkeypatch) == "RUNNING")
                        process.send_signal(number)
                    assert process.wait(100) == {None: 0, signal.SIGKILL: -9, signal.SIGTERM: 143}[number]
                finally:
                    process.kill()
    # On a busy machine, MLflow is imported too late for the last attempt to send its end. The process that sends for
    # the run may still be at work: then ``track`` is refused.
    track = [*command[:-2], "track", "job.yaml"]
    waited_for(lambda: subprocess.run(track, cwd=tmp_path, env=environment).returncode == 0)
    assert status_of(tmp_path / "runs", monkeypatch) == "FINISHED"
    client, runs = runs_of(tmp_path / "runs", monkeypatch)
    (run,) = runs
    assert run.info.run_name == "books"
    assert run.data.params["config.model_name_or_path"] == "fake"
    assert run.data.params["config.api_key_env"] == "KEY_OF_TEST"
    assert run.data.params["run.tasks"] == "2"
    metrics = run.data.metrics
    assert (metrics["documents"], metrics["documents_written"], metrics["ranks_done"]) == (40, 40, 2)
    last = [read_history(rank_folder(tmp_path / "checkpoints", rank) / HISTORY).last for rank in (0, 1)]
    assert metrics["chunks"] == sum(one.chunks for one in last if one is not None) == 20
    assert metrics["completion_tokens"] == sum(one.total.completion_tokens for one in last if one is not None)
    points = client.get_metric_history(run.info.run_id, "documents")
    assert [point.value for point in points] == sorted(point.value for point in points)
    assert len({point.timestamp for point in points}) == len(points)
    for path in (tmp_path / "runs").rglob("*"):
        assert not path.is_file() or b"canary" not in path.read_bytes(), path


def test_a_setting_stays_as_it_was_at_first_and_a_job_that_started_over_is_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datatrove_ckpt.maintenance.tracking import MlflowRun, Point

    def job(temperature: str) -> TrackedJob:
        uri = (tmp_path / "runs").as_uri()
        return TrackedJob("id", "books", mlflow_uri=uri, parameters={"temperature": temperature})

    first = MlflowRun(job("0"), 1000.0)
    first.send(Point(1_060_000, {"documents": 1.0}))
    second = MlflowRun(job("0.5"), 1000.0)
    assert second.sent_until == 1_060_000
    second.send(Point(1_120_000, {"documents": 2.0}))
    second.sent_until = 1_120_000
    second.end("FINISHED")
    _, (run,) = runs_of(tmp_path / "runs", monkeypatch, "datatrove-ckpt")
    assert run.data.params["temperature"] == "0"
    assert run.data.metrics["documents"] == 2
    MlflowRun(job("0"), 1100.0).end("FINISHED")  # a rank that was late
    assert len(runs_of(tmp_path / "runs", monkeypatch, "datatrove-ckpt")[1]) == 1
    MlflowRun(job("0"), 5000.0)
    assert len(runs_of(tmp_path / "runs", monkeypatch, "datatrove-ckpt")[1]) == 2


def wandb_records(content: bytes) -> Iterator[bytes]:
    """Of a file in the format of LevelDB's log, after W&B's head of 7 bytes. Long records are divided at 32 kB."""
    at, found = 7, b""
    while at < len(content):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
        size, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        found += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield found
            found = b""


def test_wandb_takes_what_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: list[str]) -> None:
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", "canaryofakey" + 28 * "0")
    settings = MonitoringConfig(run_name="books", wandb_project="team/texts")
    with FakeServer() as server:
        runner(tmp_path, server, monitoring=settings).run(documents(4))
    (file,) = (tmp_path / "checkpoints/wandb").rglob("*.wandb")
    records = [wandb_internal_pb2.Record.FromString(data) for data in wandb_records(file.read_bytes())]
    (run,) = (record.run for record in records if record.HasField("run"))
    assert (run.display_name, run.project, run.entity) == ("books", "texts", "team")
    assert "config.model_name_or_path" in {item.key for item in run.config.update}
    values = {
        item.key or "/".join(item.nested_key): item.value_json
        for record in records
        if record.HasField("history")
        for item in record.history.item
    }
    assert (float(values["documents"]), float(values["ranks_done"])) == (4, 1)
    assert [record for record in records if record.HasField("exit")]
    for path in (tmp_path / "checkpoints/wandb").rglob("*"):
        assert path.is_symlink() or path.stat().st_mode & 0o077 == 0, path
        assert not path.is_file() or b"canary" not in path.read_bytes(), path
    assert [line for line in log if "monitoring" in line] == []
    assert os.environ["WANDB_API_KEY"]
