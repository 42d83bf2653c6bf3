"""Each row of the client's retry table, against a real socket that sends what the test says, byte
by byte.
"""

import asyncio
import json
import re
import socket
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from email.utils import formatdate

import orjson
import pytest

from datatrove_ckpt.common.redaction import redact
from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.errors import (
    CkptError,
    RequestFailed,
    RequestRejected,
    ServerRefused,
    ServerUnavailable,
)
from datatrove_ckpt.inference.client import body as body_limits
from datatrove_ckpt.inference.client import http1 as plain_transport
from datatrove_ckpt.inference.client.body import LargeAnswer, RequestBody
from datatrove_ckpt.inference.client.client import CompletionClient, Outage, RequestClock, post
from datatrove_ckpt.inference.client.evidence import PROBE_INTERVAL, AnsweredRequests, with_one_word
from datatrove_ckpt.inference.client.http1 import Transport
from datatrove_ckpt.inference.client.responses import CHAT, Completion, RetryableError
from datatrove_ckpt.inference.client.routing import Request, Sender
from datatrove_ckpt.inference.client.urls import HiddenUrl, beside, proxy_of
from datatrove_ckpt.testing import FakeServer
from tests import golden
from tests.clients import Sleeps, client_of, turns
from tests.patience import pass_for
from tests.raw_server import BODY, RawServer, answer, chat, http, never, reset, serving, then_close

SHORTEST = b'{"model":"m","messages":[]}'  # with one word in place of each text
ENDPOINT = {"server_type": "endpoint", "endpoint_url": "http://127.0.0.1:1"}
CUSTOM = {"server_type": "custom", "model_kwargs": {"server_script": "x.py"}}


async def chunked(server, writer):
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    for byte in chat():
        writer.write(b"1\r\n" + bytes([byte]) + b"\r\n")
        await writer.drain()
    writer.write(b"0\r\n\r\n")


GOOD = answer(http(200, chat()))


@pytest.fixture(autouse=True)
def _probes_as_outside_of_tests(monkeypatch):
    monkeypatch.setattr("datatrove_ckpt.inference.client.client.PROBE_INTERVAL", PROBE_INTERVAL)


def config(**settings):
    defaults = {
        "server_type": "dummy",
        "model_name_or_path": "org/model",
        "request_max_attempts": 3,
    }
    return InferenceConfig(**{**defaults, **settings})


@asynccontextmanager
async def talking(*replies, sleep=None, others=0, **settings):
    """A scripted server, and a client whose time is that of ``Sleeps``.

    ``others``: how many other requests are answered between two attempts.
    """
    sleeps = Sleeps()

    async def busy(seconds):
        for _ in range(others):
            await client.complete(b"{}")
        await sleeps(seconds)

    async with (
        serving(*replies) as (server, url),
        client_of(
            config(**settings), [url], "key", sleep=sleep or busy, clock=sleeps.clock
        ) as client,
    ):
        yield server, client, sleeps


class Outcome:
    """The result of one request to a scripted server."""

    def __init__(self, *replies, **settings):

        asyncio.run(self._play(replies, settings))

    async def _play(self, replies, settings):
        async with talking(*replies, **settings) as (self.server, client, self.sleeps):
            try:
                self.result = await client.complete(BODY)
            except CkptError as error:
                self.result = error
            self.client = client
            self.work = client.sender.work

    def is_error(self, kind, *words):
        assert isinstance(self.result, kind)
        for word in words:
            assert word in str(self.result)


def fails(fault, is_due=lambda: True):
    """A reply that fails at ``BODY`` alone."""

    async def reply(server, writer):
        is_bad = server.requests[-1][1] == BODY and is_due()
        await (fault if is_bad else GOOD)(server, writer)

    return reply


def choices(*found):
    return json.dumps({"choices": list(found)}).encode()


PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
INDEXED = [
    {"index": index, "message": {"content": f"choice {index}"}, "finish_reason": "stop"}
    for index in (2, 0, 1)
]
HI = Completion("hi", "stop", {"total_tokens": 3})
CALLED = {"id": "call_f", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CUSTOM_CALL = {"id": "c", "type": "custom", "custom": {"name": "f", "input": "x"}}


NULL_ACCEPTED = {"accept_null_finish_reason": True, **ENDPOINT}


def parsed(body, **settings):
    outcome = Outcome(chunked if body is None else answer(http(200, body)), **settings)
    path = "chat/completions" if settings.get("use_chat", True) else "completions"
    head, sent = outcome.server.requests[0]
    assert head.startswith(f"POST /v1/{path} ".encode())
    assert b"Authorization: Bearer key" in head
    assert sent == BODY
    return replace(outcome.result, seconds=0.0)


def usage(text):
    return CHAT.parse(chat().replace(b'{"total_tokens": 3}', text.encode())).usage


test_an_answer_is_parsed = golden.shows("parsed_answers", globals())


BEYOND = "1" + "0" * 30


@pytest.mark.parametrize("status", [400, 413, 422, 431])
def test_a_request_that_can_never_succeed_is_not_repeated(status):
    rejection = http(status, b"503 try again later" + b"x" * 5000, "Retry-After: 1")
    outcome = Outcome(fails(answer(rejection)))
    assert isinstance(outcome.result, RequestRejected)
    assert outcome.result.status == status
    assert len(outcome.result.body) == 2000
    assert [body for _, body in outcome.server.requests] == [BODY, SHORTEST]
    torn = then_close(http(status, b"bad")[:-1])
    assert isinstance(Outcome(fails(torn)).result, RequestRejected), "although it is torn"


def test_what_llamacpp_says_of_a_text_that_is_too_long_is_the_texts_fault():
    said = (
        b'{"error":{"code":500,"message":"input (601 tokens) is too large to process. increase the physical batch size '
        b'(current batch size: 512)","type":"server_error"}}'
    )
    outcome = Outcome(fails(answer(http(500, said))))
    assert isinstance(outcome.result, RequestRejected)
    assert (outcome.result.status, outcome.result.body) == (413, said.decode())
    quoted = http(
        500, b'{"error":{"code":500,"message":"crashed at: %s"}}' % said.replace(b'"', b"'")
    )
    assert isinstance(Outcome(answer(quoted), answer(http(200, chat()))).result, Completion), (
        "a document may quote it"
    )


AWAY = answer(http(503, b"later"))


NO_REASON = answer(http(200, chat(finish_reason=None)))
NOTHING = answer(http(200, chat("", None)))


def told(*replies, **settings):
    """How many requests were sent, and how the last one ended."""
    outcome = Outcome(*replies, **settings)
    ended = outcome.result
    said = ended.text if isinstance(ended, Completion) else f"{type(ended).__name__}: {ended}"
    for differs, name in (
        (r"127\.0\.0\.1:\d+", "SERVER"),
        (r"for \d+ s", "for SECONDS"),
        (r"HTTP/1.1 \([^)]+\)", "HTTP/1.1 (WHY)"),
    ):
        said = re.sub(differs, name, said)
    return len(outcome.server.requests), said


def page(body):
    """As of an endpoint whose URL is wrong."""
    return told(answer(http(200, body)), **ENDPOINT)


def refused(status):
    return told(answer(http(status, b"no way", "Location: /elsewhere")))


def limited(error):
    reply = http(429, json.dumps({"error": error}).encode(), "Retry-After: 1")
    return told(answer(reply), GOOD)


def head(fields):
    raw = then_close(f"HTTP/1.1 200 OK\r\n{fields}\r\n\r\n".encode())
    return told(raw, **ENDPOINT), told(raw, raw, GOOD, **ENDPOINT)[1]


def addresses(url):
    """A URL may be the whole address of a path."""
    url = HiddenUrl(url)
    paths = ("chat/completions", "completions", "embeddings", "models", "/tokenize")
    return [str(url.api(path).reveal()) for path in paths], url.may_lack_version


def probe(**payload):
    """It has one word in place of each text, and all else of the request."""
    before, after = orjson.dumps(payload).split(b"eHh4")
    return orjson.loads(with_one_word(RequestBody([before, after], [b"xxx"])))


test_how_requests_end_and_what_they_are = golden.shows("requests", globals(), {"beside": beside})


def test_what_may_pass_is_tried_again():
    for name in golden.sections("unfinished_answers"):
        reply = eval(name)
        outcome = Outcome(reply, GOOD)
        assert outcome.result == HI, name
        counts = (
            outcome.work.sent,
            outcome.work.retries,
            outcome.client.outage.answers,
            outcome.client.in_flight,
        )
        assert counts == (2, 1, 1, 0), name
        assert 0 <= outcome.sleeps[0] <= 0.5


async def test_a_request_that_met_a_closed_port_was_not_sent():
    raw = RawServer(GOOD)
    closed = socket.socket()
    closed.bind(("127.0.0.1", 0))  # nobody listens yet, and nobody else gets the port

    async def open_port(seconds):
        listeners.append(await asyncio.start_server(raw.handle, sock=closed))

    listeners = []
    url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    async with client_of(config(), [url], None, sleep=open_port) as client:
        assert await client.complete(BODY) == HI
        work = client.sender.work
        assert (work.sent, work.retries, len(raw.requests)) == (1, 0, 1)
        assert work.errors == {"connection": 1}
    listeners[0].close()
    await asyncio.gather(*raw.handlers)


@pytest.mark.parametrize("reply", [AWAY, reset, NO_REASON])
def test_a_server_that_answers_nothing_is_waited_for_and_then_the_run_stops(reply):
    outcome = Outcome(reply)
    outcome.is_error(ServerUnavailable, "server_patience_seconds=600")
    assert 600 <= sum(outcome.sleeps) <= 630
    probes = sum(body == SHORTEST for _, body in outcome.server.requests)
    assert (0 if reply is AWAY else 8) <= probes <= 11, "at most one a minute"
    assert len(outcome.server.requests) == 1 + len(outcome.sleeps) + probes


@pytest.mark.parametrize("settings", [ENDPOINT, CUSTOM])
def test_a_server_that_never_gives_a_finish_reason_is_not_believed(settings):
    outcome = Outcome(NO_REASON, **settings)
    says = "the answer has no finish_reason", "set accept_null_finish_reason to true"
    outcome.is_error(ServerRefused, *says)
    # A server that is stopping has a minute to be away, and all that time nothing is believed.
    assert 60 <= sum(outcome.sleeps) < 600
    assert outcome.client.outage.answers == 0


async def test_after_the_third_such_answer_only_what_was_in_flight_is_paid():
    """Requests that wait for a place, or for their next attempt, are not sent."""
    async with talking(answer(http(200, b"data: 1")), max_concurrent_generations=4, **ENDPOINT) as (
        server,
        client,
        _,
    ):
        asked = [client.complete(b"%d" % number) for number in range(40)]
        errors = await asyncio.gather(*asked, return_exceptions=True)
        assert all(isinstance(error, ServerRefused) for error in errors)
        assert len(server.requests) <= 3 + 4


# When, for how long the oldest request is in flight, answers until then, for how long it hangs.
LOOKS = golden.values("looks_at_an_endpoint", globals())


def test_an_endpoint_that_hangs_is_told_once(log):
    times = [0]
    outage = Outage(600, lambda: times[-1])
    for now, busy, answers, hangs in LOOKS:
        times.append(now)
        if answers > outage.answers:
            outage.answered()
        if now == 3300:
            outage.begin(False, 3201)
        outage.check_silence(busy, 3600)
        assert round(outage.hangs) == hangs, now
    assert [line.split(" ")[0] for line in log] == ["WARNING", "INFO", "WARNING"]
    assert "has not answered for 121 s; its slowest answer took 5 s." in log[0]
    assert "wait 3600 s each (request_timeout). If it hangs," in log[0]


def test_an_address_where_nothing_has_answered_yet_may_be_wrong(log):
    outage = Outage(600, lambda: 9.0)
    outage.begin(True, 0.0)
    outage.show("refused")
    outage.answered()
    outage.begin(True, 0.0)
    outage.show("refused")
    first, _, second = log
    assert "Nothing has answered there yet: is the address right" in first
    assert "refused" in second
    assert "yet" not in second


async def test_a_page_in_place_of_answers_is_waited_for_once_there_were_answers():
    """A proxy answers while the server is away."""
    page = answer(http(200, b"<!DOCTYPE html>"))
    replies = [GOOD, *[page] * 16, GOOD]
    async with talking(*replies, **ENDPOINT) as (_, client, sleeps):
        assert await client.complete(BODY) == HI
        another = CompletionClient(client.servers, Sender(), sleep=sleeps)
        assert await another.complete(BODY) == HI
        assert sum(sleeps) > 60


@pytest.mark.parametrize("accepted", [False, True])
async def test_a_server_that_has_given_a_finish_reason_and_gives_none_has_cut_the_answer_off(
    accepted,
):
    """Whatever the setting is."""

    settings = {"accept_null_finish_reason": accepted, **ENDPOINT}
    async with talking(GOOD, NO_REASON, NO_REASON, NO_REASON, GOOD, **settings) as (
        server,
        client,
        _,
    ):
        assert [(await client.complete(BODY)).finish_reason for _ in range(2)] == ["stop", "stop"]
        assert len(server.requests) == 5


@pytest.mark.parametrize("status", [429, 498, 503])
@pytest.mark.parametrize("header", ["", "Retry-After: 3600"])
async def test_a_request_that_fails_while_others_are_answered_is_given_up_alone(status, header):
    reply = fails(answer(http(status, b"", header)))
    # Under "auto" it would keep the only place while it waits.
    settings = {"server_patience_seconds": 100.0, "max_concurrent_generations": 2}
    async with talking(reply, others=1, **settings) as (_, client, sleeps):
        with pytest.raises(
            RequestFailed, match=rf"this request failed while others.*HTTP {status}"
        ):
            await client.complete(BODY)
        assert 1000 <= sum(sleeps) <= 1060


@pytest.mark.parametrize("others", [25, 1])
@pytest.mark.parametrize(
    "fault",
    [
        answer(http(500, b"")),
        answer(http(403, b"")),
        answer(http(200, b'{"error": "upstream"}')),
        then_close(http(200, chat())[:-10]),
        answer(http(200, b"data: 1")),
    ],
)
async def test_a_request_is_at_fault_if_the_server_answers_50_others_between_its_attempts_or_a_probe(
    fault, others
):
    async with talking(fails(fault), others=others, **ENDPOINT) as (server, client, _):
        await client.complete(b"{}")
        with pytest.raises(RequestFailed, match=r"after 3 attempts.* answers other requests") as at:
            await client.complete(BODY)
        assert at.value.is_documents
        probes = others == 1
        assert len(server.requests) == 1 + 3 + 2 * others + probes
        assert client.sender.work.requests == probes, "the others are counted elsewhere"


@pytest.mark.parametrize("answered", [0, 1])
async def test_a_refusal_of_a_probe_too_is_of_all(answered):
    async with talking(*[GOOD] * answered, answer(http(403, b""))) as (server, client, _):
        for _ in range(answered):
            await client.complete(SHORTEST)
        with pytest.raises(ServerRefused, match="HTTP 403"):
            await client.complete(BODY)
        sent = [body for _, body in server.requests]
        assert sent == [*[SHORTEST] * answered, BODY, BODY, SHORTEST]


async def test_failures_of_a_sick_server_are_no_mark_while_another_one_answers():
    sick, well = AnsweredRequests(), AnsweredRequests()
    clock = RequestClock(Outage(600, lambda: 0.0), 0.0, 0, ())
    for _ in range(9):
        clock.failed(RetryableError("500"), sick, 2)
    for answers in (0, 49, 1):
        well.number += answers
        well.sent_at = time.monotonic()
        if answers == 1:
            with pytest.raises(RequestFailed):
                clock.failed(RetryableError("500"), well, 2)
        else:
            clock.failed(RetryableError("500"), well, 3)


# The answer to the probe, and whether another is sent a minute later.
PROBES = golden.values("answers_to_probes", globals())


@pytest.mark.parametrize("reply, is_open", PROBES)
async def test_a_probe_that_is_limited_or_fails_decides_nothing(reply, is_open):
    replies = [GOOD, answer(http(400, b"bad")), reply, GOOD]
    async with talking(*replies, **ENDPOINT) as (server, client, sleeps):
        await client.complete(SHORTEST)
        with pytest.raises(RequestRejected if is_open else ServerRefused) as caught:
            await client.complete(BODY)
        assert "bad" in str(caught.value) or "expired" in str(caught.value)
        probes = 1 + is_open
        assert [body for _, body in server.requests] == [SHORTEST, BODY, *[SHORTEST] * probes]
        assert is_open == (sum(sleeps) > 60)


async def test_a_probe_without_an_answer_in_time_decides_nothing():
    async def silent(server, writer):
        pass_for(600.0)
        await never(server, writer)

    replies = [GOOD, answer(http(400, b"bad")), silent]
    settings = {"request_timeout": 300.0, "server_patience_seconds": 50.0}
    async with talking(*replies, **settings, **ENDPOINT) as (_, client, sleeps):
        await client.complete(SHORTEST)
        with pytest.raises(
            RequestFailed, match=r"rejected this request, and answered no other .*=50"
        ) as caught:
            await client.complete(BODY)
        assert not caught.value.is_documents
        assert sum(sleeps) >= 50


async def test_a_rejection_outlasts_the_patience_while_a_later_request_is_in_flight():
    held = asyncio.Event()
    later = []

    async def sleep(seconds):
        if not later:
            later.append(asyncio.create_task(client.complete(b"{}")))
        await sleeps(seconds)
        if sleeps.now > 100:
            held.set()
            await later[0]

    async def slow(server, writer):
        await held.wait()
        await GOOD(server, writer)

    settings = {"server_patience_seconds": 50.0, **ENDPOINT}
    replies = [GOOD, answer(http(400, b"bad")), slow]
    async with talking(*replies, sleep=sleep, **settings) as (_, client, sleeps):
        await client.complete(SHORTEST)
        client.servers.router.targets[0].evidence.probe_at = 1000.0
        rejected = asyncio.create_task(client.complete(BODY))
        await asyncio.wait([rejected])
        held.set()
        with pytest.raises(RequestRejected, match="bad"):
            await rejected


async def test_a_probe_has_the_time_of_other_requests(monkeypatch):
    monkeypatch.setattr("datatrove_ckpt.inference.client.client._ANSWERS_WITHIN", 0.0)

    async def slow(server, writer):
        await asyncio.sleep(0.3)
        await GOOD(server, writer)

    settings = {"server_patience_seconds": 0.1, **ENDPOINT}
    replies = [GOOD, answer(http(400, b"bad")), slow]
    async with talking(*replies, **settings) as (_, client, _):
        await client.complete(SHORTEST)
        with pytest.raises(RequestRejected, match="bad"):
            await client.complete(BODY)


async def test_rejections_wait_for_an_answer_to_a_later_request_before_a_probe():
    held = asyncio.Event()

    async def slow(server, writer):
        await held.wait()
        await GOOD(server, writer)

    replies = [GOOD, slow, answer(http(400, b"bad")), GOOD]
    async with talking(*replies, sleep=asyncio.sleep, **ENDPOINT) as (server, client, _):
        await client.complete(SHORTEST)
        earlier = asyncio.create_task(client.complete(b'{"earlier": 1}'))
        await server.arrived.acquire()
        await server.arrived.acquire()
        rejected = asyncio.create_task(client.complete(BODY))
        await server.arrived.acquire()
        held.set()
        await earlier
        await turns(20)
        assert not rejected.done(), "it was sent before"
        await client.complete(b'{"later": 1}')
        with pytest.raises(RequestRejected):
            await rejected
        assert len(server.requests) == 4


@pytest.mark.parametrize("settings", [ENDPOINT, {}])
async def test_a_rejection_waits_a_minute_for_the_first_answer_which_may_take_an_hour(settings):
    async with talking(never, answer(http(400, b"bad")), GOOD, **settings) as (
        server,
        client,
        sleeps,
    ):
        earlier = asyncio.create_task(client.complete(SHORTEST))
        await server.arrived.acquire()
        with pytest.raises(RequestRejected, match="bad"):
            await client.complete(BODY)
        assert PROBE_INTERVAL <= sum(sleeps) < PROBE_INTERVAL + 1
        assert not earlier.done()
        earlier.cancel()


async def test_any_answer_of_a_launched_server_decides_a_rejection():
    """Its model and key stay the same, so no later answer and no probe is needed."""
    released = asyncio.Event()

    async def held(server, writer):
        await released.wait()
        await GOOD(server, writer)

    async def sleep(seconds):
        assert not released.is_set(), "it waits for more"
        released.set()
        await asyncio.wait([earlier])

    async with talking(held, answer(http(400, b"bad")), sleep=sleep) as (server, client, _):
        earlier = asyncio.create_task(client.complete(SHORTEST))
        await server.arrived.acquire()
        with pytest.raises(RequestRejected, match="bad"):
            await client.complete(BODY)
        assert len(server.requests) == 2


async def test_an_outage_is_no_mark_against_the_requests_that_it_hit():
    """The server is away for almost all of the patience, and then fails this request a few times
    more.
    """

    async def sleep(seconds):
        await sleeps(seconds)
        if sleeps.now > 550:
            await client.complete(b"{}")

    async def reply(server, writer):
        is_bad = server.requests[-1][1] == BODY and sleeps.now < 580
        await (answer(http(500, b"")) if is_bad or sleeps.now < 550 else GOOD)(server, writer)

    settings = {"request_max_attempts": 8}
    async with talking(reply, sleep=sleep, **settings) as (_, client, sleeps):
        assert (await client.complete(BODY)).text == "hi"


class PatientlyConnecting(Transport):
    """Does not limit the time of the connect by ``timeout``, because a busy machine may need longer
    than that.
    """

    def __init__(self, *arguments, **more):
        super().__init__(*arguments, **more)
        self._connect_timeout = 600.0


@pytest.mark.parametrize("reply", [never, answer(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{")])
def test_an_answer_that_never_comes_is_given_up(reply, monkeypatch):
    monkeypatch.setattr("datatrove_ckpt.inference.client.client.Transport", PatientlyConnecting)
    outcome = Outcome(reply, request_timeout=0.1, server_patience_seconds=0.4)
    outcome.is_error(ServerUnavailable, "no answer in time")


@pytest.mark.parametrize(
    "header, low, high",
    golden.values("advised_waits", globals()),
)
def test_a_wait_that_the_server_asks_for_is_respected(header, low, high):
    if isinstance(header, int):
        header = f"Retry-After: {formatdate(time.time() + header, usegmt=True)}"
    outcome = Outcome(answer(http(429, b"", header)), GOOD)
    assert low <= sum(outcome.sleeps) <= high + 1e-9


BUSY = answer(http(429, b"", "Retry-After: 3600"))


def test_retry_after_does_not_outlast_the_patience_and_the_wait_is_shown(log):
    outcome = Outcome(BUSY, server_patience_seconds=10.0)
    outcome.is_error(ServerUnavailable)
    assert sum(outcome.sleeps) == pytest.approx(10)
    assert len(outcome.server.requests) <= 4, "one more attempt when the patience ends"
    assert re.search(r"waiting, 3 s of 10 s \(server_patience_seconds\)", log[0])


async def test_a_day_of_retry_after_does_not_outlast_the_patience_of_all_requests():
    """Other requests wait for the time that the refused ones have learned."""
    limited = answer(http(429, b"slow", "Retry-After: 86400"))
    settings = {"max_concurrent_generations": "auto", "server_patience_seconds": 10.0, **ENDPOINT}
    async with talking(limited, **settings) as (server, client, sleeps):
        for _ in range(3):
            with pytest.raises(ServerUnavailable, match="No request was answered for 1"):
                await asyncio.wait_for(client.complete(BODY), 5)
        assert sleeps.now == pytest.approx(10, abs=1)
        assert len(server.requests) <= 6


@pytest.mark.parametrize("status", [429, 504])
def test_a_late_answer_is_not_taken_for_that_to_the_next_request(status):
    """As a gateway sends it that has given up a request: first its own answer, and then that of the
    server behind.
    """
    first = []

    async def gateway(server, writer):
        first.append(writer)
        late = len(first) > 1 and writer is first[0]
        writer.write(
            http(200, chat("late" if late else "right"))
            if len(first) > 1
            else http(status, b"given up")
        )

    outcome = Outcome(gateway)
    assert outcome.result.text == "right"
    assert outcome.server.connections == 2


def right(writers):
    """Answers each request; the test may write more into the connections."""

    async def reply(server, writer):
        writers.append(writer)
        writer.write(http(200, chat("right")))

    return reply


def unasked(client):
    """How many answers without a request it has received."""
    return client.servers.router.targets[0].transports[client.api.path].unasked


async def test_answers_without_a_request_close_their_connection_and_stop_the_run_at_the_third():
    writers = []
    async with talking(right(writers)) as (server, client, _):
        for number in range(4):
            assert (await client.complete(BODY)).text == "right"
            # 408 is how servers close an idle connection.
            writers[-1].write(http(200 if number else 408, chat("unasked")))
            while unasked(client) < number:
                await asyncio.sleep(0)
        with pytest.raises(ServerRefused, match=r"without a request 3 times.* past the gateway"):
            await client.complete(BODY)
        assert len(writers) == 4
        assert server.connections == 4


@pytest.mark.parametrize("first", ["own", "extra"])
@pytest.mark.parametrize("moment", ["with it", "after it", "after the next request"])
async def test_no_request_gets_an_answer_that_its_server_sent_unasked(
    first, moment, log, monkeypatch
):
    """A connection rests until its server has sent both, however busy the machine is."""
    for_ever = 1e9
    sleep = asyncio.sleep
    wrong_at = 2 if moment == "after the next request" else 1

    async def until_noted(seconds):
        while seconds == for_ever and not unasked(client):
            await sleep(0)
        await sleep(0)

    async def reply(server, writer):
        monkeypatch.setattr(plain_transport, "QUIET", 0.0)
        own, extra = http(200, chat(server.requests[-1][1].decode())), http(200, chat("extra"))
        if len(server.requests) != wrong_at:
            writer.write(own)
        elif moment == "with it":
            writer.write(own + extra if first == "own" else extra + own)
        else:
            monkeypatch.setattr(plain_transport, "QUIET", for_ever)
            writer.write(own if first == "own" else extra)
            await turns(10)
            writer.write(extra if first == "own" else own)
            await until_noted(for_ever)

    monkeypatch.setattr(plain_transport, "SHORT", 0.0)
    monkeypatch.setattr(asyncio, "sleep", until_noted)

    async with talking(reply) as (server, client, _):
        assert await texts_of(client, 3) == ["0", "1", "2"]
        assert len(server.requests) == 4
        assert server.connections == 5 - wrong_at  # one for each request from then on
    assert "".join(log).count("has sent an answer without a request") == 1


def numbered(content, form="chatcmpl-{:0>31}f"):
    return orjson.dumps({"id": form.format(content), **orjson.loads(chat(content))})


async def texts_of(client, number, body=b"%d".__mod__):
    """The answers to so many requests."""
    return [(await client.complete(body(asked))).text for asked in range(number)]


def with_picture(number):
    return RequestBody([b"[", b"]"], [b"%d" % number])


@pytest.mark.parametrize(
    "repeated, form, body",
    [
        (1, "chatcmpl-{:0>31}f", b"%d".__mod__),
        (3, "chatcmpl-{:0>31}f", b"%d".__mod__),
        (3, "chatcmpl-{:0>31}f", with_picture),
        (3, "8231168139794583{:0>3}", b"%d".__mod__),
        (3, "8231168139794583{:0>3}", with_picture),
    ],
)
async def test_an_answer_sent_once_more_while_the_next_request_is_in_flight_is_not_its_answer(
    repeated, body, form, log
):
    async def reply(server, writer):
        number = len(server.requests)
        answer = numbered(str(repeated if number == repeated + 1 else number), form)
        if number < repeated - 1:
            answer = chat(str(number))  # has no id
        writer.write(http(200, answer))

    async with talking(reply) as (server, client, _):
        expected = [str(number) for number in range(1, 7) if number != repeated + 1]
        assert await texts_of(client, 5, body) == expected
        assert len(server.requests) == 6
    assert "".join(log).count("has sent one answer, with its id, to two requests") == (repeated > 1)


def by_the_second(number):
    return b'{"id": "chatcmpl-%d", %b' % (1764240000 + number // 3, chat("yes")[1:])


@pytest.mark.parametrize(
    "answer, asked", [(by_the_second, 9), (lambda number: numbered("yes"), 10)]
)
async def test_equal_answers_whose_ids_are_equal_by_chance_or_always_are_answers(
    answer, asked, log
):
    """As the seconds of a small server, or the 999 numbers of Ollama. One id for all is noticed the
    second time.
    """

    async def reply(server, writer):
        writer.write(http(200, answer(len(server.requests))))

    async with talking(reply) as (server, client, _):
        assert await texts_of(client, 9) == ["yes"] * 9
        assert (len(server.requests), server.connections) == (asked, asked - 8)
    assert not log


@pytest.mark.parametrize("short", [0.0, 9.0])
async def test_a_blank_line_behind_an_answer_is_no_answer(short, log, monkeypatch):
    monkeypatch.setattr(plain_transport, "SHORT", short)
    monkeypatch.setattr(plain_transport, "QUIET", 0.1)

    async def reply(server, writer):
        writer.write(http(200, chat()))
        await turns(10)
        writer.write(b"\r\n")

    async with talking(reply) as (server, client, _):
        for _ in range(3):
            assert await client.complete(BODY) == HI
            await turns(10)
        assert len(server.requests) == 3
    assert not log


def test_large_answers_that_arrive_at_one_time_share_a_limit_and_the_oldest_completes(monkeypatch):
    monkeypatch.setattr(body_limits, "LARGE_ANSWER_BYTES", 1000)
    monkeypatch.setattr(body_limits, "media_bytes", lambda: 2 * 50_000)
    oldest, small, other = LargeAnswer(), LargeAnswer(), LargeAnswer()
    assert oldest.append(bytearray(), bytes(40_000)) == ""
    assert small.append(bytearray(), bytes(1000)) == ""
    assert "2 large answers at one time" in other.append(bytearray(), bytes(20_000))
    assert oldest.append(bytearray(40_000), bytes(20_000)) == ""
    del oldest
    assert other.refusal(20_000) == ""
    del other
    assert LargeAnswer._sizes == {}


async def test_a_slot_is_free_while_its_request_sleeps():
    asleep, wake = asyncio.Event(), asyncio.Event()

    async def sleep(seconds):
        asleep.set()
        await wake.wait()

    async with talking(AWAY, GOOD, sleep=sleep, max_concurrent_generations=1) as (_, client, _):
        first = asyncio.create_task(client.complete(BODY))
        await asleep.wait()
        assert (await client.complete(BODY)).text == "hi"
        assert not first.done()
        wake.set()
        assert (await first).text == "hi"


async def test_a_cancelled_request_gives_its_slot_back():
    async with talking(never, GOOD, max_concurrent_generations=1) as (server, client, _):
        stuck = asyncio.create_task(client.complete(BODY))
        await server.arrived.acquire()
        stuck.cancel()
        await asyncio.gather(stuck, return_exceptions=True)
        assert client.in_flight == 0
        assert (await client.complete(BODY)).text == "hi"


async def test_proxies_of_the_environment_are_for_endpoints_only(monkeypatch):
    async with serving(GOOD) as (proxy, proxy_url), serving(GOOD) as (server, url):
        monkeypatch.setenv("http_proxy", proxy_url.replace("//", "//me:of-a-proxy@"))
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        endpoint = config(server_type="endpoint", endpoint_url=url)
        own = url.partition("//")[2]  # with its port
        exempt_ones = ((endpoint, "a.b,127.0.0.1"), (endpoint, own))
        for settings, exempt in ((config(), ""), *exempt_ones, (endpoint, "")):
            monkeypatch.setenv("no_proxy", exempt)
            async with client_of(settings, [url], None) as client:
                await client.complete(BODY)
        assert (len(server.requests), len(proxy.requests)) == (3, 1)
        head = proxy.requests[0][0]
        assert head.startswith(f"POST {url}/v1/chat/completions HTTP".encode())
        assert b"\r\nProxy-Authorization: Basic bWU6b2YtYS1wcm94eQ==\r\n" in head
        assert redact("of-a-proxy bWU6b2YtYS1wcm94eQ==") == "*** ***=="


PROXY = "http://proxy.test:3128"


@golden.rows("proxies")
def test_the_proxy_of_a_url(code, monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)

    def proxy(url, **environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return proxy_of(HiddenUrl(url))

    golden.show("proxies", code, {"proxy": proxy, "PROXY": PROXY})


@pytest.mark.parametrize(
    "status, words",
    [
        (407, "It is reached through the proxy {proxy}: write its user and password into http_proxy"),
        (403, "It is reached through the proxy {proxy}: name server.test in NO_PROXY, or correct http_proxy or all_proxy. Or it refuses this run's key"),
        (404, "Check the model's name"),
    ],
)  # fmt: skip
async def test_a_refusal_through_a_proxy_names_the_proxy_first(status, words, monkeypatch):
    async with serving(answer(http(status, b"denied"))) as (_, proxy_url):
        monkeypatch.setenv("http_proxy", proxy_url)
        url = "http://server.test/v1"
        async with client_of(config(**ENDPOINT), [url], "key", sleep=Sleeps()) as client:
            with pytest.raises(ServerRefused) as refused:
                await client.complete(BODY)
        named = f"{url}/chat/completions (through the proxy {proxy_url}) answered HTTP {status} "
        assert str(refused.value).startswith(named)
        assert words.format(proxy=proxy_url) in str(refused.value)


async def test_a_server_that_failed_and_was_restarted_takes_requests_at_once():
    async with serving(GOOD, GOOD) as (_, url), client_of(config()) as client:
        failed, other = client.servers.router.add(), client.servers.router.add()
        for target in (failed, other):
            client.servers.mark_up(target, HiddenUrl(url), None)
        failed.failures = 3
        failed.cooldown_until = float("inf")
        assert client.servers.router.take(Request()) is other
        client.servers.router.mark_dead(failed, "stopped")
        client.servers.mark_up(failed, HiddenUrl(url), None)
        assert client.servers.router.take(Request()) is failed


async def test_a_whole_answer_is_thrown_away_where_its_server_is_given_up_in_the_same_turn_of_the_event_loop(
    monkeypatch,
):
    async with (
        serving(answer(http(200, chat("wrong")))) as (_, first),
        serving(answer(http(200, chat("right")))) as (_, second),
        client_of(config()) as client,
    ):
        target = client.servers.router.add()
        client.servers.mark_up(target, HiddenUrl(first), None)
        given_up = asyncio.Event()

        async def posted_too_late(*request):
            raw = await post(*request)
            if not given_up.is_set():
                # Its cancellation comes with the next turn.
                client.servers.router.mark_dead(target, "stopped")
                given_up.set()
            return raw

        monkeypatch.setattr("datatrove_ckpt.inference.client.client.post", posted_too_late)
        asking = asyncio.create_task(client.complete(BODY))
        await given_up.wait()
        await client.servers.disconnect(target)
        client.servers.mark_up(target, HiddenUrl(second), None)
        assert (await asking).text == "right"
        assert (client.outage.answers, client.sender.work.resent) == (1, 1)


def test_a_fake_server_that_cannot_start_raises_and_leaves_no_thread():
    class Broken(FakeServer):
        def _route(self, router):
            raise LookupError

    broken = Broken()
    with pytest.raises(LookupError), broken:
        pass
    assert not broken._thread.is_alive()
