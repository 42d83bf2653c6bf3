"""What a run tells others while it works: metrics at a port and in files, and nothing that could hold it up."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from datatrove_ckpt import InferenceRunner
from datatrove_ckpt.checkpoint.open_checkpoint import OpenCheckpoint
from datatrove_ckpt.cli.main import main
from datatrove_ckpt.config import MonitoringConfig
from datatrove_ckpt.errors import CkptError, ConfigError
from datatrove_ckpt.generation.export import exporter, metrics_port
from datatrove_ckpt.generation.export.metrics import RANK_LABELS, Snapshot
from datatrove_ckpt.generation.export.metrics_file import MetricsFile
from datatrove_ckpt.testing import FakeServer
from tests.bench import metrics_cost
from tests.jobs import ask, config, documents, runner, writer
from tests.pages import ROOT
from tests.unit.test_metrics import PORT, close_metrics_ports, get, samples, waited_for


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


def test_ranks_that_follow_each_other_in_one_process_are_shown_together(tmp_path: Path, host: str) -> None:
    settings = MonitoringConfig(metrics_port=PORT, metrics_host=host)
    with FakeServer() as server:
        for rank in range(3):
            runner(tmp_path, server, monitoring=settings).run(documents(rank + 1), rank, 3)
    found = waited_for(lambda: get(host))
    assert [samples(found, rank=str(rank))["documents_total"] for rank in range(3)] == [1, 2, 3]


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


JOB = """
executor:
  class_path: LocalPipelineExecutor
  init_args:
    tasks: 2
    workers: 2
    logging_dir: {folder}/logs
    pipeline:
      - class_path: JsonlReader
        init_args: {{data_folder: {folder}/documents}}
      - class_path: InferenceRunner
        init_args:
          rollout_fn: chat
          config: {{server_type: endpoint, endpoint_url: "{url}", model_name_or_path: fake}}
          output_writer:
            class_path: JsonlWriter
            init_args: {{output_folder: {folder}/output, output_filename: "${{rank}}_${{chunk_index}}.jsonl"}}
          checkpoints_local_dir: {folder}/checkpoints
          monitoring: {{metrics_port: {port}, metrics_host: {host}, metrics_file: $PROM_FOLDER/books.prom}}
"""


def test_all_ranks_of_a_command_are_at_one_port(tmp_path: Path, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROM_FOLDER", str(tmp_path / "prom"))
    (tmp_path / "prom").mkdir()
    (tmp_path / "documents").mkdir()
    for name in "ab":
        (tmp_path / f"documents/{name}.jsonl").write_text(f'{{"text": "{name}", "id": "{name}"}}\n')
    with FakeServer(hold_after=0) as server:
        text = JOB.format(folder=tmp_path, url=server.url, host=host, port=PORT)
        (tmp_path / "job.yaml").write_text(text)
        command = [sys.executable, "-m", "datatrove_ckpt", "run", str(tmp_path / "job.yaml")]
        with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
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


def test_doctor_finds_a_missing_package(
    tmp_path: Path, server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "documents").mkdir()
    (tmp_path / "documents/a.jsonl").write_text('{"text": "a", "id": "a"}\n')
    (tmp_path / "prom").mkdir()
    monkeypatch.setenv("PROM_FOLDER", str(tmp_path / "prom"))
    path = tmp_path / "job.yaml"
    path.write_text(JOB.format(folder=tmp_path, url=server.url, host="127.0.0.1", port=PORT))
    main(["doctor", str(path)])
    assert "ok       monitoring, ready: everything that it needs is installed here." in capsys.readouterr().out
    monkeypatch.setenv("PROM_FOLDER", str(tmp_path / "missing"))
    main(["doctor", str(path)])
    said = capsys.readouterr().out
    assert f"warning  monitoring, ready: monitoring.metrics_file: there is no folder {tmp_path}/missing here" in said
    monkeypatch.setattr("datatrove_ckpt.formatting.find_spec", lambda name: None)
    assert main(["doctor", str(path)]) == 1
    assert "problem  monitoring, checked: monitoring: metrics_port and metrics_file" in capsys.readouterr().out


def test_tracking_needs_checkpoints(tmp_path: Path, server: FakeServer) -> None:
    settings = MonitoringConfig(wandb_project="books")
    with pytest.raises(ConfigError, match=r"what MLflow .* is kept with checkpoints; set checkpoints_local_dir\."):
        InferenceRunner(ask, config(server), writer(tmp_path), monitoring=settings)


@pytest.mark.slow
def test_the_measure_of_the_costs_works(capsys: pytest.CaptureFixture[str]) -> None:
    metrics_cost.main(50, 1)
    said = capsys.readouterr().out
    assert "CPU: " in said
    assert "ratio: " in said
    assert "One scrape of 64 ranks" in said


def test_a_rank_whose_checkpoint_cannot_be_closed_is_shown_as_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(checkpoint: OpenCheckpoint, completed: bool) -> None:
        close(checkpoint, completed)
        raise OSError("the disk is gone")

    close = OpenCheckpoint.close
    monkeypatch.setattr(OpenCheckpoint, "close", fails)
    settings = MonitoringConfig(metrics_file=str(tmp_path / "a.prom"))
    with FakeServer() as server, pytest.raises(OSError, match="the disk is gone"):
        runner(tmp_path, server, monitoring=settings).run(documents(2))
    assert samples((tmp_path / "a_00000.prom").read_text())["rank_state failed"] == 1


def test_prometheus_client_is_loaded_before_threads_use_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads that import it at the same moment may each see half of it."""
    called: list[str] = []
    start = MetricsFile.start

    def started(file: MetricsFile) -> None:
        called.append("start")
        start(file)

    monkeypatch.setattr(exporter.prometheus, "load", lambda: called.append("load"))
    monkeypatch.setattr(MetricsFile, "start", started)
    settings = MonitoringConfig(metrics_file=str(tmp_path / "a.prom"))
    with FakeServer() as server:
        runner(tmp_path, server, monitoring=settings).run(documents(2))
    assert called == ["load", "start"]


def test_the_last_version_of_a_metrics_file_is_written_whatever_failed_before(tmp_path: Path, log: list[str]) -> None:
    asked = threading.Event()

    def snapshot() -> Snapshot:
        if not asked.is_set():
            asked.set()
            raise ImportError("partially initialized module")
        return {"labels": dict.fromkeys(RANK_LABELS, ""), "values": {}}

    file = MetricsFile(str(tmp_path / "a.prom"), 3600, 0, snapshot)
    file.start()
    assert asked.wait(600)
    file.end()
    assert (tmp_path / "a_00000.prom").read_text().startswith("# datatrove-ckpt: ended")
    assert sum("metrics_file" in line for line in log) == 1
