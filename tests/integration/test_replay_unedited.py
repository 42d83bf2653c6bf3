"""Unedited code is not refused by the replay check."""

import asyncio
import json
import os
import subprocess
import sys
from functools import partialmethod
from types import SimpleNamespace

import pytest

from datatrove_ckpt.common.threads import in_threads
from datatrove_ckpt.generation import replay
from datatrove_ckpt.generation.recorded_documents import RecordedDocuments
from tests.crashes import copy_tree
from tests.replays import go_on, recorded, says_word, start
from tests.unstable_rollouts import KINDS


def test_a_change_that_is_accepted_is_not_refused_later_where_time_did_not_suffice(
    tmp_path, server, monkeypatch
):
    monkeypatch.setenv("WORD", "OLD")
    start(tmp_path, server, says_word, monkeypatch)
    monkeypatch.setattr(replay, "repeats_itself", lambda step, root: True)
    monkeypatch.setenv("WORD", "NEW")
    monkeypatch.setenv("stop", "1")
    settings = {"config": {"max_concurrent_documents": 1, "default_generation_params": {"n": 1}}}
    with monkeypatch.context() as patch:
        patch.setattr(replay.Replays, "check", partialmethod(replay.Replays.check, 0.0))
        start(tmp_path, server, says_word, monkeypatch, accept_changes=True, **settings)
    assert len(recorded(tmp_path)) == 0
    why = RecordedDocuments(tmp_path / "checkpoints").void
    assert why == (
        "accept_changes is set (nothing is decided, because it takes longer than a replay may)"
    )
    go_on(tmp_path, server, says_word, **settings)


def test_ranks_that_write_the_same_record_at_once_do_not_fail(tmp_path):
    document = replay.RecordedDocument("0" * 16, 0, 0, "id", "x" * 9999, "", [], "", "", [])

    def write(rank):
        recorded = RecordedDocuments(tmp_path, rank)
        for _ in range(50):
            recorded.put([document])

    in_threads(write, range(8))
    assert [*RecordedDocuments(tmp_path).read()] == [document]


def test_what_has_finished_is_recorded_together_if_there_is_room(tmp_path):
    documents = [
        replay.RecordedDocument(f"{number:016x}", number, 0, "id", "", "", [], "", "", [])
        for number in range(200)
    ]
    recorded = RecordedDocuments(tmp_path)
    recorded.finished = documents[:99:-1]
    taken = recorded.taken()
    assert taken == documents[100:164]
    assert recorded.finished == []
    recorded.put([*taken, documents[164]])  # of another rank
    assert [*recorded.read()] == taken
    recorded.finished = documents[90:190]
    assert recorded.taken() == documents[90:154]
    recorded.finished = documents[165:]
    assert recorded.taken() == []


def test_the_first_documents_are_recorded_soon_although_they_finish_late(monkeypatch):
    slept = []
    recorded = SimpleNamespace(is_stopped=False, finished=[])

    async def sleep(seconds):
        slept.append(seconds / replay._FIRST_RECORD_AFTER)
        recorded.is_stopped = len(slept) == 12
        recorded.finished = ["document"] * (len(slept) > 5)

    async def record():
        pass

    monkeypatch.setattr(replay, "asyncio", SimpleNamespace(sleep=sleep))
    replays = SimpleNamespace(recorded=recorded, record=record)
    asyncio.run(replay.Replays.record_regularly(replays))
    assert slept == [1, 1, 1, 1, 1, 1, 2, 4, 8, 16, 16, 16]


def test_ranks_that_end_the_record_at_once_do_not_fail(tmp_path):
    in_threads(lambda rank: RecordedDocuments(tmp_path, rank).end("why"), range(64))
    assert RecordedDocuments(tmp_path).void == "why"


def test_a_damaged_end_of_the_record_is_an_end(tmp_path):
    RecordedDocuments(tmp_path).end("why")
    path = tmp_path / "recorded" / "void.json"
    path.write_bytes(path.read_bytes()[:20])
    assert RecordedDocuments(tmp_path).is_stopped


def run_all(server, folder, word):
    """Runs all kinds of rollouts in a new process. Returns what was raised."""
    code = "from tests.unstable_rollouts import main; main()"
    command = [sys.executable, "-c", code, server.url, str(folder)]
    done = subprocess.run(command, env={**os.environ, "WORD": word}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kinds_of_rollouts_are_refused_only_if_they_are_edited(tmp_path, server):
    """Each start is a process, with another hash seed. Rollouts whose requests depend on the
    process alone are not refused, either.
    """
    assert run_all(server, tmp_path / "run", "OLD") == {}
    copy_tree(tmp_path / "run", tmp_path / "edited")
    assert run_all(server, tmp_path / "run", "OLD") == {}
    refused = run_all(server, tmp_path / "edited", "NEW")
    assert refused.keys() == KINDS.keys()
