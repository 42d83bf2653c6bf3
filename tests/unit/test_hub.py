"""The rules of the hub:

URLs of folders, what its answers mean, how often ranks commit, and what a job may do.
"""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from datatrove_ckpt.common.retrying import HUB, FailureCounter, FileSystemFailed, failure_line
from datatrove_ckpt.output.hub import (
    HOUR,
    CommitHistory,
    CommitPace,
    HubFolder,
    MadeCommit,
    commit_title,
    hub_failure,
)
from datatrove_ckpt.output.interruptible_calls import InterruptibleCalls
from tests import golden

# What answers of the hub mean, and how long they ask to wait -------------------------------------


FOLDER = HubFolder("dataset", "org/name")
CALLS = InterruptibleCalls(FOLDER.url, FOLDER)


def answer(status, text="", url="https://hub/api/x", **headers):
    """An error of the client, as ``InterruptibleCalls`` raises it."""
    error = FileSystemFailed(text)
    inner = RuntimeError(f"{status} for url: {url}. {text}")
    inner.response = SimpleNamespace(
        status_code=status,
        url=url,
        headers={name.replace("_", "-"): value for name, value in headers.items()},
    )
    error.__cause__ = inner
    return error


def folder_of(url):
    folder = HubFolder.parse(url)
    assert HubFolder.parse(folder.url) == folder
    return folder


test_a_url_names_a_folder_and_what_no_retry_can_help_is_known = golden.shows("hub", globals())


def test_waiting_that_the_hub_asked_for_costs_no_patience():
    now = [1000.0]
    attempts = FailureCounter(replace(HUB, clock=lambda: now[0]))
    for _ in range(20):
        seconds = attempts.failed("a commit", answer(429, Retry_After="3600"))
        assert 3600 <= seconds <= 3600 * 1.1 + 1
        now[0] += seconds
    now[0] += HUB.patience - 10
    assert attempts.failed("a commit", answer(503)) <= HUB.longest
    now[0] += 20
    with pytest.raises(FileSystemFailed) as raised:
        attempts.failed("a commit", answer(503))
    said = str(CALLS.failed("a commit", raised.value))
    assert re.match(
        r"hf://datasets/org/name: a commit: RuntimeError: 503 .*Check the network, the server",
        said,
    )
    attempts.succeeded()
    assert attempts.failed("a commit", answer(503)) <= 1


def test_a_storage_that_goes_on_refusing_is_final():
    attempts, refused = FailureCounter(HUB), answer(403, url="https://storage/bucket/abc")
    for _ in range(5):
        attempts.failed("an upload", refused)
    with pytest.raises(FileSystemFailed):
        attempts.failed("an upload", refused)
    assert "The hub needs HF_TOKEN" in str(CALLS.failed("an upload", refused))


def test_messages_show_no_signatures_and_say_what_comes_next(log):
    error = answer(403, url="https://storage/abc?X-Amz-Signature=secret&X=1")
    assert "secret" not in failure_line(error)
    assert "https://storage/abc?***" in failure_line(error)
    attempts = FailureCounter(replace(HUB, jitter=0.0, spread=0.0), hub_failure)
    attempts.failed("a commit", answer(412))
    assert log[0] == (
        "WARNING a commit: another process committed at the same moment (HTTP 412). Next attempt in 1 s, for 1 h at "
        "most; generation continues.\n"
    )
    attempts.failed("a commit", answer(429, Retry_After="3600"))
    assert log[1].endswith("Next attempt in 1 h, as the server advises; generation continues.\n")


# How often the ranks of a job commit to one repository -------------------------------------------


def made(ages):
    """Newest first."""
    title = commit_title("1 file", 0, "0")
    return CommitHistory(0.0, tuple(MadeCommit(f"{n}", -age, title) for n, age in enumerate(ages)))


def test_one_rank_waits_until_the_oldest_commit_is_an_hour_old():
    pace = CommitPace(per_hour=8)
    for _ in range(20):
        assert 600 <= pace.seconds_until_turn(made([0, 1, 2, HOUR - 600, HOUR + 600])) <= 602


def test_files_wait_for_at_most_the_given_time_and_ranks_do_not_commit_together():
    waits = [CommitPace(300).seconds_of_next() for _ in range(100)]
    assert min(waits) >= 150
    assert max(waits) <= 300
    assert len(set(waits)) > 90
    assert CommitPace(0).seconds_of_next() == 0


def test_some_commits_of_an_hour_are_for_ranks_that_end():
    pace, history = CommitPace(per_hour=3), made([600, 700])
    assert pace.seconds_until_turn(history) > 0
    assert pace.seconds_until_turn(history, ends=True) == 0
    assert pace.seconds_until_turn(made([1, 600, 700]), ends=True) > 0
    assert CommitPace(per_hour=1).seconds_until_turn(made([])) == 0
