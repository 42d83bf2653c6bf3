"""A rank's metrics: their names, their text, node_exporter's file, and the port that all ranks of a node share."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from datatrove_ckpt.checkpoint.history_records import Buckets, Spread
from datatrove_ckpt.config import MonitoringConfig
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.generation.export import metrics_port
from datatrove_ckpt.generation.export.metrics import METRICS, PREFIX, RANK_LABELS, RankLabels, Snapshot
from datatrove_ckpt.generation.export.metrics_file import MetricsFile, metrics_path
from datatrove_ckpt.generation.export.metrics_port import MetricsPort
from datatrove_ckpt.generation.export.prometheus import encoded, exposition
from tests.histories import progress
from tests.pages import ROOT

LONG = 3600.0  # seconds: however busy the machine is


def labels(rank: int = 3, run: str = "my run") -> RankLabels:
    return RankLabels(run, rank, "1.2.3", "node7", "4711_5", 1000.0, 8)


def buckets(*values: float) -> Buckets:
    found = Buckets()
    for value in values:
        found.count(value)
    return found


def spread() -> Spread:
    return Spread(
        milliseconds=buckets(0.5, 1.5, 100, 3000), prompt_tokens=buckets(10, 100), completion_tokens=buckets(5)
    )


def snapshot(rank: int = 3, state: str = "running", documents: int = 7, run: str = "my run") -> Snapshot:
    return labels(rank, run).snapshot(state, 1234.5, progress(documents), spread())


def samples(text: str, **wanted: str) -> dict[str, float]:
    """By name and further labels: those of one rank."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            own = {name: value for name, value in sample.labels.items() if name not in RANK_LABELS}
            if all(sample.labels[name] == value for name, value in wanted.items()):
                shown = "".join(f" {value}" for _, value in sorted(own.items()))
                found[sample.name.removeprefix(PREFIX) + shown] = sample.value
    return found


# names and text ------------------------------------------------------------------------------------------------------


def test_names_follow_the_conventions_of_prometheus() -> None:
    for name, metric in METRICS.items():
        assert re.fullmatch(r"datatrove_ckpt(_[a-z]+)+", name)
        assert name.endswith("_total") == (metric.kind == "counter"), name
        assert not re.search("_(ms|minutes|kb|percent|count|sum|bucket|created)$", name), "base units, no own suffixes"
        assert not {"le", "quantile", "job", "instance", *RANK_LABELS} & set(metric.labels) or name.endswith("_info")
        assert metric.help.endswith(".")


def test_the_text_says_what_the_rank_did() -> None:
    found = samples(exposition([snapshot()]).decode(), run="my run", rank="3")
    assert found["rank_info node7 4711_5 1.2.3"] == 1
    assert [found[f"rank_state {state}"] for state in ("starting", "running", "done")] == [0, 1, 0]
    assert found["rank_seconds inference"] == 8.5
    assert [found[f"rank_documents {outcome}"] for outcome in ("written", "dropped", "dead")] == [35, 3, 2]
    assert (found["rank_tokens prompt"], found["rank_tokens completion"]) == (500, 250)
    assert (found["input_done_ratio"], found["input_done_bytes"], found["input_size_bytes"]) == (0.25, 25, 100)
    assert "input_done_rows" not in found
    assert found["documents_total"] == 7
    assert (found["requests_total answered"], found["requests_total failed"]) == (10, 2)
    assert (found["requests_in_flight"], found["requests_waiting"], found["documents_in_progress"]) == (5, 6, 8)
    assert (found["request_errors_total timeout"], found["request_errors_total HTTP 503"]) == (2, 3)
    assert (found["request_retries_total error"], found["request_retries_total server_lost"]) == (4, 1)
    assert found["job_ranks"] == 8
    assert found["updated_timestamp_seconds"] == 1234.5


def test_a_histogram_has_every_value_below_its_ends() -> None:
    found = samples(exposition([snapshot()]).decode())
    ends = {name.split()[1]: value for name, value in found.items() if name.startswith("request_duration_seconds_b")}
    assert [ends[end] for end in ("0.001", "0.002", "0.064", "0.128", "4.096", "+Inf")] == [1, 2, 2, 3, 4, 4]
    assert found["request_duration_seconds_count"] == 4
    assert found["request_duration_seconds_sum"] == pytest.approx(3.102, rel=0.1)
    assert found["request_completion_tokens_bucket 8.0"] == 1


def test_every_metric_is_shown_and_each_family_once_for_all_ranks() -> None:
    rows = snapshot(5)
    rows["values"] |= {f"{PREFIX}input_done_rows": [[[], 1]], f"{PREFIX}input_size_rows": [[[], 2]]}
    text = exposition([snapshot(3), orjson.loads(orjson.dumps(rows))]).decode()
    types = re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE)
    assert types == list(METRICS)
    assert samples(text, rank="5")["documents_total"] == 7


def test_openmetrics_is_sent_to_who_asks_for_it() -> None:
    text, kind = encoded([snapshot()], "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5")
    assert kind.startswith("application/openmetrics-text")
    assert {family.name for family in openmetrics.text_string_to_metric_families(text.decode())} >= {
        "datatrove_ckpt_documents"
    }
    assert encoded([snapshot()], "")[1].startswith("text/plain")


# settings ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"metrics_port": 70000}, "monitoring.metrics_port: must be from 1 to 65535; it is 70000."),
        ({"metrics_file": "metrics.txt"}, "monitoring.metrics_file: must end in .prom"),
        ({"metrics_file_seconds": 0}, "monitoring.metrics_file_seconds: must be positive; it is 0."),
        ({"run_name": " "}, "monitoring.run_name: is empty"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(error)}"):
        MonitoringConfig(**settings)


def test_a_run_is_named_after_its_folder() -> None:
    name_of_run = MonitoringConfig().name_of_run
    assert name_of_run(Path("/a/books/checkpoints"), "/a/books/output") == "books"
    assert name_of_run(Path("/a/books"), "") == "books"
    assert name_of_run(Path("/checkpoints"), "") == "checkpoints"
    assert name_of_run(None, "s3://bucket/books/") == "books"
    assert MonitoringConfig(run_name="mine").name_of_run(Path("/a/books"), "") == "mine"


# the file ------------------------------------------------------------------------------------------------------------


def waited_for(condition: Callable[[], Any]) -> Any:
    """What it returns once it is true. A test's own time limit ends the wait."""
    while not (found := condition()):
        time.sleep(0.01)
    return found


def test_each_rank_has_a_file_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOLDER", "/prom")
    assert metrics_path("$FOLDER/books.prom", 3) == Path("/prom/books_00003.prom")
    assert metrics_path("/prom/${rank}-books.prom", 12) == Path("/prom/00012-books.prom")
    with pytest.raises(ConfigError, match="metrics_file"):
        metrics_path("$NOT_SET/books.prom", 3)


def test_the_file_appears_at_once_changes_and_stays_with_the_end(tmp_path: Path) -> None:
    documents = iter(range(1, 1000))
    state = "running"
    file = MetricsFile(
        str(tmp_path / "books.prom"), 0.01, 3, lambda: snapshot(state=state, documents=next(documents, 1000))
    )
    file.start()

    def shown() -> dict[str, float]:
        return samples(file.path.read_text()) if file.path.exists() else {}

    first = waited_for(shown)["documents_total"]
    waited_for(lambda: shown()["documents_total"] > first)
    assert file.path.stat().st_mode & 0o777 == 0o644, "node_exporter is another user"
    state = "done"
    file.end()
    assert shown()["rank_state done"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["books_00003.prom"]


def test_files_of_the_killed_and_of_those_long_ended_are_removed(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    here = socket.gethostname()
    heads = {
        "1": f"ended, process 1 on {here}",
        "2": f"ended, process 1 on {here}",  # just now
        "3": f"running, process {ended.pid} on {here}",
        "4": f"running, process {os.getpid()} on {here}",
        "5": f"running, process {ended.pid} on elsewhere",
    }
    for number, head in heads.items():
        (tmp_path / f"books_{number}.prom").write_text(f"# datatrove-ckpt: {head}\nx 1\n")
    (tmp_path / "books_6.prom").write_text("somebody_elses 1\n")
    (tmp_path / "other_1.prom").write_text((tmp_path / "books_1.prom").read_text())
    for name in ("books_1.prom", "other_1.prom"):
        os.utime(tmp_path / name, (1, 1))
    file = MetricsFile(str(tmp_path / "books.prom"), LONG, 7, snapshot)
    file.start()
    file.end()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {*(f"books_{number}.prom" for number in (2, 4, 5, 6)), "other_1.prom", "books_00007.prom"}


def test_a_folder_that_is_missing_is_said_once_and_the_run_goes_on(tmp_path: Path, log: list[str]) -> None:
    written: list[int] = []
    file = MetricsFile(str(tmp_path / "gone/a.prom"), 0.01, 3, lambda: written.append(1) or snapshot())  # type: ignore[func-returns-value]
    file.start()
    waited_for(lambda: len(written) > 2)
    file.end()
    assert len([line for line in log if "cannot be written: No such file or directory" in line]) == 1


# the port ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def host() -> str:
    """An address of this machine's own that no other test has."""
    chance = random.SystemRandom()
    return f"127.{chance.randrange(1, 255)}.{os.getpid() % 250 + 1}.{chance.randrange(1, 255)}"


@pytest.fixture
def port(host: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], MetricsPort]]:
    """Each call stands for another process."""
    monkeypatch.setattr(metrics_port, "_SILENT_SECONDS", LONG)
    monkeypatch.setattr(metrics_port, "_KEEP_ENDED_SECONDS", LONG)
    monkeypatch.setattr(metrics_port, "_SEND_SECONDS", 0.05)
    made: list[MetricsPort] = []

    def make() -> MetricsPort:
        made.append(MetricsPort(host, PORT))
        return made[-1]

    yield make
    for one in made:
        one.close()


PORT = 9464  # below those that the kernel gives to others


def get(host: str, path: str = "/metrics") -> str:
    """The answer; "" if nobody listens."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://{host}:{PORT}{path}", timeout=LONG) as response:
            return str(response.read().decode())
    except urllib.error.HTTPError:
        raise
    except OSError:
        return ""


def close_metrics_ports() -> None:
    """All of this process."""
    for one in metrics_port._ports.values():
        one.close()
    metrics_port._ports.clear()


def ranks(host: str) -> set[str]:
    return set(re.findall(r'rank_info{.*rank="(\d+)"', get(host)))


def test_one_port_shows_the_ranks_of_all_processes(host: str, port: Callable[[], MetricsPort]) -> None:
    first, second, third = port(), port(), port()
    with first.shows(lambda: snapshot(1)), second.shows(lambda: snapshot(2)), third.shows(lambda: snapshot(3)):
        waited_for(lambda: ranks(host) == {"1", "2", "3"})
        assert samples(get(host), rank="2")["documents_total"] == 7


KEEPER = """
import sys, threading
from datatrove_ckpt.generation.export import metrics_port
from tests.unit.test_metrics import PORT, snapshot
metrics_port._SEND_SECONDS = 0.05
with metrics_port.MetricsPort(sys.argv[1], PORT).shows(lambda: snapshot(1)):
    sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.parametrize("has_port", [True, False])
def test_a_process_that_was_killed_keeps_nothing_and_one_that_hangs_is_left_out(
    host: str, port: Callable[[], MetricsPort], monkeypatch: pytest.MonkeyPatch, has_port: bool
) -> None:
    with ExitStack() as shown:
        if not has_port:
            monkeypatch.setattr(metrics_port, "_SILENT_SECONDS", 0.5)
            shown.enter_context(port().shows(lambda: snapshot(2)))
            waited_for(lambda: ranks(host) == {"2"})
        other = shown.enter_context(
            subprocess.Popen([sys.executable, "-c", KEEPER, host], stdin=subprocess.PIPE, cwd=ROOT)
        )
        shown.callback(other.kill)
        if has_port:
            waited_for(lambda: ranks(host) == {"1"})
            shown.enter_context(port().shows(lambda: snapshot(2)))
        waited_for(lambda: ranks(host) == {"1", "2"})
        other.send_signal(signal.SIGSTOP)
        if has_port:
            other.kill()
        waited_for(lambda: ranks(host) == {"2"})


@pytest.mark.slow
def test_a_port_of_another_program_is_said_once_and_taken_when_it_is_free(
    host: str, port: Callable[[], MetricsPort], log: list[str]
) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind((host, PORT))
        other.listen()
        with port().shows(lambda: snapshot(2)):
            waited_for(lambda: log)
            other.close()
            waited_for(lambda: ranks(host) == {"2"})
    assert [line for line in log if "Address already in use" in line] == log[:1]
    assert "is free now" in log[1]


def test_a_rank_that_has_ended_is_shown_for_a_while_and_once(host: str, port: Callable[[], MetricsPort]) -> None:
    one, states = port(), ["running"]
    with one.shows(lambda: snapshot(1, states[-1])):
        waited_for(lambda: ranks(host) == {"1"})
        states.append("done")
    assert samples(get(host))["rank_state done"] == 1
    states.append("running")
    with one.shows(lambda: snapshot(1, states[-1])):
        found = get(host)
        assert found.count("rank_info{") == 1
        assert samples(found)["rank_state running"] == 1


def test_two_jobs_of_one_name_make_no_page_that_prometheus_refuses(log: list[str]) -> None:
    older, newer = labels(run="twins"), replace(labels(run="twins"), started_at=2000.0)
    ended = replace(labels(run="twins"), started_at=1.0)
    states = [(newer, "running"), (older, "running"), (ended, "done")]
    for _ in range(2):
        text = exposition([job.snapshot(state, 2001.0, progress(), None) for job, state in states]).decode()
    assert text.count("datatrove_ckpt_rank_chunks{") == 1
    assert samples(text)["attempt_start_timestamp_seconds"] == 2000.0
    (line,) = log
    assert "two jobs on this node show a rank 3 of a run 'twins'" in line
