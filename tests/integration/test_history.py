"""What a rank's attempts leave in its history, whatever ended them."""

import asyncio
import signal

import pytest

from datatrove_ckpt import __version__
from datatrove_ckpt.checkpoint.commits import read_commits
from datatrove_ckpt.checkpoint.history_records import Progress
from datatrove_ckpt.errors import DocumentFailed, Preempted
from datatrove_ckpt.generation import progress as rank_progress
from datatrove_ckpt.testing import FakeServer, crash_at
from tests.histories import read_history
from tests.jobs import ask, chat, documents, fails_at, runner

ONE_BY_ONE = {"max_concurrent_generations": 1, "max_concurrent_documents": 1}


def history_of(folder):
    return read_history(folder / "checkpoints/00000/history.jsonl")


def numbers(progress):
    """Documents, requests and tokens of all attempts."""
    documents = progress.documents
    return documents.read, documents.requests, documents.prompt_tokens + documents.completion_tokens


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
    assert [attempt.number for attempt in (failed, stopped, killed, done)] == [1, 2, 3, 4]
    assert failed.start.version == __version__
    assert (failed.end.why, failed.end.what.partition(":")[0]) == ("error", "DocumentFailed")
    assert (stopped.end.why, stopped.end.what) == ("stopped", "SIGTERM")
    assert killed.start is not None
    assert killed.end is None
    assert (done.end.why, done.end.what) == ("done", "")
    assert numbers(failed.last)[0] == 5
    assert stopped.progress[0].documents == failed.last.documents, (
        "an attempt starts where the one before ended"
    )
    commits = read_commits(tmp_path / "checkpoints/00000/commits.jsonl").values()
    assert numbers(done.last) == (
        10,
        10,
        sum(commit.counts.prompt_tokens + commit.counts.completion_tokens for commit in commits),
    )
    assert done.last.chunks == 5
    assert done.last.total.documents <= 10
    assert [event.what for event in done.servers] == ["ready"]
    ends = [commit.at for commit in commits]
    assert failed.first_at <= min(ends) <= max(ends) <= done.last_at


def test_progress_is_noted_each_minute_with_what_is_in_flight(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_progress, "MINUTE_SECONDS", 0.01)
    monkeypatch.setattr(rank_progress, "_SPREAD_EVERY", 1)

    async def until_noted(document, generate):
        """The last document is finished once a line says that four are, and that it is in work."""
        result = await ask(document, generate)
        if document.id == "id 4":
            while not any(line.own.documents == 4 and line.in_work == 1 for line in lines()):
                await asyncio.sleep(0.01)
        return result

    def lines():
        return [record for record in history_of(tmp_path).records if isinstance(record, Progress)]

    with FakeServer() as server:
        runner(tmp_path, server, until_noted, config=ONE_BY_ONE).run(documents(5))
    (attempt,) = history_of(tmp_path).attempts
    assert (
        sum(attempt.spread.milliseconds.values())
        == sum(attempt.spread.completion_tokens.values())
        == 5
    )
    last = attempt.last
    assert (last.own.documents, last.own.requests, last.own.sent, last.in_work) == (5, 5, 5, 0)
    assert last.total == last.own
    assert [line.at for line in attempt.progress] == sorted(line.at for line in attempt.progress)


def test_answers_from_the_cache_retries_and_errors_are_counted(tmp_path, policy):
    policy("SERVER", first=0.01)

    def busy_twice(payload, times):
        return 503 if payload["messages"][-1]["content"] == "text 0" and times < 2 else None

    async def twice(document, generate):
        await ask(document, generate)
        result = await generate(chat(f"{document.text} again"))
        if fail:
            raise ValueError
        return result

    fail = True
    with FakeServer(status=busy_twice) as server:
        settings = {"config": ONE_BY_ONE, "accept_changes": True}
        with pytest.raises(DocumentFailed):
            runner(tmp_path, server, twice, **settings).run(documents(3))
        fail = False
        runner(tmp_path, server, twice, **settings).run(documents(3))
    first, second = history_of(tmp_path).attempts
    assert (first.last.own.retries, first.last.own.errors) == (2, {"HTTP 503": 2})
    assert (first.last.own.requests, second.last.own.requests, second.last.own.cached) == (2, 4, 2)
    assert second.last.total.requests == 6
    assert second.last.total.errors == {"HTTP 503": 2}
