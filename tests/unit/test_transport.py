"""Transport against a real socket: which connections are used again, and how requests end that
get no answer.
"""

import asyncio
import base64
import socket
import ssl
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from yarl import URL

from datatrove_ckpt.common.redaction import Secret
from datatrove_ckpt.inference.client import http1
from datatrove_ckpt.inference.client.body import RequestBody
from datatrove_ckpt.inference.client.http1 import ConnectTimeout, Transport
from datatrove_ckpt.inference.client.urls import HiddenUrl, headers_for
from tests.raw_server import answer, http, never, serving, then_close

GOOD = answer(http(200, b"good"))


@pytest.fixture(autouse=True)
def _no_exemptions(monkeypatch):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)


@asynccontextmanager
async def transport_to(*replies, **settings):
    async with serving(*replies) as (server, base):
        url = URL(base) / "v1/chat/completions"
        transport = Transport(HiddenUrl(url), None, **{"timeout": 30.0, **settings})
        try:
            yield server, transport
        finally:
            await transport.close()


@pytest.mark.parametrize(
    "url, host", [("http://a.b/x", "a.b"), ("http://[::1]:81/x?y=%20z", "[::1]:81")]
)
async def test_the_host_and_the_path_are_written_as_rfc_9112_says(url, host):
    head = Transport(HiddenUrl(url), None, 1.0)._head.split(b"\r\n")
    assert (
        head[0] == f"POST /{url.partition('/x')[1][1:]}{url.partition('/x')[2]} HTTP/1.1".encode()
    )
    assert head[1] == f"Host: {host}".encode()
    assert b"Accept-Encoding: identity" in head


def test_a_key_of_anthropic_is_sent_as_its_own_paths_want_it():
    key = Secret("k")
    kept = Secret("sk-ant-k")
    messages, others = HiddenUrl("http://a/v1/messages"), HiddenUrl("http://a/v1/models")
    assert headers_for(messages, kept)["x-api-key"] == "sk-ant-k"
    for url, other in ((messages, key), (others, kept)):
        assert headers_for(url, other) == {"Authorization": f"Bearer {other.reveal()}"}


async def test_no_request_is_sent_before_the_answer_to_the_last_one(monkeypatch):
    async def later(server, writer):
        await server.closing.wait()
        writer.write(http(200, b"good"))

    monkeypatch.setattr(http1, "_KEEPALIVE_SECONDS", 600.0)
    async with transport_to(later) as (server, transport):
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


async def test_a_connection_that_idled_too_long_is_not_used(monkeypatch):
    monkeypatch.setattr(http1, "_KEEPALIVE_SECONDS", 0.0)
    async with transport_to(GOOD) as (server, transport):
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


@pytest.fixture
def self_signed(monkeypatch):
    """TLS of a server with a certificate that this process trusts."""
    path = str(Path(__file__).parent.parent / "data" / "tls" / "self_signed.pem")
    monkeypatch.setenv("SSL_CERT_FILE", path)
    http1._tls.cache_clear()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(path)
    yield context
    http1._tls.cache_clear()


class Proxy:
    """Sends what it gets to where it is asked to, and keeps the heads. ``status``: of its answer to
    CONNECT.
    """

    def __init__(self, status=200):
        self.status = status
        self.heads = []
        self.pipes = set()

    async def handle(self, reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        self.heads.append(head)
        url = URL(f"https://{head.split()[1].decode()}")
        there, onward = await asyncio.open_connection("127.0.0.1", url.port)
        writer.write(b"HTTP/1.1 %d X\r\n\r\n" % self.status)
        for source, goal in ((reader, onward), (there, writer)):
            self.pipes.add(asyncio.create_task(self.pipe(source, goal)))

    async def pipe(self, source, goal):
        while data := await source.read(1 << 16):
            goal.write(data)
        goal.close()


@asynccontextmanager
async def through(monkeypatch, status=200, tls=None):
    proxy = Proxy(status)
    listener = await asyncio.start_server(proxy.handle, "127.0.0.1", 0, ssl=tls)
    address = f"me:pw@127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    monkeypatch.setenv("https_proxy", f"https://{address}" if tls else address)
    yield proxy
    listener.close()
    await asyncio.gather(*proxy.pipes)


@pytest.mark.parametrize("proxied", ["", "http", "https"])
def test_one_connection_over_tls_carries_all_requests(over, proxied, self_signed, monkeypatch):
    bodies = [b"x", b"x" * 300_000, RequestBody([b'"', b'"'], [b"x" * 3_000_000])]

    async def main():
        async with (
            serving(GOOD, tls=self_signed) as (server, url),
            through(monkeypatch, tls=self_signed if proxied == "https" else None) as proxy,
        ):
            secret = HiddenUrl(url.replace("//", "//user:a%20b@"))
            transport = Transport(secret, None, 30.0, bool(proxied))
            for body in bodies:
                assert (await transport.send(body)).body == b"good"
            await transport.close()
        assert server.connections == 1
        assert [sent for _, sent in server.requests] == [b"".join(_pieces(each)) for each in bodies]
        basic = base64.b64encode(b"user:a b")
        assert all(b"\r\nAuthorization: Basic " + basic in head for head, _ in server.requests)
        assert [head.split(b"\r\n")[0] for head in proxy.heads] == [
            b"CONNECT %b HTTP/1.1" % url.partition("//")[2].encode()
        ] * bool(proxied)
        assert all(b"Proxy-Authorization: Basic bWU6cHc=" in head for head in proxy.heads)

    over(main())


def _pieces(body):
    return [body] if isinstance(body, bytes) else body


class HangsUp(asyncio.Protocol):
    """A proxy and a server that closes ``at`` the tunnel, or in the bytes that end TLS's
    handshake.
    """

    def __init__(self, at, context):
        self.at = at
        self.received, self.sent = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.received, self.sent, server_side=True)

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        if data.startswith(b"CONNECT"):
            self.transport.write(b"HTTP/1.1 200 OK\r\n\r\n")
            if self.at == "tunnel":
                self.transport.close()
            return
        self.received.write(data)
        with suppress(ssl.SSLWantReadError):
            self.tls.do_handshake()
            with suppress(ssl.SSLError):
                self.tls.unwrap()
            self.transport.write(self.sent.read())
            self.transport.close()
        self.transport.write(self.sent.read())


@pytest.mark.parametrize("proxied", [False, True])
@pytest.mark.parametrize("at", ["tunnel", "handshake"])
def test_a_connection_that_is_lost_in_its_handshake_is_one_error(
    over, at, proxied, self_signed, monkeypatch, caplog
):
    self_signed.maximum_version = ssl.TLSVersion.TLSv1_2  # the server's bytes come last

    async def main():
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: HangsUp(at, self_signed), "127.0.0.1", 0)
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        monkeypatch.setenv("https_proxy", f"http://{address}")
        transport = Transport(HiddenUrl(f"https://{address}"), None, 30.0, proxied)
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(transport.send(b"one"), 20)
        await transport.close()
        server.close()
        await asyncio.sleep(0.01)

    over(main())
    assert not caplog.records


@pytest.mark.parametrize("proxied", [False, True])
def test_a_server_or_a_proxy_that_says_nothing_is_given_up_in_time(over, proxied, monkeypatch):
    async def main():
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("https_proxy", f"http://{address}")
        monkeypatch.setattr(http1, "_CONNECT_SECONDS", 0.05)
        url = HiddenUrl("https://a.invalid" if proxied else f"https://{address}")
        transport = Transport(url, None, 30.0, proxied)
        with pytest.raises(ConnectTimeout):
            await transport.send(b"one")
        await transport.close()

    with socket.create_server(("127.0.0.1", 0)) as silent:
        over(main())


@pytest.mark.parametrize("proxied", [False, True])
def test_a_certificate_that_is_not_trusted_and_a_proxy_that_refuses_are_named(
    over, proxied, self_signed, monkeypatch
):
    async def main():
        async with serving(GOOD, tls=self_signed) as (server, url):
            if proxied:
                async with through(monkeypatch, 407):
                    assert (await Transport(HiddenUrl(url), None, 30.0, True).send()).status == 407
                async with through(monkeypatch):
                    other = HiddenUrl(url.replace("127.0.0.1", "other.example"))
                    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
                        await Transport(other, None, 30.0, True).send()
            monkeypatch.delenv("SSL_CERT_FILE")
            http1._tls.cache_clear()
            async with through(monkeypatch):
                transport = Transport(HiddenUrl(url), None, 30.0, proxied)
                with pytest.raises(ssl.SSLCertVerificationError) as refused:
                    await transport.send()
            assert "self-signed" in transport.explain(refused.value)
            assert "me:pw" not in transport.explain(refused.value)
        assert not server.requests

    over(main())
