"""Secrets of an endpoint: an API key, a query, a user with password. No failure shows them, and no
file keeps them.

loguru prints the value of each name on each line of a traceback, and datatrove logs each failed
task in this way, unless our patcher of the log is there.
"""

import asyncio
import base64
import contextlib
import os
import socket
import traceback
from types import SimpleNamespace
from urllib.parse import quote

import pytest
from loguru import logger

from datatrove_ckpt.common.object_store import ObjectStore
from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.process.task_errors import safe_log
from tests.clients import client_of, lent_client
from tests.hub import pointed_at
from tests.raw_server import BODY, answer, chat, http, never, reset, serving, then_close

KEY, CODE, PASSWORD = "sk-canary-key-1234", "canary/code 5678", "canary:pass-9012"
SHOWN = "canary"


def texts_of(error):
    """What Python, and a log that shows each cause, print of an error."""
    yield "".join(traceback.format_exception(error))
    while error is not None:
        yield f"{error!r} {error}"
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


@pytest.fixture
def said():
    safe_log()
    lines = []
    handler = logger.add(
        lambda line: lines.append(str(line)), diagnose=True, backtrace=True, level=0
    )
    yield lines
    logger.remove(handler)


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    monkeypatch.setattr("datatrove_ckpt.inference.servers.host._ENDPOINT_TIMEOUT", 0.3)  # seconds
    monkeypatch.setenv("KEY_OF_TEST", KEY)
    monkeypatch.setenv("CODE", quote(CODE, safe=""))
    for name in ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)


def refusing_port():
    """Nothing listens there, and no other process gets the port while this process lives."""
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    port = bound.getsockname()[1]
    bound.detach()
    return port


def echo(status):
    """A server that answers with everything that it was sent."""

    async def reply(server, writer):
        head = server.requests[-1][0].decode()
        bearer, basic = (
            head.partition("Bearer ")[2].split("\r\n")[0],
            head.partition("Basic ")[2].split("\r\n")[0],
        )
        given = bearer or base64.b64decode(basic).decode().partition(":")[2]
        body = f"Incorrect API key provided: {given}. You sent {head} {CODE}".encode()
        writer.write(http(status, body))

    return reply


async def broken(server, writer):
    writer.write(f"nonsense {CODE} {server.requests[-1][0].decode()[:30]}\r\n\r\n".encode())


LAYERS = {
    "no such host": ("SCHEME://no-such-host.invalid", None),
    "refused": ("SCHEME://127.0.0.1:FREE", None),
    "no tls": ("https://127.0.0.1:PORT", never),
    "reset": ("SCHEME://127.0.0.1:PORT", reset),
    "half an answer": ("SCHEME://127.0.0.1:PORT", then_close(http(200, chat())[:-10])),
    "not http": ("SCHEME://127.0.0.1:PORT", broken),
    "not json": ("SCHEME://127.0.0.1:PORT", echo(200)),
    "silent": ("SCHEME://127.0.0.1:PORT", never),
    "400": ("SCHEME://127.0.0.1:PORT", echo(400)),
    "401": ("SCHEME://127.0.0.1:PORT", echo(401)),
    "redirect": (
        "SCHEME://127.0.0.1:PORT",
        answer(http(302, b"", f"Location: http://x/?code={KEY}")),
    ),
}


@contextlib.asynccontextmanager
async def endpoint(layer, user, seconds=60.0):
    """The config of an endpoint that fails in this layer."""
    url, reply = LAYERS[layer]
    async with serving(reply or never) as (_, base):
        url = url.replace("PORT", base.rpartition(":")[2]).replace("FREE", str(refusing_port()))
        url = url.replace("SCHEME", "http") + "/?code=${CODE}"
        if user:
            os.environ["AUTHORITY"] = (
                f"me:{quote(PASSWORD, safe='')}@{url.partition('//')[2].partition('/')[0]}"
            )
            url = f"{url.partition('//')[0]}//${{AUTHORITY}}/?code=${{CODE}}"
        try:
            yield InferenceConfig(
                "endpoint",
                "m",
                endpoint_url=url,
                api_key_env=None if user else "KEY_OF_TEST",
                request_max_attempts=1,
                request_timeout=seconds,
                server_patience_seconds=0.3,
                server_ready_max_attempts=1,
                server_ready_delay_sec=0.3,
            )
        finally:
            os.environ.pop("AUTHORITY", None)


async def start(config):
    async with lent_client(config):
        pass


async def complete(config):
    from datatrove_ckpt.inference.servers.host import endpoints_of

    endpoints = endpoints_of(config)
    urls = [one.url for one in endpoints]
    async with client_of(config, urls, endpoints[0].api_key) as client:
        await client.complete(BODY)


@pytest.fixture
def once_asked(monkeypatch):
    """Functions that are called when the silent endpoint has a request."""
    url, _ = LAYERS["silent"]
    functions = []

    async def silent(server, writer):
        for function in functions:
            asyncio.get_running_loop().call_soon(function)
        await never(server, writer)

    monkeypatch.setitem(LAYERS, "silent", (url, silent))
    return functions


def check(error, said):
    try:
        raise error
    except BaseException:
        logger.exception("the task failed")
    found = [
        line for text in (*said, *texts_of(error)) for line in text.splitlines() if SHOWN in line
    ]
    secrets = [line for line in found if any(secret in line for secret in forms())]
    assert not secrets, "\n".join(secrets[:10])


def forms():
    """The secrets as they are, and as they look in a URL, in a header and in a repr."""
    basic = base64.b64encode(f"me:{PASSWORD}".encode()).decode()
    plain = {KEY, CODE, PASSWORD}
    return (
        plain | {quote(text, safe="") for text in plain} | {quote(text) for text in plain} | {basic}
    )


@pytest.mark.usefixtures("real_ready_window")
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(
    "act, user",
    [
        (complete, False),
        (start, True),
        pytest.param(complete, True, marks=pytest.mark.slow),
        pytest.param(start, False, marks=pytest.mark.slow),
    ],
)
async def test_no_failure_shows_a_secret(act, layer, user, said):
    try:
        async with endpoint(layer, user, 0.3) as config:
            await act(config)
    except Exception as error:
        check(error, said)
    else:
        assert act is start  # a broken answer may still prove that there is a server


def interrupt(limit):
    raise KeyboardInterrupt


@pytest.mark.matrix(
    "end, kind",
    [(interrupt, KeyboardInterrupt), (lambda limit: limit.reschedule(0.0), TimeoutError)],
)
@pytest.mark.parametrize("user", [False, True])
def test_a_request_that_is_given_up_shows_no_secret(end, kind, user, said, once_asked):
    async def play():
        async with endpoint("silent", user) as config, asyncio.timeout(None) as limit:
            once_asked.append(lambda: end(limit))
            await complete(config)

    with pytest.raises(kind) as caught:
        asyncio.run(play())
    check(caught.value, said)


async def test_a_proxy_with_a_password_is_not_shown(said, monkeypatch):
    monkeypatch.setenv(
        "http_proxy", f"http://me:{quote(PASSWORD, safe='')}@127.0.0.1:{refusing_port()}"
    )
    with pytest.raises(Exception, match="through the proxy") as caught:
        async with endpoint("silent", False) as config:
            await complete(config)
    check(caught.value, said)


NO_AUTHORITY = {
    "slash": f"me:{PASSWORD}/x@host",
    "port": f"me:{PASSWORD}@host:port",
    "bracket": f"[{PASSWORD}",
}


# By their names: loguru also shows the frames of pytest, which hold the parameters.
@pytest.mark.parametrize("kind", NO_AUTHORITY)
def test_a_url_that_is_none_is_named_by_its_variable(kind, said, monkeypatch):
    monkeypatch.setenv("AUTHORITY", NO_AUTHORITY[kind])
    with pytest.raises(ConfigError, match=r"http://\$\{AUTHORITY\} is not a URL") as caught:
        asyncio.run(start(InferenceConfig("endpoint", "m", endpoint_url="http://${AUTHORITY}")))
    check(caught.value, said)


@pytest.mark.parametrize("end", ["\n", "\r\nX: y", "\x7f", " "])
def test_a_key_that_is_no_header_is_refused(end, said, monkeypatch):
    monkeypatch.setenv("KEY_OF_TEST", KEY + end)
    config = InferenceConfig("endpoint", "m", endpoint_url="http://h", api_key_env="KEY_OF_TEST")
    with pytest.raises(
        ConfigError,
        match="the value of KEY_OF_TEST begins or ends with a space, or holds a control character",
    ) as caught:
        asyncio.run(start(config))
    check(caught.value, said)


def test_a_failure_of_the_hub_does_not_show_its_token(tmp_path, log):
    away = SimpleNamespace(url=f"http://127.0.0.1:{refusing_port()}", token=KEY)
    with pointed_at(away, tmp_path):
        try:
            ObjectStore("hf://datasets/a/b/x").names()
        except OSError:
            logger.exception("the upload failed")
    said = "".join(log)
    assert "FileSystemFailed: ConnectError: [Errno 111] Connection refused" in said
    assert KEY not in said
