"""What a rank's attempts leave in its history, whatever ended them."""

import asyncio
import errno
import signal

import pytest

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.commits import read_commits
from datatrove_ckpt.checkpoint.layout import HISTORY, is_journal
from datatrove_ckpt.errors import CheckpointError, DocumentFailed, Preempted
from datatrove_ckpt.generation import progress
from datatrove_ckpt.run_folder.run_state import read_run_state
from datatrove_ckpt.testing import FakeServer
from tests.crashes import crash_at
from tests.histories import read_history
from tests.jobs import ask, documents, fails_at, runner
from tests.patience import HeldTime, until_async
from tests.rank_folders import place_at

ONE_BY_ONE = {"max_concurrent_generations": 1, "max_concurrent_documents": 1}


def history_of(folder):
    return read_history(folder / "checkpoints/00000/history.jsonl")


def test_a_short_attempt_has_counted_what_it_paid_before_it_is_killed(
    tmp_path, server, monkeypatch
):
    def are_counted():
        last = history_of(tmp_path).attempts[-1].last
        return last is not None and last.own.requests == 4

    async def rollout(document, generate):
        result = await ask(document, generate)
        if document.id == "id 3":  # before ten seconds, a kill may come
            time.pass_for(9.0)
            await until_async(are_counted)
        return result

    time = HeldTime()
    monkeypatch.setattr(progress, "asyncio", time.in_place_of(asyncio))
    runner(tmp_path, server, rollout, config=ONE_BY_ONE).run(documents(4))


def test_each_attempt_says_how_it_started_and_ended_and_the_numbers_are_those_on_the_disk(
    tmp_path,
):
    async def stop_at_seven(document, generate):
        if document.id == "id 7":
            signal.raise_signal(signal.SIGTERM)
        return await ask(document, generate)

    settings = {"config": ONE_BY_ONE, "accept_changes": True}
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        with FakeServer() as server:
            with pytest.raises(DocumentFailed):
                runner(tmp_path, server, fails_at(["id 5"]), **settings).run(documents(10))
            with pytest.raises(Preempted):
                runner(tmp_path, server, stop_at_seven, **settings).run(documents(10))
            with crash_at(20, tmp_path) as disk:
                runner(tmp_path, server, **settings).run(documents(10))
            assert disk.crashed_at is not None, disk.happened
            runner(tmp_path, server, **settings).run(documents(10))
    finally:
        signal.signal(signal.SIGTERM, before)
    failed, stopped, killed, done = history_of(tmp_path).attempts
    assert (failed.end.why, failed.end.what.partition(":")[0]) == ("error", "DocumentFailed")
    assert (stopped.end.why, stopped.end.what) == ("stopped", "SIGTERM")
    assert killed.start is not None
    assert killed.end is None
    assert (done.end.why, done.end.what) == ("done", "")
    assert failed.last.documents.read == 5
    assert stopped.progress[0].documents == failed.last.documents, (
        "an attempt starts where the one before ended"
    )
    commits = read_commits(tmp_path / "checkpoints/00000/commits.jsonl").values()
    tokens = sum(one.counts.prompt_tokens + one.counts.completion_tokens for one in commits)
    of_all = done.last.documents
    assert (of_all.read, of_all.requests) == (10, 10)
    assert of_all.prompt_tokens + of_all.completion_tokens == tokens
    assert [event.what for event in done.servers] == ["ready"]


@pytest.mark.parametrize("has_room, said", [(True, ""), (False, "at least ")])
def test_a_full_disk_is_named_as_the_end_of_its_attempt_and_no_sum_is_silently_too_low(
    tmp_path, monkeypatch, has_room, said
):
    """The history has room for the end of the attempt, and perhaps for its sums."""

    class Full(files.Disk):
        is_full = False

        def write(self, fd, data, path):
            self.is_full |= is_journal(path.name)
            torn = path.name == HISTORY and self.is_full and not has_room and b"progress" in data
            if torn:
                super().write(fd, data[:100], path)
            with files.explained("write to", path):
                if is_journal(path.name) or torn:
                    raise OSError(errno.ENOSPC, "No space left on device", str(path))
            super().write(fd, data, path)

    with FakeServer() as server, monkeypatch.context() as patched:
        patched.setattr(files, "disk", Full())
        with pytest.raises(CheckpointError, match="No space left"):
            runner(tmp_path, server).run(documents(1))  # others would be in flight
    (attempt,) = history_of(tmp_path).attempts
    assert attempt.end.why == "error"
    assert "No space left" in attempt.end.what
    assert attempt.last.own.requests == has_room
    root = tmp_path / "checkpoints"
    state = read_run_state(place_at(root), attempt.last_at)
    assert (state.totals.killed, state.totals.at_least) == (0, said)
