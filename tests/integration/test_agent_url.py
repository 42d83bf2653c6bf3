"""``generate.url()``: an agent's requests are those of its document. Real agents are in
tests/real/test_agents.py.
"""

import asyncio
import resource
import threading
from contextlib import nullcontext, suppress
from types import SimpleNamespace
from urllib.parse import urlsplit

import aiohttp
import orjson
import pytest

from datatrove_ckpt.errors import CkptError
from datatrove_ckpt.generation import requests, user_frames
from datatrove_ckpt.generation.agent_url import serve
from datatrove_ckpt.generation.recorded_requests import noting
from datatrove_ckpt.process import event_loop
from datatrove_ckpt.rollouts import Document
from datatrove_ckpt.testing import FakeServer
from tests.jobs import FailsFirst, chat, letters, rejects, results, rows, run_job
from tests.patience import until, until_async
from tests.typed_answers import embeddings


async def posted(url, payload, path="/chat/completions"):
    """Returns the status and the body of an answer."""
    async with aiohttp.ClientSession() as session, session.post(url + path, json=payload) as answer:
        return answer.status, await answer.read()


async def asked(url, text, **more):
    status, body = await posted(url, chat(text, **more))
    assert status == 200, body
    return orjson.loads(body)


def test_what_an_agent_asks_is_saved_and_counted(tmp_path, server):
    fails = FailsFirst()

    async def rollout(document, generate):
        async with generate.url() as url:
            first = await asked(url, document.text, model="its own name")
            both = await asyncio.gather(*(asked(url, "equal", temperature=1) for _ in range(2)))
        fails()
        said = [one["choices"][0]["message"]["content"] for one in (first, *both)]
        return [*said, first["model"]]

    fails.run_twice(tmp_path, server, rollout)
    assert server.asked == {"text 0": 1, "equal": 2}
    assert {payload["model"] for payload in server.payloads} == {"fake"}
    ((found,),) = results(tmp_path)
    assert found[1] == found[2] != found[0]
    assert found[3] == "its own name"


@pytest.mark.parametrize("with_usage", [False, True])
def test_a_stream_is_a_whole_answer(tmp_path, server, with_usage):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    server.message = {"tool_calls": [call]}
    server.finish_reason = "tool_calls"

    async def rollout(document, generate):
        options = {"stream": True, "stream_options": {"include_usage": with_usage}}
        async with generate.url() as url:
            _, body = await posted(url, chat(document.text, tools=[{}], **options))
        *parts, last, end = body.decode().split("\n\n")
        assert (last, end) == ("data: [DONE]", "")
        return [orjson.loads(part.removeprefix("data: ")) for part in parts]

    run_job(tmp_path, server, 1, rollout)
    assert "stream" not in server.payloads[0]
    ((found,),) = results(tmp_path)
    assert [bool(part["choices"]) for part in found] == [True, False][: 1 + with_usage]
    (choice,) = found[0]["choices"]
    assert choice["delta"]["tool_calls"] == [{"index": 0, **call}]
    assert (found[0]["object"], choice["finish_reason"]) == ("chat.completion.chunk", "tool_calls")
    assert ("usage" in found[-1]) == with_usage


def test_other_paths_and_what_is_refused(tmp_path, server):
    server.paths["/v1/embeddings"] = embeddings
    is_chat = {"role": "user", "content": "text 0"}
    server._status = lambda body, times: 400 if is_chat in body.get("messages", []) else None

    async def rollout(document, generate):
        async with generate.url() as url:
            told = [
                await posted(url, {"input": "a"}, "/embeddings"),
                await posted(url, chat(document.text)),
                await posted(url, [1]),
                await posted(url, {"input": "a", "stream": True}, "/responses"),
                await posted(url.replace("/v1", ""), chat("a")),
                await posted(url[: url.index("/", 8)] + "/v1", chat("a")),
            ]
            async with aiohttp.ClientSession() as session, session.get(f"{url}/models") as models:
                document.metadata["models"] = (await models.json())["data"]
        return [status for status, _ in told] + [told[1][1].decode(), told[5][1].decode()]

    run_job(tmp_path, server, 1, rollout)
    ((found,),) = results(tmp_path)
    assert found[:-2] == [200, 400, 400, 400, 404, 404]
    assert "refused" in orjson.loads(found[-2])["error"]["message"]
    assert "POST /v1/chat/completions is not served" in found[-1]
    assert rows(tmp_path)[0]["metadata"]["models"][0]["id"] == "fake"
    assert server.asked["a"] == 0


def test_a_server_without_responses_is_named_with_what_agents_can_use(tmp_path, server):
    async def rollout(document, generate):
        async with generate.url() as url:
            await posted(url, {"input": "a"}, "/responses")

    with pytest.raises(CkptError, match="path /v1/responses: let your agent use chat completions"):
        run_job(tmp_path, server, 1, rollout)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("fails", [False, True])
def test_an_agent_may_leave_its_connection_open(tmp_path, server, fails):
    left = []

    async def rollout(document, generate):
        async with generate.url() as url:
            parts = urlsplit(url)
            left.append(await asyncio.open_connection(parts.hostname, parts.port))
            if fails:
                raise ValueError("no plan")
            return (await asked(url, document.text))["id"]

    with pytest.raises(CkptError, match="no plan") if fails else nullcontext():
        run_job(tmp_path, server, 1, rollout)
    assert results(tmp_path) == [["fake"]] * (not fails)
    assert not event_loop.left_behind  # a signal would end the process without its finally blocks


@pytest.mark.parametrize("differ", [False, True])
def test_prompts_that_differ_after_a_kill_are_said(tmp_path, server, log, differ):
    requests.warn_once.cache_clear()
    server._status = rejects(["bad"])
    fails = FailsFirst()

    async def rollout(document, generate):
        async with generate.url() as url:
            await posted(url, chat("bad"))
            await asked(url, f"{document.text}, said at {fails.now and differ}")
            if not fails.now:
                await asked(url, "a further one")
        fails()
        return 1

    fails.run_twice(tmp_path, server, rollout)
    assert sum("time or random" in line for line in log) == differ


@pytest.mark.parametrize("is_answered", [False, True])
def test_a_client_that_hangs_up_and_asks_again_pays_once(tmp_path, is_answered):
    async def rollout(document, generate):
        async with generate.url() as url:
            parts = urlsplit(url)
            body = orjson.dumps(chat(document.text))
            head = f"POST {parts.path}/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: "
            _, writer = await asyncio.open_connection(parts.hostname, parts.port)
            writer.write(f"{head}{len(body)}\r\n\r\n".encode() + body)
            await until_async(lambda: server.asked.total())
            writer.close()
            await writer.wait_closed()
            if is_answered:
                server.release()
                await asked(url, "another")
            async with aiohttp.ClientSession() as session:
                again = asyncio.create_task(session.post(f"{url}/chat/completions", data=body))
                await asyncio.sleep(0)
                await posted(url, [1])  # so it has come
                server.release()
                return (await again).status

    with FakeServer(hold_after=0) as server:
        run_job(tmp_path, server, 1, rollout)
    assert server.asked["text 0"] == 1
    assert results(tmp_path) == [[200]]


@pytest.mark.parametrize(
    "setting, settings, lines",
    [
        ({}, {"skip_bad_requests": True}, 1),
        ({"on_refusal": "drop"}, {}, 0),
        ({"on_refusal": "dead_letter"}, {}, 1),
    ],
)
def test_an_agent_that_fails_because_its_request_was_refused_is_no_other_failure(
    tmp_path, server, setting, settings, lines
):
    server._status = rejects([] if setting else ["text 0"])
    server._answer = lambda payload, times: "I'm sorry, but I can't help with that."

    async def rollout(document, generate):
        async with generate.url() as url:
            status, _ = await posted(url, chat(document.text))
            if status != 200:
                raise RuntimeError(f"Error code: {status}")
        return 1

    run_job(tmp_path, server, 1, rollout, config=setting, **settings)
    assert rows(tmp_path) == []
    assert len(letters(tmp_path)) == lines


def test_a_sample_notes_what_an_agent_asks_and_no_calls(server):
    noted = {}

    async def rollout(document, generate):
        async with generate.url() as url:
            await asked(url, document.text)
        return await generate.once("look", str.upper, document.text)

    async def generate(payload, **settings):
        usage = {"prompt_tokens": 3}
        return SimpleNamespace(
            text="yes", finish_reason="stop", usage=usage, tool_calls=None, answer={}
        )

    generate.model_name = "fake"
    generate.once = lambda name, function, text: asyncio.sleep(0, function(text))
    document = Document(text="a", id="1")
    assert asyncio.run(noting(rollout, noted)(document, generate)) == "A"
    ((request,),) = noted.values()
    assert (request.question, request.tokens.prompt) == ("a", 3)


async def test_a_rollout_that_blocks_the_loop_of_several_ranks_is_named_once(monkeypatch, log):
    monkeypatch.setattr(user_frames, "_BLOCKED_SECONDS", 0.05)
    monkeypatch.setattr(user_frames, "_named", {""})
    ranks = [asyncio.create_task(user_frames.warn_when_blocked()) for _ in range(3)]
    await asyncio.sleep(0)  # the ranks begin
    until(lambda: any("blocked the event loop, in tests/" in line for line in log))
    threading.Event().wait(0.3)  # the others would say it, too
    for rank in ranks:
        rank.cancel()
    await asyncio.gather(*ranks, return_exceptions=True)
    assert sum("blocked the event loop" in line for line in log) == 1
    until(
        lambda: (
            not any(thread.name == "datatrove-ckpt loop watch" for thread in threading.enumerate())
        )
    )


async def test_addresses_raise_the_limit_on_open_files(monkeypatch):
    current = [8, 4096]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: tuple(current))
    monkeypatch.setattr(
        resource, "setrlimit", lambda kind, pair: current.__setitem__(slice(None), pair)
    )
    async with serve(None, "fake"):
        pass
    assert 8 < current[0] < current[1] == 4096


async def test_a_request_that_nobody_waits_for_ends_with_the_address():
    ended = []
    has_begun = asyncio.Event()

    async def generate(payload, **settings):
        has_begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(payload)

    async with serve(generate, "fake") as url:
        asking = asyncio.create_task(posted(url, chat("a")))
        await has_begun.wait()
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking
        await asyncio.sleep(0)
    assert ended == [chat("a")]
