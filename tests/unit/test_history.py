"""``history.jsonl``: its records, and what is left of them after damage."""

from __future__ import annotations

from pathlib import Path

import pytest

from datatrove_ckpt.checkpoint.clock import Seconds
from datatrove_ckpt.checkpoint.commits import DocumentCounts
from datatrove_ckpt.checkpoint.history_records import (
    Buckets,
    End,
    InputPosition,
    Progress,
    Record,
    ServerEvent,
    Spread,
    Start,
    WorkCounts,
)
from datatrove_ckpt.checkpoint.lines import seal
from tests.histories import History, read_history


def progress(at: float = 0.0, attempt: int = 1) -> Progress:
    own = WorkCounts(3, 6, 1, 60, 70, 2, 9, 1, 1, 1, {"timeout": 1, "HTTP 503": 1})
    return Progress(
        at=at,
        attempt=attempt,
        seconds=Seconds(1.5, 2.5),
        documents=DocumentCounts(5, 3, 1, 1, 10, 100, 120),
        chunks=2,
        total=own.plus(own),
        own=own,
        in_flight=4,
        waiting=5,
        in_work=6,
        position=InputPosition(10, 40, "bytes"),
    )


def records() -> list[Record]:
    return [
        Start(at=1.0, attempt=1, host="node7", pid=42, job="17_3", slot=0, version="0.2.0"),
        progress(1.0),
        ServerEvent(at=2.0, attempt=1, what="death", name="0", url="http://127.0.0.1:8000", why="exit code 1"),
        progress(62.0),
        Spread(at=62.0, attempt=1, milliseconds=Buckets({3: 1}), prompt_tokens=Buckets(), completion_tokens=Buckets()),
        Start(at=100.0, attempt=2, host="node8", pid=43),
        progress(100.0, 2),
        End(at=130.0, attempt=2, why="stopped", what="SIGTERM"),
    ]


def written(path: Path, content: list[Record]) -> Path:
    path.write_bytes(b"".join(record.to_line() for record in content))
    return path


def test_records_come_back_as_they_were_written(tmp_path: Path) -> None:
    history = read_history(written(tmp_path / "history.jsonl", records()))
    assert history == History(records())
    assert history.last == records()[-2]
    assert history.last_attempt == 2


def test_attempts_have_what_belongs_to_them_and_one_without_an_end_was_killed(tmp_path: Path) -> None:
    first, second = read_history(written(tmp_path / "history.jsonl", records())).attempts
    assert first.start is not None
    assert (first.start.host, first.start.job, first.end) == ("node7", "17_3", None)
    assert (first.first_at, first.last_at) == (1.0, 62.0)
    assert [event.what for event in first.servers] == ["death"]
    assert len(first.progress) == 2
    assert first.spread is not None
    assert second.end is not None
    assert (second.end.why, second.end.what) == ("stopped", "SIGTERM")


def test_what_a_later_release_writes_is_left_out_and_is_no_damage(tmp_path: Path) -> None:
    later = b'{"k":"weather","at":1.0,"n":1}', b'{"k":"end","at":1.0,"n":1,"why":"eaten"}', b'{"at":1.0}'
    known = seal(b'{"k":"end","at":130.0,"n":2,"why":"done","mood":[1]}')
    (tmp_path / "history.jsonl").write_bytes(b"".join(map(seal, later)) + known)
    assert read_history(tmp_path / "history.jsonl") == History([End(at=130.0, attempt=2, why="done")])


@pytest.mark.parametrize("bad", [b'"at":-1', b'"at":null', b'"n":"1"', b'"pid":-1', b'"host":7', b'"slot":true'])
def test_values_of_other_types_are_no_record(tmp_path: Path, bad: bytes) -> None:
    body = b'{"k":"start","at":1,"n":1,"host":"h","pid":1,%s}' % bad  # the last of two equal keys counts
    (tmp_path / "history.jsonl").write_bytes(seal(body))
    assert read_history(tmp_path / "history.jsonl").records == []


def test_texts_of_a_file_cannot_speak_to_a_terminal(tmp_path: Path) -> None:
    event = ServerEvent(at=1.0, attempt=1, what="death", why="\x1b[2J\r" + "x" * 5000)
    found = read_history(written(tmp_path / "history.jsonl", [event])).records[0]
    assert isinstance(found, ServerEvent)
    assert found.why.isprintable()
    assert len(found.why) == 1000


def test_the_share_of_an_input_is_none_where_its_size_or_the_position_is_not_known() -> None:
    assert InputPosition(10, 40, "bytes").share == 0.25
    assert InputPosition(50, 40, "rows").share == 1.0
    assert InputPosition(0, 0, "bytes").share == 1.0
    assert InputPosition(10, None, "bytes").share is None
    assert InputPosition().share is None
