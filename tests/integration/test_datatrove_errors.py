"""The errors of a run, as scripts for datatrove's runner catch them, and what ``skip_bad_requests``
skips.
"""

import asyncio
import inspect
import pickle
import re
from contextlib import suppress

import pytest
from datatrove.data import Document

from datatrove_ckpt import InferenceError, ServerError, errors
from datatrove_ckpt.testing import FakeServer
from tests.jobs import (
    STOPS_SOON,
    ask,
    chat,
    documents,
    ids,
    rejects,
    run_job,
    runner,
)

BAD = "BadRequestError"


# what is skipped ---------------------------------------------------------------------------------


async def raises_its_text_later(document, generate):
    try:
        return await ask(document, generate)
    except InferenceError as error:
        text = str(error)
    raise InferenceError(document, f"page 1: {text}")


async def raises_its_own_from_it(document, generate):
    try:
        return await ask(document, generate)
    except InferenceError as error:
        raise RuntimeError("my own") from error


async def gathers_and_raises_all(document, generate):
    both = await asyncio.gather(
        ask(document, generate), ask(document, generate), return_exceptions=True
    )
    if failures := [one for one in both if isinstance(one, Exception)]:
        raise ExceptionGroup("some pages failed", failures)
    return both


async def returns_them(document, generate):
    return {"pages": await asyncio.gather(ask(document, generate), return_exceptions=True)}


@pytest.mark.matrix(
    "rollout",
    [ask, raises_its_text_later, raises_its_own_from_it, gathers_and_raises_all, returns_them],
)
def test_a_rejected_request_skips_its_document_however_the_rollout_raises(tmp_path, rollout):
    with FakeServer(status=rejects(["text 1"])) as server:
        step = runner(tmp_path, server, rollout, skip_bad_requests=True)
        step.run(documents(4))
    assert ids(tmp_path) == ["id 0", "id 2", "id 3"]
    assert step.stats.stats["skipped_bad_requests"].total == 1


async def asks_and_fails(document, generate):
    result = await ask(document, generate)
    if document.id != "id 2":
        return result
    raise InferenceError(document, f"cannot parse {document.text!r}")


async def swallows_and_fails(document, generate):
    try:
        return await ask(document, generate)
    except InferenceError:
        pass
    raise ValueError("a bug")


@pytest.mark.matrix(("rollout", "status"), [(ask, 503), (asks_and_fails, None)])
def test_a_document_with_that_word_is_not_skipped_for_another_failure(tmp_path, rollout, status):
    text = f"How do I handle {BAD}? {BAD}: HTTP 400: x"
    given = [Document(text=f"text {index}", id=f"id {index}") for index in range(2)] + [
        Document(text=text, id="id 2")
    ]
    with FakeServer(
        status=lambda payload, times: status if BAD in str(payload) else None
    ) as server:
        server.error = f"{BAD}: HTTP 400: not really, but refused"
        settings = {"request_max_attempts": 2, **STOPS_SOON}
        with pytest.raises(InferenceError, match="'id 2'"):
            runner(tmp_path, server, rollout, skip_bad_requests=True, config=settings).run(given)
    assert not (tmp_path / "checkpoints/00000/dead_letters.jsonl").exists()


def failure(folder, status, *job, **settings):
    """The error of a run whose first document the server answers with a status."""
    refuses = rejects(["text 0"], status)
    with FakeServer(status=refuses) as server, pytest.raises(InferenceError) as caught:
        run_job(folder, server, *job, **settings)
    return caught.value


def test_a_bug_after_a_rejection_that_was_handled_is_not_skipped(tmp_path):
    error = failure(tmp_path, 400, 2, swallows_and_fails, skip_bad_requests=True)
    assert re.search(r"'id 0'.*a bug", str(error))


def test_a_rejection_that_a_rollout_returns_is_named_and_its_setting(tmp_path):
    error = failure(tmp_path, 400, 2, returns_them)
    assert isinstance(error, errors.DocumentFailed)
    assert re.search("BadRequestError: HTTP 400.*set skip_bad_requests", str(error))
    assert error.payload is not None


def line_of(function, text):
    lines, first = inspect.getsourcelines(function)
    return f"line {first + next(number for number, line in enumerate(lines) if text in line)} ({function.__name__})"


async def sends_text(document, generate):
    with suppress(Exception):
        return await generate(document.text)


async def streams(document, generate):
    one = generate(chat(document.text, stream=True))
    return await asyncio.gather(one, return_exceptions=True)


@pytest.mark.matrix(
    ("rollout", "says"),
    [(sends_text, "a dict such as .*, not a str"), (streams, "remove stream")],
)
def test_a_payload_that_can_never_work_stops_the_rank_with_its_place_and_sends_nothing(
    tmp_path, rollout, says
):
    with FakeServer() as server, pytest.raises(errors.ConfigError, match=says) as caught:
        run_job(tmp_path, server, 9, rollout, on_document_error="dead_letter")
    assert not server.payloads
    assert f"test_datatrove_errors.py, {line_of(rollout, 'generate(')}" in str(caught.value)


# what is raised ----------------------------------------------------------------------------------


def in_another_process(error):
    there = pickle.loads(pickle.dumps(error))
    assert isinstance(there, InferenceError)
    assert (type(there), str(there)) == (type(error), str(error))
    return there


def test_a_rejected_request_is_an_inference_error_with_its_payload(tmp_path):
    """And without it in another process."""
    error = failure(tmp_path, 400, 1)
    assert BAD in str(error)
    assert isinstance(error, errors.DocumentFailed)
    assert error.document.id == "id 0"
    assert isinstance(error.error, errors.RequestRejected)
    assert error.payload["messages"] == chat("text 0")["messages"]
    there = in_another_process(error)
    assert there.error == str(error.error)
    assert (there.document, there.payload) == (None, None)


@pytest.mark.matrix(
    ("status", "kind"), [(503, errors.ServerUnavailable), (401, errors.ServerRefused)]
)
def test_a_server_that_fails_is_both_errors_of_datatrove(tmp_path, status, kind):
    error = failure(tmp_path, status, 1, config=STOPS_SOON)
    assert isinstance(error, kind)
    assert isinstance(in_another_process(error), ServerError)


def test_a_server_that_does_not_start_is_a_server_error(tmp_path, real_ready_window):
    with FakeServer() as server:
        step = runner(
            tmp_path, server, config={"server_ready_max_attempts": 1, "server_ready_delay_sec": 0.1}
        )
    with pytest.raises(ServerError, match="No endpoint was ready") as caught:
        step.run(documents(1))
    assert isinstance(caught.value, errors.ServerStartFailed)
