"""A server that plays bytes."""

import asyncio
import json
import socket
import struct
from contextlib import asynccontextmanager

BODY = b'{"model": "m", "messages": []}'


def chat(content="hi", finish_reason="stop", **message):
    choice = {"message": {"content": content, **message}, "finish_reason": finish_reason}
    return json.dumps({"choices": [choice], "usage": {"total_tokens": 3}}).encode()


def http(status, body, *headers):
    lines = [
        f"HTTP/1.1 {status} X",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def answer(raw):
    async def reply(server, writer):
        writer.write(raw)

    return reply


def then_close(raw=b""):
    async def reply(server, writer):
        writer.write(raw)
        writer.close()

    return reply


async def reset(server, writer):
    linger = struct.pack("ii", 1, 0)  # close() then sends RST instead of FIN
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.close()


async def never(server, writer):
    await server.closing.wait()


class RawServer:
    """Plays one reply per request, and the last one for all further requests."""

    def __init__(self, *replies):
        self.replies = list(replies)
        self.requests = []
        self.connections = 0
        self.closing = asyncio.Event()
        self.arrived = asyncio.Semaphore(0)
        self.handlers = set()

    async def handle(self, reader, writer):
        self.connections += 1
        task = asyncio.current_task()
        self.handlers.add(task)
        try:
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
                self.requests.append((head, await reader.readexactly(size)))
                self.arrived.release()
                reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
                await reply(self, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            self.handlers.discard(task)


@asynccontextmanager
async def serving(*replies, tls=None):
    raw = RawServer(*replies)
    listener = await asyncio.start_server(raw.handle, "127.0.0.1", 0, backlog=1000, ssl=tls)
    try:
        yield raw, f"http{'s' if tls else ''}://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    finally:
        raw.closing.set()
        listener.close()
        await listener.wait_closed()
        await asyncio.gather(*raw.handlers)
