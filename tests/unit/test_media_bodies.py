"""A body with media: sent whole, never in memory as a whole; and the budgets of bytes."""

import asyncio
import base64
import random
import re
from contextlib import suppress

import orjson
import pytest

from datatrove_ckpt.common.memory import ByteBudget, usable_memory
from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.generation.document_limit import DocumentLimit
from datatrove_ckpt.inference.client.body import RequestBody
from datatrove_ckpt.inference.client.http1 import Response, Transport
from datatrove_ckpt.inference.client.urls import HiddenUrl
from datatrove_ckpt.rollouts import media_part
from datatrove_ckpt.rollouts.media import split_media
from tests import golden
from tests.jobs import chat

DATA = b"\x89PNG\r\n\x1a\n" + random.Random(0).randbytes(5_000_000)
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


def body(data=DATA, text="What is it?"):
    """A body, and what must be sent of it."""
    part, again = media_part(data), media_part(data[:8])
    payload = chat([{"type": "text", "text": text}, part, again], n=1)
    plain = orjson.dumps(
        payload, default=lambda value: value.prefix + base64.b64encode(value.data).decode()
    )
    return RequestBody(*split_media(payload, 0)), plain


@pytest.mark.parametrize("size", [8, 9, 10, 49_151, 49_152, 49_153, 98_304, 100_000])
def test_the_pieces_are_the_json_of_the_whole(size):
    made, expected = body(DATA[:size], 'a "NUL" \0 and "\\u0000"')
    assert b"".join(made) == expected == b"".join(made)
    assert len(made) == len(expected)
    assert max(map(len, made)) <= 65_536
    assert orjson.loads(made.text)["n"] == 1


async def with_server(serve, use):
    writers = []

    async def kept(reader, writer):
        writers.append(writer)
        await serve(reader, writer)

    server = await asyncio.start_server(kept, "127.0.0.1", 0, limit=2**16)
    sending = Transport(
        HiddenUrl(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"), None, 20.0
    )
    try:
        await use(sending)
    finally:
        await sending.close()
        for writer in writers:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
        server.close()
        await server.wait_closed()


async def read_request(reader):
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.findall(rb"content-length: *(\d+)", head, re.IGNORECASE)
    assert len(length) == 1
    assert b"chunked" not in head
    return await reader.readexactly(int(length[0]))


def test_a_body_arrives_whole_at_a_server_that_reads_slowly_and_the_connection_serves_on(
    over,
):
    came, connections = [], []
    made, expected = body()

    async def serve(reader, writer):
        connections.append(1)
        for size in (len(expected), 2, len(expected)):
            while size > 2 and not reader._paused:
                await asyncio.sleep(0)
            for _ in range(20):  # now the socket's buffers fill
                await asyncio.sleep(0)
            came.append(await read_request(reader))
            writer.write(ANSWER)
        writer.close()

    async def use(sending):
        for one in (made, b"{}", made):
            assert await sending.send(one) == Response(200, b"{}")

    over(with_server(serve, use))
    assert came == [expected, b"{}", expected]
    assert len(connections) == 1


@pytest.mark.parametrize("status", [b"200", b"413"])
def test_an_answer_before_the_end_of_the_body_closes_the_connection(over, status):
    connections = []

    async def serve(reader, writer):
        connections.append(1)
        await reader.readuntil(b"\r\n\r\n")
        if len(connections) == 1:
            writer.write(ANSWER.replace(b"200", status))
        else:
            await reader.readexactly(2)
            writer.write(ANSWER)
        await writer.drain()

    async def use(sending):
        assert (await sending.send(body(DATA * 4)[0])).status == int(status)
        assert (await sending.send(b"{}")).status == 200

    over(with_server(serve, use))
    assert len(connections) == 2


def test_a_server_that_dies_within_the_body_is_an_error(over):
    async def serve(reader, writer):
        await reader.readexactly(100_000)
        writer.transport.abort()

    async def use(sending):
        with pytest.raises(OSError, match="before the response"):
            await sending.send(body()[0])

    over(with_server(serve, use))


# budgets -----------------------------------------------------------------------------------------


async def test_a_budget_lets_those_go_that_fit_in_order_and_a_large_one_alone():
    budget, went = ByteBudget(10), []

    async def go(name, size):
        await budget.acquire(size)
        went.append(name)

    tasks = [
        asyncio.create_task(go(name, size))
        for name, size in (("a", 6), ("b", 6), ("large", 99), ("c", 1))
    ]
    await asyncio.sleep(0)
    assert went == ["a"]
    budget.release(6)
    await asyncio.sleep(0)
    assert went == ["a", "b"]
    budget.release(5)
    await asyncio.sleep(0)
    assert went == ["a", "b"]
    budget.release(1)
    await asyncio.sleep(0)
    assert went == ["a", "b", "large"]
    budget.release(99)
    await asyncio.gather(*tasks)
    assert went == ["a", "b", "large", "c"]
    assert budget.held == 1


async def test_who_is_cancelled_gives_his_room_to_the_next():
    budget = ByteBudget(10)
    await budget.acquire(10)
    waiting, granted, last = (asyncio.create_task(budget.acquire(size)) for size in (10, 10, 3))
    await asyncio.sleep(0)
    waiting.cancel()
    budget.release(10)
    granted.cancel()  # it has its room, and has not run yet
    await asyncio.gather(waiting, granted, last, return_exceptions=True)
    assert (waiting.cancelled(), granted.cancelled(), last.cancelled()) == (True, True, False)
    assert budget.held == 3


async def test_large_documents_wait_for_bytes_and_small_ones_do_not():
    config = InferenceConfig(
        "endpoint", "m", endpoint_url="http://127.0.0.1:1", max_concurrent_documents=100
    )
    budget = ByteBudget(1_000_000)  # of all ranks of a process
    limit, of_another_rank = (
        DocumentLimit([config], budget),
        DocumentLimit([config], budget),
    )
    for _ in range(10):
        await limit.acquire(50_000)
    for _ in range(2):
        await limit.acquire(450_000)
    third = asyncio.create_task(of_another_rank.acquire(450_000))
    await asyncio.sleep(0)
    assert not third.done()
    limit.release(450_000)
    await third


CGROUPS = golden.named("cgroups", globals())


@pytest.mark.parametrize("name", CGROUPS)
def test_the_memory_of_this_process_is_what_its_cgroups_leave(tmp_path, name):
    groups, files, expected = CGROUPS[name]
    for path, text in {
        "proc/self/cgroup": groups,
        **{f"sys/fs/cgroup/{at}": text for at, text in files.items()},
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert usable_memory(tmp_path) == expected
    assert usable_memory(tmp_path / "nothing") > 1 << 27
