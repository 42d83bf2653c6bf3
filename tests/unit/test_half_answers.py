"""Half-written answers go on with their next token: which requests, which servers, which pieces."""

import asyncio
import re
from concurrent.futures import Future
from itertools import chain

import orjson
import pytest

from datatrove_ckpt.common.counts import WorkCounts
from datatrove_ckpt.common.redaction import Secret
from datatrove_ckpt.inference.client import half_answers
from datatrove_ckpt.inference.client.client import Outage
from datatrove_ckpt.inference.client.half_answers import HalfAnswer, is_long, may_continue
from datatrove_ckpt.inference.client.responses import UnexpectedResponse
from datatrove_ckpt.inference.client.routing import Request
from datatrove_ckpt.inference.client.urls import HiddenUrl
from datatrove_ckpt.inference.servers.continuation import find_continuation
from tests import golden
from tests.clients import Sleeps, client_of, config
from tests.jobs import chat
from tests.patience import pass_for
from tests.token_server import TokenServer

CHAT = "/v1/chat/completions"
RENDER, GENERATE, DERENDER = f"{CHAT}/render", "/inference/v1/generate", f"{CHAT}/derender"
STEPS = [RENDER, GENERATE, DERENDER]


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    monkeypatch.setattr(half_answers, "STREAM_INTERVAL", 4)


@pytest.fixture
def server():
    with TokenServer() as server:
        yield server


class Saved(dict[int, bytes]):
    """The pieces of one answer, as the request cache has them."""

    @property
    def ids(self):
        pieces = [orjson.loads(self[number])["half"] for number in sorted(self)]
        return [*chain.from_iterable(pieces)]


class Asking:
    """A client of servers, which asks one question."""

    def __init__(self, *servers, **settings):
        settings = {"server_patience_seconds": 5.0, "half_answers": True, **settings}
        self.urls = [server.url for server in servers]
        self.config = config("endpoint", endpoint_url=self.urls, **settings)
        self.saved = Saved()
        self.model = "m"

    async def ask(self, question="how?", **more):
        payload = chat(question, model=self.model, temperature=0, **more)
        async with client_of(self.config, self.urls, sleep=Sleeps()) as client:
            for target in client.servers.router.targets:
                continuation = await find_continuation(self.config, target.url, None, self.model)
                client.servers.set_continuation(target, continuation)
            self.prepare(client)
            self.work = client.sender.work
            body = orjson.dumps(payload)
            request = Request(client.sender, body=body)
            request.half = HalfAnswer(self.saved, self.work)
            return await client.complete(body, request=request)

    def prepare(self, client):
        pass

    def answer(self, *arguments, **more):
        return asyncio.run(self.ask(*arguments, **more))


class TimedAsking(Asking):
    """The time of its event loop passes when a test says so, too: a busy machine is no silence."""

    async def ask(self, *arguments, **more):
        self._loop = asyncio.get_running_loop()
        return await super().ask(*arguments, **more)

    async def pass_for(self, seconds):
        """For the event loop of a server."""
        passed = Future()

        def pass_now():
            pass_for(seconds)
            passed.set_result(None)

        self._loop.call_soon_threadsafe(pass_now)
        await asyncio.wrap_future(passed)


def without_id(completion):
    completion.response_id = ""
    completion.usage.pop("completion_tokens_details", None)
    return completion


def whole(server, *arguments, **more):
    asking = Asking(server)
    server.missing |= {RENDER}
    completion = asking.answer(*arguments, **more)
    server.missing.clear()
    server.requested.clear()
    server.generated = 0
    return without_id(completion)


# which requests ----------------------------------------------------------------------------------


ASKED = chat("text", model="m")


@golden.rows("half_answers")
def test_requests_that_may_go_on_and_long_answers(code):
    names = {"may_continue": may_continue, "is_long": is_long, "ASKED": ASKED}
    golden.show("half_answers", code, names)


# how they are answered ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more", [{}, {"max_tokens": 7}, {"max_tokens": 8}, {"tools": [{}]}, {"min_tokens": 5}]
)
@pytest.mark.parametrize("cut", range(11))
def test_an_answer_cut_anywhere_is_that_of_the_whole_request(server, more, cut):
    expected = whole(server, **more)
    asking = Asking(server)
    first = asking.answer(**more)
    assert without_id(first) == expected
    tokens = expected.usage["completion_tokens"]
    assert server.count(GENERATE) == 2  # one asks what the server can do
    # Each row is whole, or is not there.
    for number in [number for number in asking.saved if number >= cut]:
        del asking.saved[number]
    kept = len(asking.saved.ids)
    server.generated = 0
    server.requested.clear()
    second = asking.answer(**more)
    assert without_id(second) == expected
    asked = [(path, payload) for path, payload in server.requested if path in STEPS][-3:]
    of_probe = 2 * min(24, server.length)
    assert server.generated - of_probe == tokens - kept
    if kept < tokens:
        params = asked[1][1]["sampling_params"]
        assert params["max_tokens"] == more.get("max_tokens", 10_000) - kept
        assert params.get("min_tokens", 0) == max(0, more.get("min_tokens", 0) - kept)
    else:
        assert [path for path, _ in asked][-2:] == [RENDER, DERENDER]
    assert asking.work.continued == (kept > 0)
    assert asking.work.continued_tokens == kept


def test_usage_has_the_fields_of_whole_answers(server):
    answer = Asking(server).answer()
    assert [*answer.usage] == [
        "prompt_tokens",
        "total_tokens",
        "completion_tokens",
        "completion_tokens_details",
    ]
    assert answer.usage["completion_tokens"] == 10
    assert answer.usage["completion_tokens_details"] is None


# what goes wrong ---------------------------------------------------------------------------------


class Once:
    """Changes the nth event of the streams after the probe's."""

    def __init__(self, number, changed):
        self.number = number
        self.changed = changed
        self.is_probe = True

    def __call__(self, event):
        if self.is_probe:
            self.is_probe = event["choices"][0]["finish_reason"] is None
            return event
        self.number -= 1
        return self.changed(event) if self.number == 0 else event


def aborted(event):
    (choice,) = event["choices"]
    return {"choices": [{**choice, "finish_reason": "abort"}]}


def ended_twice(event):
    (choice,) = event["choices"]
    end = b"data: %b\n\n" % orjson.dumps({"choices": [{**choice, "finish_reason": "stop"}]})
    return end + end


def framed(before, after):
    return lambda event: before + b"data: %b" % orjson.dumps(event) + after


RENDERED = orjson.dumps(
    {
        "request_id": "r",
        "token_ids": [5],
        "sampling_params": {"max_tokens": 9},
        "features": None,
    }
)


def half_answer(saved):
    half = HalfAnswer(saved, WorkCounts())
    half.continued(RENDERED, "version")
    return half


@pytest.mark.parametrize("size", [1, 2, 3, 7, 30])
def test_a_stream_may_be_cut_into_any_bytes(size):
    events = [
        {"choices": [{"token_ids": [7, 8], "finish_reason": None, "text": "\u00e9"}]},
        {"choices": [{"token_ids": [9]}]},
        {"choices": [{"token_ids": [3], "finish_reason": "stop", "stop_reason": None}]},
    ]
    stream = b": begins\n\n" + b"".join(b"data: %b\r\n\n" % orjson.dumps(e) for e in events)
    stream += b"data: [DONE]\n\n"
    saved = Saved()
    half = half_answer(saved)
    have_grown = [half.feed(stream[start : start + size]) for start in range(0, len(stream), size)]
    assert sum(have_grown) == 3
    assert saved.ids == [7, 8, 9, 3]
    assert half.end == ["stop", None]


def test_a_line_without_an_end_does_not_fill_the_memory():
    half = half_answer(Saved())
    half.feed(b"data: {" + b" " * 2**19)
    with pytest.raises(UnexpectedResponse, match="without an end"):
        half.feed(b" " * 2**19)


def test_more_tokens_than_allowed_are_no_answer(server, log):
    expected = whole(server, max_tokens=4)

    def longer(event):
        (choice,) = event["choices"]
        return {"choices": [{**choice, "token_ids": [*choice["token_ids"], 1005]}]}

    server.change = Once(2, longer)
    assert without_id(Asking(server).answer(max_tokens=4)) == expected
    assert log.said("max_tokens")


@golden.rows("broken_half_answers")
def test_whatever_a_server_sends_the_answer_is_that_of_the_whole_request(server, log, code):
    """A title is what changes the nth event of a stream, or what a step answers once it has passed
    the probe. No event is lost between the lines that a gateway adds.
    """

    def then(path, answer):
        def changed(fields):
            if server.count(path) == 1:
                return fields
            return {**fields, **answer} if isinstance(answer, dict) else answer

        server.changed[path] = changed

    def once(number, change):
        server.change = Once(number, change)

    expected = whole(server)
    eval(code, {**globals(), "once": once, "then": then})
    asking = Asking(server)
    assert without_id(asking.answer()) == expected
    work = asking.work
    # The first event of a stream has one id, and the others have four.
    sent = [len(p["token_ids"]) for path, p in server.requested if path == GENERATE]
    said = [re.sub(r": \w+Error\(.*", "", line) for line in log.said("cannot continue")]
    found = f"streams of {sent}, {work.retries} retries, {work.continued_tokens} tokens kept"
    golden.hold("broken_half_answers", code, "\n".join([found, *said]), SERVER=server.url)


def test_what_the_steps_cannot_answer_is_requested_as_a_whole(server):
    """The server cannot show this answer, whose document would fail."""
    expected = whole(server)
    # A probe of the server has an answer first; and then the one that decides about the document.
    server.changed[DERENDER] = lambda fields: 500 if server.count(DERENDER) > 1 else fields
    asking = Asking(server, request_max_attempts=3)
    assert without_id(asking.answer()) == expected
    assert asking.work.errors["HTTP 500"] == 4
    assert server.generated == 5 * 10


def test_an_attempt_that_grew_excuses_no_later_one(server):
    expected = whole(server)
    server.change = Once(2, lambda event: None)
    server.changed[RENDER] = lambda fields: 500 if server.count(RENDER) > 2 else fields
    asking = Asking(server, request_max_attempts=3)
    assert without_id(asking.answer()) == expected
    assert asking.work.errors["HTTP 500"] == 3


def test_rejections_are_logged_once(server, log):
    def refused(fields):
        return fields if server.count(RENDER) == 1 else 400

    server.changed[RENDER] = refused
    asking = Asking(server)
    for question in ("how?", "why?"):
        asking.answer(question)
    assert len(log.said("cannot continue an answer")) <= 1


def test_a_step_that_answers_late_is_left_out(server, log):
    """Its late answer would be taken for that to another document."""

    class Late(Asking):
        def prepare(self, client):
            (target,) = client.servers.router.targets
            transport = client.servers.transport(target, "chat/completions/render")
            for _ in range(3):
                transport.report_unexpected_bytes("an answer without a request")

    expected = whole(server)
    assert without_id(Late(server).answer()) == expected
    assert server.count(RENDER) == 1  # the probe's
    assert log.said("cannot continue an answer")


def test_an_empty_answer_is_requested_as_a_whole(server):
    server.lengths["how?"] = 1
    expected = whole(server)
    assert expected.text == ""
    assert without_id(Asking(server).answer()) == expected


def test_parameters_that_the_server_adds_are_obeyed(server):
    expected = whole(server)

    def stops(fields):
        return {**fields, "sampling_params": {**fields["sampling_params"], "stop": ["."]}}

    server.changed[RENDER] = lambda fields: stops(fields) if server.count(RENDER) > 1 else fields
    asking = Asking(server)
    assert without_id(asking.answer()) == expected
    assert not asking.saved


# pieces ------------------------------------------------------------------------------------------


def damaged(saved, server):
    del saved[1]


def of_another_answer(saved, server):
    saved[1] = saved[5].replace(b'"after"', b'"after" ')


def of_another_template(saved, server):
    server.template = [1, 1]


def of_another_version(saved, server):
    server.version = "0.33.0"


def longer_before(saved, server):
    saved[1] = orjson.dumps({**orjson.loads(saved[1]), "half": [5, 6, 7, 8]})


@pytest.mark.parametrize(
    "change, kept",
    [
        (damaged, 1),
        (of_another_answer, 1),
        (of_another_template, 0),
        (of_another_version, 0),
        (longer_before, 5),
    ],
)
def test_pieces_that_do_not_fit_are_not_used(server, change, kept):
    asking = Asking(server)
    asking.answer()
    change(asking.saved, server)
    expected = whole(server)
    again = asking.answer()
    if change is not longer_before:
        assert without_id(again) == expected
    assert asking.work.continued_tokens == kept
    # The new pieces have replaced the others.
    server.generated = 0
    third = asking.answer()
    assert without_id(third) == without_id(again)
    assert asking.work.continued_tokens == 10


# servers -----------------------------------------------------------------------------------------


def test_another_model_continues_nothing(server):
    """Two endpoints may have two models for a request."""
    asking = Asking(server)
    asking.answer()
    asking.model = "other"
    asking.answer()
    assert asking.work.continued == 0


def test_the_steps_share_their_connections(server):
    """Otherwise a burst of requests would have twice as many open files as places."""
    asking = Asking(server)
    asking.answer()
    assert [path for path, _ in server.requested[-3:]] == STEPS
    assert len(set(server.peers[-3:])) == 1


def test_an_answer_that_grows_for_long_is_no_silence():
    """No warning that the endpoint may hang."""
    now = 0.0
    outage = Outage(1000.0, lambda: now)
    outage.answered()
    outage.check_silence(1.0, 3600.0)
    for _ in range(20):
        now += 60.0
        outage.grown()
        outage.check_silence(now, 3600.0)
        assert outage.hangs == 0
    now += 121.0
    outage.check_silence(now, 3600.0)
    assert outage.hangs == 121.0


def test_comments_do_not_end_a_silence(server):
    """A gateway says that it is there while the server behind it hangs."""
    expected = whole(server)

    async def hang(request):
        if server.generated == 25 and not hung:
            hung.append(request)
            while request.transport:
                await server.writing.write(b": still there\n\n")
                await asking.pass_for(20.0)

    hung = []
    server.token = hang
    asking = TimedAsking(server, request_timeout=60.0)
    assert without_id(asking.answer()) == expected
    assert asking.work.errors == {"timeout": 1}
    assert asking.work.continued_tokens == 5


def test_another_server_continues(server):
    with TokenServer() as other:
        expected = whole(server)
        server.change = Once(2, lambda event: None)
        asking = Asking(server, other)
        assert without_id(asking.answer()) == expected
        assert other.requested[-3][0] == RENDER
        assert len(other.requested[-2][1]["token_ids"]) == len(server.template) + 4 + 1 + 1


@pytest.mark.parametrize("path", [*STEPS, "/version"])
def test_a_server_without_a_path_gets_whole_requests(server, path, log):
    server.missing.add(path)
    asking = Asking(server)
    asking.answer()
    if path == "/version":
        assert server.count(CHAT) == 1
        return
    assert server.count(CHAT) == 2
    (said,) = log.said("does not continue half-written answers")
    assert "404" in said


@pytest.mark.parametrize(
    "path, changed",
    golden.values("probes_of_another_form", globals()),
)
def test_a_server_with_another_form_gets_whole_requests(server, path, changed, log):
    server.changed[path] = lambda fields: {**fields, **changed}
    Asking(server).answer()
    assert server.count(CHAT) == 2
    assert log.said("does not continue half-written answers")


def test_a_server_that_is_ours_must_refuse_each_path_without_its_key(server, log):
    async def found(**settings):
        ours = config("vllm", "m", **settings)
        return await find_continuation(ours, HiddenUrl(server.url), Secret("k"), "m")

    assert asyncio.run(found()) is None
    (said,) = log.said("does not continue half-written answers")
    assert "without the key" in said
    server.key = "k"
    assert asyncio.run(found()).version == "0.32.0 m"
    assert asyncio.run(found(use_chat=False)).usage[0] == "prompt_tokens"


def test_request_timeout_is_the_longest_silence(server):
    async def slow(request):
        if server.generated >= 20:  # ten of each step of the probe
            await asking.pass_for(12.0)  # 48 s for a piece

    expected = whole(server)
    asking = TimedAsking(server, request_timeout=100.0)
    server.token = slow
    assert without_id(asking.answer()) == expected  # which takes 120 s
    assert asking.work.errors == {}

    hung = []

    async def silent(request):
        # Before the sixth token of the first attempt, after ten of each step of the probe.
        if server.generated == 25 and not hung:
            hung.append(request)
            while request.transport:
                await again.pass_for(20.0)

    server.token = silent
    server.generated = 0
    again = TimedAsking(server, request_timeout=60.0)
    assert without_id(again.answer()) == expected
    assert again.work.errors == {"timeout": 1}
    assert again.work.continued_tokens == 5
