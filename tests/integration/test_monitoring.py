"""What a run tells others while it works: metrics at a port and in files, and nothing that could hold it up."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from datatrove_ckpt import InferenceRunner
from datatrove_ckpt.cli.main import main
from datatrove_ckpt.config import MonitoringConfig
from datatrove_ckpt.errors import CkptError, ConfigError
from datatrove_ckpt.generation.export import exporter, metrics_port
from datatrove_ckpt.testing import FakeServer
from tests.jobs import ask, config, documents, runner, writer
from tests.unit.test_metrics import PORT, close_metrics_ports, get, samples, waited_for
from tests.yaml_jobs import ENDPOINT, job_yaml, write_job


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An address of this machine's own that no other test has."""
    monkeypatch.setattr(metrics_port, "_KEEP_ENDED_SECONDS", 3600.0)
    chance = random.SystemRandom()
    yield f"127.{chance.randrange(1, 255)}.{chance.randrange(1, 255)}.{chance.randrange(1, 255)}"
    close_metrics_ports()


def test_a_run_shows_its_numbers_while_it_works_and_at_its_end(tmp_path: Path, host: str) -> None:
    seen: dict[str, float] = {}

    async def rollout(document: Any, generate: Any) -> Any:
        if document.id == "id 5":
            seen.update(await asyncio.to_thread(waited_for, lambda: running(host)))
        return await ask(document, generate)

    def running(host: str) -> dict[str, float] | None:
        found = samples(get(host))
        return found if found.get("documents_total") == 5 else None

    file = tmp_path / "node/books.prom"
    file.parent.mkdir()
    settings = MonitoringConfig(
        run_name="books", metrics_port=PORT, metrics_host=host, metrics_file=str(file), metrics_file_seconds=0.05
    )
    with FakeServer() as server:
        job = runner(
            tmp_path, server, rollout, config={"max_concurrent_generations": 1, "max_concurrent_documents": 2},
            monitoring=settings,
        )  # fmt: skip
        job.run(documents(6), 3, 7)
    assert seen["rank_state running"] == 1
    assert seen["requests_total answered"] == 5
    assert seen["documents_in_progress"] == 1
    assert seen["request_duration_seconds_count"] == 5
    for found in (samples(get(host), rank="3"), samples((file.parent / "books_00003.prom").read_text(), run="books")):
        assert found["rank_state done"] == 1
        assert found["rank_documents written"] == found["documents_total"] == found["requests_total answered"] == 6
        assert found["rank_chunks"] == 3
        assert found["rank_tokens completion"] == found["tokens_total completion"] > 0
        assert found["documents_in_progress"] == found["requests_in_flight"] == 0


def test_after_a_failure_the_sums_are_of_all_attempts_and_the_counters_of_this_one(tmp_path: Path) -> None:
    async def fails_at_5(document: Any, generate: Any) -> Any:
        if document.id == "id 5" and failing:
            raise ValueError("not today")
        return await ask(document, generate)

    settings = MonitoringConfig(metrics_file=str(tmp_path / "${rank}.prom"))
    found = []
    with FakeServer() as server:
        for failing in (True, False):
            job = runner(
                tmp_path, server, fails_at_5, config={"max_concurrent_documents": 1}, monitoring=settings,
                accept_changes=True,
            )  # fmt: skip
            try:
                job.run(documents(8))
            except CkptError:
                assert failing
            found.append(samples((tmp_path / "00000.prom").read_text(), run=tmp_path.name))
    first, second = found
    assert (first["rank_state failed"], second["rank_state done"]) == (1, 1)
    assert (first["rank_documents written"], second["rank_documents written"]) == (5, 8)
    assert (first["documents_total"], second["documents_total"]) == (5, 3)
    assert (first["requests_total answered"], second["requests_total answered"]) == (5, 3)


def test_without_checkpoints_there_are_metrics_too(tmp_path: Path) -> None:
    with FakeServer() as server:
        job = runner(tmp_path, server, monitoring=MonitoringConfig(metrics_file=str(tmp_path / "a.prom")))
        job.checkpoints_local_dir = None
        job.run(documents(3))
    found = samples((tmp_path / "a_00000.prom").read_text(), run="output")
    assert found["rank_documents written"] == found["documents_total"] == 3
    assert found["rank_state done"] == 1


MONITORING = "          monitoring: {metrics_port: %d, metrics_host: %s, metrics_file: $PROM_FOLDER/books.prom}\n"


def write_files(folder: Path, url: str, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of two tasks with metrics at a port and in files, in the working directory."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PROM_FOLDER", str(folder / "prom"))
    (folder / "prom").mkdir()
    text = job_yaml(ENDPOINT.replace("URL", url), tasks=2).replace("workers: 1", "workers: 2")
    write_job(folder, text + MONITORING % (PORT, host), "a", "b")


@pytest.mark.slow
def test_all_ranks_of_a_command_are_at_one_port(tmp_path: Path, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeServer(hold_after=0) as server:
        write_files(tmp_path, server.url, host, monkeypatch)
        command = [sys.executable, "-m", "datatrove_ckpt", "run", "job.yaml"]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
            try:
                waited_for(lambda: get(host).count('requests_in_flight{rank="0",run="' + tmp_path.name + '"} 1.0'))
                waited_for(lambda: get(host).count('requests_in_flight{rank="1",run="' + tmp_path.name + '"} 1.0'))
                server.release()
                assert process.wait() == 0
            finally:
                process.kill()
    for rank in "01":
        found = samples((tmp_path / f"prom/books_0000{rank}.prom").read_text(), rank=rank)
        assert (found["rank_state done"], found["documents_total"]) == (1, 1)


def test_a_missing_package_is_said_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("datatrove_ckpt.formatting.find_spec", lambda name: None)
    with FakeServer() as server:
        for settings, extra in (
            ({"metrics_port": PORT}, "metrics"),
            ({"metrics_file": "a.prom"}, "metrics"),
            ({"mlflow_uri": "runs"}, "mlflow"),
            ({"wandb_project": "books"}, "wandb"),
        ):
            job = runner(tmp_path, server, monitoring=MonitoringConfig(**settings))
            with pytest.raises(ConfigError, match=rf"monitoring.*pip install 'datatrove-ckpt\[{extra}\]'"):
                job.run(documents(1))
    assert not server.payloads


@pytest.mark.parametrize("uri", ["sqlite:///runs.db", "postgresql+psycopg2://host/runs", "mssql://host/runs"])
def test_a_database_needs_all_of_mlflow(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, object] = {"mlflow": True}
    monkeypatch.setattr("datatrove_ckpt.formatting.find_spec", found.get)
    monkeypatch.setattr(exporter, "find_spec", found.get)
    with pytest.raises(ConfigError, match=r"names a database.*pip install mlflow\."):
        exporter.check_monitoring(MonitoringConfig(mlflow_uri=uri))
    exporter.check_monitoring(MonitoringConfig(mlflow_uri="http://127.0.0.1:5000"))
    found["sqlalchemy"] = True
    exporter.check_monitoring(MonitoringConfig(mlflow_uri=uri))


@pytest.mark.slow
def test_doctor_finds_a_missing_package(
    tmp_path: Path, server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_files(tmp_path, server.url, "127.0.0.1", monkeypatch)
    main(["doctor", "job.yaml"])
    assert "ok       monitoring, ready: everything that it needs is installed here." in capsys.readouterr().out
    monkeypatch.setenv("PROM_FOLDER", str(tmp_path / "missing"))
    main(["doctor", "job.yaml"])
    said = capsys.readouterr().out
    assert f"warning  monitoring, ready: monitoring.metrics_file: there is no folder {tmp_path}/missing here" in said
    monkeypatch.setattr("datatrove_ckpt.formatting.find_spec", lambda name: None)
    assert main(["doctor", "job.yaml"]) == 1
    assert "problem  monitoring, checked: monitoring: metrics_port and metrics_file" in capsys.readouterr().out


def test_tracking_needs_checkpoints(tmp_path: Path, server: FakeServer) -> None:
    settings = MonitoringConfig(wandb_project="books")
    with pytest.raises(ConfigError, match=r"what MLflow .* is kept with checkpoints; set checkpoints_local_dir\."):
        InferenceRunner(ask, config(server), writer(tmp_path), monitoring=settings)
