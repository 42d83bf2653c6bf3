"""PlainTransport against a real socket: which connections are used again, and how requests end that
get no answer.
"""

import asyncio
import socket
from contextlib import ExitStack, asynccontextmanager, contextmanager

import pytest
from yarl import URL

from datatrove_ckpt.inference.client.plain import ConnectTimeout, PlainTransport
from datatrove_ckpt.inference.client.urls import HiddenUrl
from tests.unit.test_client import answer, http, never, serving, then_close

GOOD = answer(http(200, b"good"))


@asynccontextmanager
async def transport_to(*replies, **settings):
    async with serving(*replies) as (server, base):
        url = URL(base) / "v1/chat/completions"
        arguments = {
            "api_key": None,
            "timeout": 30.0,
            "connect_timeout": 30.0,
            "keepalive": 4.0,
            **settings,
        }
        transport = PlainTransport(HiddenUrl(url), **arguments)
        try:
            yield server, transport
        finally:
            await transport.close()


@pytest.mark.parametrize(
    ("url", "host"), [("http://a.b/x", "a.b"), ("http://[::1]:81/x?y=%20z", "[::1]:81")]
)
async def test_the_host_and_the_path_are_written_as_rfc_9112_says(url, host):
    head = PlainTransport(HiddenUrl(url), None, 1.0, 1.0, 1.0)._head.split(b"\r\n")
    assert (
        head[0] == f"POST /{url.partition('/x')[1][1:]}{url.partition('/x')[2]} HTTP/1.1".encode()
    )
    assert head[1] == f"Host: {host}".encode()


async def test_no_request_is_sent_before_the_answer_to_the_last_one():
    async def later(server, writer):
        await server.closing.wait()
        writer.write(http(200, b"good"))

    async with transport_to(later, keepalive=600.0) as (server, transport):
        waiting = [asyncio.create_task(transport.send(b"%d" % n)) for n in range(20)]
        for _ in waiting:
            await server.arrived.acquire()
        assert server.connections == 20
        server.replies = [GOOD]
        server.closing.set()
        assert {(await task).body for task in waiting} == {b"good"}
        await transport.send(b"once more")
        assert server.connections == 20


@pytest.mark.parametrize(
    "first",
    [
        then_close(http(200, b"good")),
        answer(http(200, b"good", "Connection: close")),
        answer(b"HTTP/1.0 200 OK\r\nContent-Length: 4\r\n\r\ngood"),
    ],
)
async def test_a_connection_that_closes_is_replaced_and_no_request_fails(first):
    async with transport_to(first, GOOD) as (server, transport):
        assert (await transport.send(b"one")).body == b"good"
        while transport._idle and transport._idle[0].usable:  # its end arrives by itself
            await asyncio.sleep(0)
        assert (await transport.send(b"two")).body == b"good"
        assert server.connections == 2
        assert len(server.requests) == 2


async def test_a_connection_that_idled_too_long_is_not_used():
    async with transport_to(GOOD, keepalive=0.0) as (server, transport):
        for _ in range(3):
            await transport.send(b"one")
        assert server.connections == 3


async def test_each_request_has_its_own_deadline_though_one_timer_serves_all():
    async with transport_to(never, timeout=60.0) as (server, transport):
        clock = Clock(transport._loop)
        transport._loop = clock
        waiting = []
        for number in range(5):
            clock.now = number * 10.0
            waiting.append(asyncio.create_task(transport.send(b"one")))
            await server.arrived.acquire()
        for number in range(5):
            clock.go_to_the_only_timer()
            assert clock.now == number * 10.0 + 60.0
            with pytest.raises(TimeoutError):
                await waiting[number]
            assert not any(task.done() for task in waiting[number + 1 :])
        assert not clock.timers


class Clock:
    """A loop whose time passes when the test says so, as far as one can tell by ``time`` and
    ``call_at``.
    """

    def __init__(self, loop):
        self.now = 0.0
        self.timers = []
        self._loop = loop

    def __getattr__(self, name):
        return getattr(self._loop, name)

    def time(self):
        return self.now

    def call_at(self, when, callback):
        self.timers.append((when, callback))
        return self._loop.call_later(600, lambda: None)  # somebody may cancel it

    def go_to_the_only_timer(self):
        ((self.now, callback),) = self.timers
        self.timers.clear()
        callback()


async def test_closing_ends_what_is_under_way():
    async with transport_to(never) as (server, transport):
        asking = asyncio.create_task(transport.send(b"one"))
        await server.arrived.acquire()
        await transport.close()
        with pytest.raises(ConnectionAbortedError):
            await asking
        with pytest.raises(ConnectionAbortedError):
            await transport.send(b"two")


@contextmanager
def silent_address():
    """Where connections are neither accepted nor refused."""
    with ExitStack() as stack:
        full = stack.enter_context(socket.socket())
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        yield full.getsockname()


async def test_a_server_that_accepts_nobody_is_given_up_in_time():
    with silent_address() as (_, port):
        transport = PlainTransport(HiddenUrl(f"http://127.0.0.1:{port}"), None, 30.0, 0.2, 4.0)
        with pytest.raises(ConnectTimeout):
            await transport.send(b"one")
        await transport.close()
