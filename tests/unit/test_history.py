"""``history.jsonl``: its records, what is left of them after damage, and how its size is
bounded.
"""

import random
from collections import Counter

import pytest

from datatrove_ckpt.checkpoint import history
from datatrove_ckpt.checkpoint.checksummed_lines import add_checksum
from datatrove_ckpt.checkpoint.history import (
    AttemptEnd,
    AttemptStart,
    HistoryLog,
    ProgressRecord,
    RequestHistograms,
    WaitStatus,
    downsampled,
)
from datatrove_ckpt.common.counts import DocumentCounts, LogHistogram, WorkCounts
from tests.histories import History, read_history
from tests.rank_folders import minute


def written(path, content):
    path.write_bytes(b"".join(record.to_line() for record in content))
    return path


def test_what_a_later_release_writes_is_left_out_and_is_no_damage(tmp_path):
    later = (
        b'{"k":"weather","at":1.0,"n":1}',
        b'{"at":1.0}',
    )
    known = add_checksum(b'{"k":"end","at":130.0,"n":2,"why":"done","mood":[1]}')
    (tmp_path / "history.jsonl").write_bytes(b"".join(map(add_checksum, later)) + known)
    assert read_history(tmp_path / "history.jsonl") == History(
        [AttemptEnd(at=130.0, attempt=2, why="done")]
    )


def test_a_document_and_a_server_cannot_write_lines_of_their_own(tmp_path):
    counts = WorkCounts(tiers=Counter({"flex\nall is well": 1}))
    line = ProgressRecord(
        at=1.0, attempt=1, own=counts, total=counts, wait=WaitStatus(document="a\nb\x1b[2J")
    )
    found = read_history(written(tmp_path / "history.jsonl", [line])).records[0]
    assert found.wait.document == "a b [2J"
    assert found.total.tiers == found.own.tiers == {"flex all is well": 1}


LATENCIES = RequestHistograms(at=1.0, attempt=1, milliseconds=LogHistogram({3: 2, 17: 1}))
LATENCIES.examples = {"looping": [["id", "again"]]}
ANSWERS = DocumentCounts(9, reasons=Counter(stop=4), lengths=LogHistogram.of([1, 70, 70]))


@pytest.mark.parametrize(
    "line", [LATENCIES, ProgressRecord(at=1.0, attempt=1, documents=ANSWERS, places=8)]
)
def test_histograms_and_counts_come_back_as_they_were_written(tmp_path, line):
    assert read_history(written(tmp_path / "history.jsonl", [line])).records == [line]


def test_percentiles_of_added_histograms_are_those_of_all_values_and_at_most_a_sixth_below():
    chance = random.Random(1)
    ranks = [[int(chance.lognormvariate(5, 1)) for _ in range(1000)] for _ in range(20)]
    found = sum(map(LogHistogram.of, ranks), LogHistogram()).percentiles
    values = sorted(value for rank in ranks for value in rank)
    for name, exact in {"p50": values[9_999], "p95": values[18_999]}.items():
        assert exact * 5 / 6 - 1 <= found[name] <= exact


def test_of_each_attempt_the_last_histograms_count(tmp_path):
    lines = []
    for attempt in (1, 2):
        lines.append(AttemptStart(at=attempt, attempt=attempt, host="h", pid=1))
        lines += [
            RequestHistograms(at=attempt, attempt=attempt, milliseconds=LogHistogram({3: number}))
            for number in (1, 2)
        ]
    found = history.read_history(str(written(tmp_path / "history.jsonl", lines)))
    assert found.spreads == lines[2::3]


def test_attempts_before_a_day_of_minutes_keep_their_places_and_ends(tmp_path):
    lines = [
        AttemptStart(at=0.0, attempt=1, host="node1", pid=1, job="17_1"),
        *(minute(60.0 * n, n, 10_000) for n in range(history.MAX_BYTES // 600)),
        AttemptEnd(at=90_000.0, attempt=1, why="stopped", what="SIGTERM"),
        AttemptStart(at=100_000.0, attempt=2, host="node2", pid=2, job="17_2"),
        *(minute(100_000.0 + 60 * n, n, 10_000, attempt=2) for n in range(3000)),
    ]
    path = written(tmp_path / "history.jsonl", lines)
    assert path.stat().st_size > history.MAX_BYTES + 2**19
    first, second = history.read_history(str(path)).attempts
    assert (first.slurm_job, first.what, second.slurm_job) == ("17_1", "SIGTERM", "17_2")
    assert second.last_seen == lines[-1].at


# ``HistoryLog``: what is appended to a rank's history, and how its size is bounded ---------------


def progress_of(path):
    return [record for record in read_history(path).records if isinstance(record, ProgressRecord)]


@pytest.fixture
def path(ram):
    return ram / "history.jsonl"


@pytest.mark.parametrize("tail", [b'{"xxh":"0123', b"\0" * 30, b"x"])
def test_a_torn_tail_is_cut_before_the_next_append(path, tail):
    HistoryLog(path, 1).append([AttemptStart(at=1.0, host="h", pid=1)])
    whole = path.read_bytes()
    path.write_bytes(whole + tail)
    log = HistoryLog(path, 2)
    assert path.read_bytes() == whole
    log.append([AttemptStart(at=2.0, host="h", pid=2)])
    found = read_history(path)
    assert [attempt.number for attempt in found.attempts] == [1, 2]
    assert found.damaged == 0


def test_damage_in_the_middle_stays_and_costs_no_other_line(path):
    HistoryLog(path, 1).append([minute(number, number, chunks=number) for number in (1, 2, 3)])
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1].replace(b"progress", b"prigress") + lines[2])
    log = HistoryLog(path, 2)
    assert log.earlier.documents.read == 3
    log.append([minute(4, 4, chunks=4)])
    assert [record.chunks for record in progress_of(path)] == [1, 3, 4]


def test_thinning_keeps_events_and_the_ends_of_attempts():
    content = []
    for attempt in (1, 2, 3):
        lines = [minute(attempt * 1500 + number, number) for number in range(300)]
        content += [
            AttemptStart(at=lines[0].at, host="h", pid=1),
            *lines,
            AttemptEnd(at=lines[-1].at, why="stopped", what="SIGTERM"),
        ]
        for record in content[-302:]:
            record.attempt = attempt
    kept = downsampled([record.to_line() for record in content], 30_000)
    assert sum(map(len, kept)) <= 30_000
    for index, record in enumerate(content):
        if not isinstance(record, ProgressRecord) or index % 302 in (1, 300):
            assert record.to_line() in kept
    found = set(kept)
    assert [line for line in (record.to_line() for record in content) if line in found] == kept, (
        "another order"
    )
