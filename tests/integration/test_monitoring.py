"""What a run tells others while it works: metrics at a port and in files, and nothing that could hold it up."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from datatrove_ckpt import InferenceRunner
from datatrove_ckpt.checkpoint.files import Lock, lock_holder
from datatrove_ckpt.config import MonitoringConfig
from datatrove_ckpt.config.monitoring import TrackedJob
from datatrove_ckpt.errors import CkptError, ConfigError
from datatrove_ckpt.generation.export import exporter, prometheus
from datatrove_ckpt.generation.export.exporter import Tracking
from datatrove_ckpt.testing import FakeServer
from tests.commands import Command
from tests.jobs import ask, config, documents, fails_at, runner, writer
from tests.pages import ROOT
from tests.processes import is_alive
from tests.unit.test_metrics import PORT, get, samples, waited_for
from tests.yaml_jobs import ENDPOINT, job_yaml, write_job


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> str:
    """An address of this machine's own that no other test has."""
    monkeypatch.setattr(prometheus, "_KEEP_ENDED_SECONDS", 3600.0)
    chance = random.SystemRandom()
    return f"127.{chance.randrange(1, 255)}.{chance.randrange(1, 255)}.{chance.randrange(1, 255)}"


def test_a_run_shows_its_numbers_while_it_works_and_at_its_end(tmp_path: Path, host: str, server: FakeServer) -> None:
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
    settings = MonitoringConfig(run_name="books", metrics_port=PORT, metrics_host=host, metrics_file=str(file))
    job = runner(
        tmp_path, server, rollout, config={"max_concurrent_generations": 1, "max_concurrent_documents": 2},
        monitoring=settings,
    )  # fmt: skip
    job.run(documents(6), 3, 7)
    assert [path.name for path in file.parent.iterdir()] == ["books_00003.prom"]
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


def run_in_turn(folder: Path, server: FakeServer, rollout: Any, number: int, *of: int, **settings: Any) -> None:
    """Documents one after another, to the end or, where the rollout is not ``ask``, to a failure."""
    in_turn = {"max_concurrent_documents": 1}
    job = runner(folder, server, rollout, config=in_turn, accept_changes=True, **settings)
    with nullcontext() if rollout is ask else pytest.raises(CkptError):
        job.run(documents(number), *of)


def test_after_a_failure_the_sums_are_of_all_attempts_and_the_counters_of_this_one(tmp_path: Path) -> None:
    settings = MonitoringConfig(metrics_file=str(tmp_path / "${rank}.prom"))
    found = []
    with FakeServer() as server:
        for rollout in (fails_at(["id 5"]), ask):
            run_in_turn(tmp_path, server, rollout, 8, monitoring=settings)
            found.append(samples((tmp_path / "00000.prom").read_text(), run=tmp_path.name))
    first, second = found
    assert (first["rank_state failed"], second["rank_state done"]) == (1, 1)
    assert (first["rank_documents written"], second["rank_documents written"]) == (5, 8)
    assert (first["documents_total"], second["documents_total"]) == (5, 3)
    assert (first["requests_total answered"], second["requests_total answered"]) == (5, 3)


def test_without_checkpoints_there_are_metrics_too(tmp_path: Path, server: FakeServer) -> None:
    job = runner(tmp_path, server, monitoring=MonitoringConfig(metrics_file=str(tmp_path / "a.prom")))
    job.checkpoints_local_dir = None
    job.run(documents(3))
    found = samples((tmp_path / "a_00000.prom").read_text(), run=tmp_path.name)
    assert found["rank_documents written"] == found["documents_total"] == 3
    assert found["rank_state done"] == 1


MONITORING = """\
          monitoring:
            metrics_port: %d
            metrics_host: %s
            metrics_file: $PROM_FOLDER/books.prom
"""


def write_files(folder: Path, url: str, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of two tasks with metrics at a port and in files, in the working directory."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PROM_FOLDER", str(folder / "prom"))
    (folder / "prom").mkdir()
    text = job_yaml(ENDPOINT.replace("URL", url), tasks=2).replace("workers: 1", "workers: 2")
    write_job(folder, text + MONITORING % (PORT, host), "a", "b")


@pytest.mark.slow
def test_each_worker_of_a_command_has_a_port_of_its_own(
    tmp_path: Path, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeServer(hold_after=0) as server:
        write_files(tmp_path, server.url, host, monkeypatch)
        command = [sys.executable, "-m", "datatrove_ckpt", "run", "job.yaml"]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
            try:
                ports = PORT, PORT + 1
                for rank in (0, 1):
                    line = f'requests_in_flight{{rank="{rank}",run="{tmp_path.name}"}} 1.0'
                    waited_for(lambda line=line: [port for port in ports if line in get(host, port)])
                server.release()
                assert process.wait() == 0
            finally:
                process.kill()
    for rank in "01":
        found = samples((tmp_path / f"prom/books_0000{rank}.prom").read_text(), rank=rank)
        assert (found["rank_state done"], found["documents_total"]) == (1, 1)


def test_a_missing_package_is_said_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: FakeServer
) -> None:
    monkeypatch.setattr("datatrove_ckpt.formatting.find_spec", lambda name: None)
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


@pytest.mark.slow
def test_doctor_finds_a_missing_package(
    tmp_path: Path, server: FakeServer, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    write_files(tmp_path, server.url, "127.0.0.1", monkeypatch)
    printed = command("doctor", "job.yaml", "--all", code=None).out
    assert "ok       monitoring, ready: everything that it needs is installed here." in printed
    monkeypatch.setenv("PROM_FOLDER", str(tmp_path / "missing"))
    said = command("doctor", "job.yaml", code=None).out
    assert f"warning  monitoring, ready: monitoring.metrics_file: there is no folder {tmp_path}/missing here" in said
    monkeypatch.setattr("datatrove_ckpt.formatting.find_spec", lambda name: None)
    printed = command("doctor", "job.yaml", code=1).out
    assert "problem  monitoring, checked: monitoring: metrics_port and metrics_file" in printed


def test_tracking_needs_checkpoints(tmp_path: Path, server: FakeServer) -> None:
    settings = MonitoringConfig(wandb_project="books")
    with pytest.raises(ConfigError, match=r"what MLflow .* is kept with checkpoints; set checkpoints_local_dir\."):
        InferenceRunner(ask, config(server), writer(tmp_path), monitoring=settings)


# jobs that are tracked -----------------------------------------------------------------------------------------------

STAND_IN = """
import json, os, sys, time
from pathlib import Path

FOLDER = Path(os.environ["STAND_IN"])

def note(**fields):
    with (FOLDER / "calls.jsonl").open("a") as file:
        file.write(json.dumps({"pid": os.getpid(), **fields}) + "\\n")

print("noise on standard output")
if os.environ.get("STAND_IN_DOES") == "hang":
    note(call="hang")
    while True:
        time.sleep(1000)
if os.environ.get("STAND_IN_DOES") == "crash":
    os._exit(7)

class Settings:
    def __init__(self, **settings):
        pass

class Run:
    def __init__(self, id):
        self.id = id
        self._kept = FOLDER / f"{id}.json"
        self.summary = json.loads(self._kept.read_text()) if self._kept.exists() else {}
    def define_metric(self, name, **settings):
        pass
    def log(self, values):
        self.summary |= values
        self._kept.write_text(json.dumps(self.summary))
        note(call="log", id=self.id, values=values)
    def finish(self, exit_code):
        note(call="finish", id=self.id, status=self.summary["status"], exit_code=exit_code)

def init(**settings):
    note(call="init", **{name: settings[name] for name in ("id", "project", "entity", "name", "config", "resume")})
    if os.environ.get("STAND_IN_DOES") == "fail":
        raise ConnectionError("no network, and the key is canary-of-a-key")
    return Run(settings["id"])
"""


@contextmanager
def no_tracking_left() -> Iterator[None]:
    """Ends all of this process at the end of the block."""
    try:
        yield
    finally:
        for one in exporter._jobs.values():
            if (sender := one.sender) is not None:  # its thread may set it to None meanwhile
                with sender:
                    sender.kill()
        exporter._jobs.clear()


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the stand-in writes what is asked of it."""
    folder = tmp_path / "stand_in"
    folder.mkdir()
    (folder / "wandb.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setenv("STAND_IN", str(folder))
    monkeypatch.setenv("WANDB_API_KEY", "canary-of-a-key")
    monkeypatch.setattr(exporter, "_DONE_SECONDS", 3600.0)  # on a busy machine an import takes long
    monkeypatch.setattr(exporter, "_STOPPED_SECONDS", 3600.0)
    with no_tracking_left():
        yield folder / "calls.jsonl"
    sys.modules.pop("wandb", None)


def made(calls: Path, call: str | None = None) -> list[dict[str, Any]]:
    """The calls of this name, or all."""
    found = [json.loads(line) for line in calls.read_text().splitlines()] if calls.exists() else []
    return [one for one in found if call in (None, one["call"])]


TRACKED = MonitoringConfig(run_name="books", wandb_project="team/texts")


def test_all_ranks_and_attempts_are_one_run(tmp_path: Path, calls: Path, log: list[str], server: FakeServer) -> None:
    for rollout, rank in itertools.product((fails_at(["id 3"]), ask), (0, 1)):
        with no_tracking_left():  # as if each were a command of its own
            run_in_turn(tmp_path, server, rollout, 5, rank, 2, monitoring=TRACKED)
    inits = made(calls, "init")
    assert len({(one["id"], one["project"], one["entity"], one["name"], one["resume"]) for one in inits}) == 1
    assert (inits[0]["project"], inits[0]["entity"], inits[0]["name"]) == ("texts", "team", "books")
    assert len({one["pid"] for one in inits}) == 4
    sums = [one["values"]["documents"] for one in made(calls, "log")]
    assert sums[-1] == 10
    assert sums == sorted(sums)
    assert len({one["values"]["at"] for one in made(calls, "log")}) == len(sums), "no point twice"
    assert made(calls)[-1] == made(calls, "finish")[-1]
    assert (made(calls)[-1]["status"], made(calls)[-1]["exit_code"]) == ("FINISHED", 0)
    assert [line for line in log if "monitoring" in line] == []


def test_settings_are_parameters_and_secrets_are_not(
    tmp_path: Path, calls: Path, monkeypatch: pytest.MonkeyPatch, server: FakeServer
) -> None:
    monkeypatch.setenv("KEY_OF_TEST", "canary-of-a-key")
    parameters = {"temperature": 0.5, "token": "canary-of-a-key"}
    settings = {"api_key_env": "KEY_OF_TEST", "default_generation_params": parameters}
    runner(tmp_path, server, config=settings, monitoring=TRACKED).run(documents(2))
    (init,) = made(calls, "init")
    assert init["config"]["config.default_generation_params.temperature"] == "0.5"
    assert init["config"]["config.default_generation_params.token"] == "***"
    assert init["config"]["config.api_key_env"] == "KEY_OF_TEST"
    assert init["config"]["run.records_per_chunk"] == "2"
    assert "canary" not in calls.read_text()


def test_a_library_that_hangs_is_given_up_and_ends_with_the_run(
    tmp_path: Path, calls: Path, monkeypatch: pytest.MonkeyPatch, log: list[str], server: FakeServer
) -> None:
    monkeypatch.setenv("STAND_IN_DOES", "hang")
    monkeypatch.setattr(exporter, "_DONE_SECONDS", 0.2)
    runner(tmp_path, server, monitoring=TRACKED).run(documents(2))
    assert [line for line in log if "Weights & Biases has not confirmed the end of this attempt within" in line]
    assert [line for line in log if line.startswith("SUCCESS")]
    (hanging,) = waited_for(lambda: made(calls))
    with no_tracking_left():  # as at the end of the process
        pass
    with pytest.raises(ProcessLookupError):
        os.kill(hanging["pid"], 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("does", "said"),
    [("fail", "ConnectionError: no network, and the key is ***. The run goes on"), ("crash", "ended with code 7")],
)
def test_a_library_that_fails_is_said_once_without_secrets(
    tmp_path: Path, calls: Path, monkeypatch: pytest.MonkeyPatch, log: list[str], does: str, said: str
) -> None:
    monkeypatch.setenv("STAND_IN_DOES", does)
    with FakeServer() as server:
        for rank in range(3):
            runner(tmp_path, server, monitoring=TRACKED).run(documents(2), rank, 3)
    warnings = [line for line in log if "could not be sent to Weights & Biases" in line]
    assert len(warnings) == 1
    assert said in warnings[0]


def job(tmp_path: Path) -> Tracking:
    """As each process of one has it."""
    (tmp_path / "checkpoints").mkdir(exist_ok=True)
    return Tracking(tmp_path / "checkpoints", TrackedJob("id", "run", wandb_project="texts"))


def sender(folder: Path, but: int | None = None) -> int:
    """The process that sends, once it is another one than ``but``."""

    def found() -> int | None:
        pid = (lock_holder(folder / "checkpoints/tracking.lock") or {}).get("pid")
        return None if pid == but else pid

    return int(waited_for(found))


@pytest.mark.slow
def test_one_process_of_a_job_sends_and_another_one_follows(
    tmp_path: Path, calls: Path, monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    monkeypatch.setattr(exporter, "_LOOK_SECONDS", 0.05)
    first, second = job(tmp_path), job(tmp_path)
    first.join()
    before = sender(tmp_path)
    second.join()
    assert second.sender is None
    os.kill(before, signal.SIGKILL)
    after = sender(tmp_path, but=before)
    assert "its process has ended with code -9" in log[0]
    first._ranks = second._ranks = 0
    os.kill(after, signal.SIGKILL)
    for one in (first, second):
        with one._lock:
            if one.sender is not None:
                with one.sender:
                    pass


WORKER = """
import sys, threading
from tests.integration.test_monitoring import job
from pathlib import Path
one = job(Path(sys.argv[1]))
one.join()
threading.Event().wait()
"""


@pytest.mark.slow
def test_nothing_outlives_a_worker_that_was_killed(tmp_path: Path, calls: Path) -> None:
    command = [sys.executable, "-c", WORKER, str(tmp_path)]
    environment = {**os.environ, "STAND_IN_DOES": "hang", "PYTHONPATH": f"{calls.parent}{os.pathsep}{ROOT}"}
    with subprocess.Popen(command, cwd=ROOT, env=environment) as worker:
        pid = sender(tmp_path)
        worker.kill()
    waited_for(lambda: not is_alive(pid))


@pytest.mark.slow
def test_the_command_sends_what_an_outage_left_behind(
    tmp_path: Path, calls: Path, monkeypatch: pytest.MonkeyPatch, server: FakeServer, command: Command
) -> None:
    monkeypatch.setenv("STAND_IN_DOES", "fail")
    with no_tracking_left():
        runner(tmp_path, server, monitoring=TRACKED).run(documents(4))
    monkeypatch.delenv("STAND_IN_DOES")
    checkpoints = tmp_path / "checkpoints"
    for _ in range(2):
        assert command("track", checkpoints).out.endswith("books: all is sent, and no task is at work.\n")
    values = [one["values"] for one in made(calls, "log")]  # two, if a minute began in the middle
    assert (values[-1]["documents"], values[-1]["ranks_done"]) == (4, 1)
    assert len({one["at"] for one in values}) == len(values), "no point twice"
    assert len({one["id"] for one in made(calls, "init")}) == 1
    assert (checkpoints / "tracking.json").stat().st_mode & 0o077 == 0, "it holds the prompt"
    assert "canary" not in (checkpoints / "tracking.json").read_text()
    lock = Lock(checkpoints / "tracking.lock")
    assert "sends this job already" in command("track", checkpoints, code=1).err
    lock.release()
    (checkpoints / "tracking.json").unlink()
    assert "no run was started there with monitoring.mlflow_uri" in command("track", checkpoints, code=2).err


@pytest.mark.slow
def test_with_the_file_of_the_run_the_command_reads_the_mirror(
    tmp_path: Path, calls: Path, monkeypatch: pytest.MonkeyPatch, server: FakeServer, command: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    text = job_yaml(ENDPOINT.replace("URL", server.url), tasks=1)
    text += "          checkpoints_remote_dir: mirror\n          monitoring: {wandb_project: team/texts}\n"
    write_job(tmp_path, text, "a")
    with no_tracking_left():
        command("run", "job.yaml")
    (run,) = made(calls, "init")
    shutil.rmtree("checkpoints")
    (calls.parent / f"{run['id']}.json").unlink()
    command("track", "job.yaml")
    _, again = made(calls, "init")
    assert (again["id"], again["name"]) == (run["id"], run["name"])
    values = [one["values"] for one in made(calls, "log")]
    assert values[-1] == values[-2], "the last point of the run"
    assert "give the YAML file" in command("track", "mirror", code=2).err
    assert "does not exist" in command("track", "nowhere", code=2).err
