"""``generate.once``: what a rollout calls besides the model is called once, and saved."""

import asyncio
import math
import sys
import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest

from datatrove_ckpt.common.redaction import remember
from datatrove_ckpt.errors import CkptError
from datatrove_ckpt.generation import once
from datatrove_ckpt.rollouts import CallFailed
from tests import golden
from tests.jobs import FailsFirst, ask, results, run_job
from tests.patience import pass_for, until_async
from tests.preempted import when_logged


async def doubled(text):
    await asyncio.sleep(0)
    return text * 2


class Doubles:
    async def __call__(self, text):
        return text * 2


def in_a_thread(text):
    return threading.current_thread() is not threading.main_thread(), text


@pytest.mark.parametrize("code", golden.sections("results_of_calls"))
def test_the_result_comes_back_as_json_has_it(tmp_path, server, code):
    function, kwargs = eval(code, {**globals(), "partial": partial})

    async def rollout(document, generate):
        return {"found": await generate.once("call", function, document.text, **kwargs)}

    run_job(tmp_path, server, 1, rollout)
    golden.hold("results_of_calls", code, str(results(tmp_path)))


async def sleeps(text):
    await asyncio.sleep(9)


def raises_stop(text):
    return next(iter(()))


@pytest.mark.parametrize(
    "function, settings, message",
    [
        (
            lambda text: object(),
            {},
            r"once\('call'\) cannot save a result that is no JSON.* such as base64",
        ),
        (lambda text: [math.nan], {}, r"once\('call'\) .* no JSON: NaN"),
        (lambda text: "a" * 2000, {}, r"once\('call'\) has a result of .* and the limit is"),
        (raises_stop, {}, "StopIteration"),
        (
            str.split,
            {"x": object()},
            r"the name and arguments of generate.once\('call', ...\).* must be JSON",
        ),
        ("text", {}, r"takes a name, a function and its arguments.*test_once.py, line"),
        (str.split, {"x": math.nan}, r"arguments of generate.once\('call', ...\).* NaN"),
        (lambda text: time.sleep(2), {"time_limit": 0.01}, r"once\('call'\) took longer than 0.01"),
        (sleeps, {"time_limit": 0.01}, "took longer than 0.01 s"),
    ],
)
def test_a_call_that_cannot_be_saved_is_named(
    tmp_path, server, monkeypatch, function, settings, message
):
    monkeypatch.setattr(once, "_MOST_BYTES", 1000)

    async def rollout(document, generate):
        await generate.once("call", function, document.text, **settings)

    with pytest.raises(CkptError, match=message):
        run_job(tmp_path, server, 1, rollout)


@pytest.mark.parametrize(
    "retry_errors, keep", [(False, (LookupError, OSError)), (True, [LookupError])]
)
def test_only_errors_that_are_kept_are_not_called_again(
    tmp_path, server, command, retry_errors, keep
):
    called = []
    broken = SimpleNamespace(now=True)

    def fails(kind):
        called.append(kind)
        raise {"kept": LookupError, "raised": ValueError}[kind](kind)

    def works_later():
        called.append("later")
        if broken.now:
            raise ConnectionError
        return 1

    async def rollout(document, generate):
        said = []
        for kind in ("kept", "raised"):
            try:
                await generate.once("tests", fails, kind, keep_errors=keep)
            except CallFailed as error:
                said.append(str(error))
            except ValueError:
                said.append("as it is")
        answer = await ask(document, generate)
        await generate.once("later", works_later)
        return [*said, answer.text]

    with pytest.raises(CkptError, match="ConnectionError"):
        run_job(tmp_path, server, 1, rollout)
    broken.now = False
    run_job(tmp_path, server, 1, rollout, retry_errors=retry_errors)
    again = ["kept"] * retry_errors
    assert called == ["kept", "raised", "later", *again, "raised", "later"]
    assert {*server.asked.values()} == {1}
    assert results(tmp_path)[0][0][:2] == ["LookupError: kept", "as it is"]
    shown = command("status", str(tmp_path / "checkpoints")).out
    assert f"{3 + retry_errors} tests (" in shown
    assert f"{3 + retry_errors} failed), 2 later (" in shown
    assert "1 failed)" in shown


def test_equal_calls_of_a_rollout_are_told_apart_by_their_order(tmp_path, server):
    numbers = iter(range(100))
    fails = FailsFirst()

    async def rollout(document, generate):
        found = [await generate.once("draw", lambda: next(numbers)) for _ in range(3)]
        answer = await ask(document, generate)
        fails()
        return [*found, answer.text]

    fails.run_twice(tmp_path, server, rollout)
    assert results(tmp_path)[0][0][:3] == [0, 1, 2]


def test_changed_code_calls_again(tmp_path, server):
    def rollout_of(tool):
        async def rollout(document, generate):
            return {"found": (await generate.once("look", tool, document.id))["x"]}

        return rollout

    with pytest.raises(CkptError, match="KeyError"):
        run_job(tmp_path, server, 1, rollout_of(lambda key: {}))
    run_job(tmp_path, server, 1, rollout_of(lambda key: {"x": key}), accept_changes=True)
    assert results(tmp_path) == [[{"found": "id 0"}]]


def test_a_call_that_waits_for_a_thread_loses_no_time_and_a_hanging_one_no_thread(
    tmp_path, server, monkeypatch
):
    monkeypatch.setattr(once, "_THREADS", 1)
    monkeypatch.setitem(sys.modules, "uvloop", None)  # which has a clock of its own
    end = threading.Event()
    loops = []

    def call(number):
        if number == 0:
            loops[0].call_soon_threadsafe(pass_for, 400.0)
            end.wait(60)
        return number

    async def rollout(document, generate):
        loops[:] = [asyncio.get_running_loop()]
        try:
            asked = (generate.once("call", call, number, time_limit=300.0) for number in range(3))
            return (await asyncio.gather(*asked, return_exceptions=True))[1:]
        finally:
            end.set()

    run_job(tmp_path, server, 1, rollout)
    assert results(tmp_path) == [[[1, 2]]]


def test_no_call_begins_in_a_drain(tmp_path, server, monkeypatch):
    monkeypatch.setattr(once, "_THREADS", 1)
    drains = threading.Event()
    called = []

    def call(name):
        called.append(name)
        assert drains.wait(60)

    async def rollout(document, generate):
        if document.id == "id 2":
            await ask(document, generate)  # so there is a server
            await until_async(lambda: called)
            raise ValueError("a failure")
        await generate.once("call", call, document.id)

    with (
        when_logged("1 call in flight have", drains.set),
        pytest.raises(CkptError, match="a failure"),
    ):
        run_job(tmp_path, server, 3, rollout)
    assert len(called) == 1


def test_an_error_that_is_kept_holds_no_secret_and_may_be_any_text(tmp_path, server):
    remember("hunter2-hunter2")

    def call():
        raise LookupError("no hunter2-hunter2 \udcff")

    async def rollout(document, generate):
        with pytest.raises(CallFailed) as error:
            await generate.once("call", call, keep_errors=LookupError)
        return str(error.value)

    run_job(tmp_path, server, 1, rollout)
    assert "hunter2" not in results(tmp_path)[0][0]
