"""What pictures in flight cost in memory: ``python -m tests.bench.media [--documents 1000] [WAY ...]``.

Each way is one rank in a process of its own, with ``max_concurrent_generations: 1000`` and a server that answers when
nothing has come for some seconds, so that as many are in flight as may be. The pictures are noise: a few files, made
once; each document reads its own copy.

    own     a rollout that builds base64 itself, and no budget of bytes: as it was before. With --own documents.
    bytes   PromptRollout(images="media"), and the reader gives the bytes
    paths   PromptRollout(images="media"), and the reader gives paths
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

from datatrove.data import Document, Media
from datatrove.pipeline.writers import JsonlWriter

from datatrove_ckpt import InferenceConfig, InferenceRunner
from datatrove_ckpt.generation import scheduler
from datatrove_ckpt.process.memory import media_bytes
from datatrove_ckpt.rollouts import PromptRollout
from tests.bench.measure import ROOT, table
from tests.bench.systems import highest_memory

WAYS = ("own", "bytes", "paths")
_FILES = 8
_ANSWER = b'{"choices": [{"finish_reason": "stop", "message": {"content": "A page."}}], "usage": {}}'


class SlowServer(asyncio.Protocol):
    """Reads bodies without keeping them, and answers all at once when nothing has come for some seconds.

    ``most``: requests at once that were read whole.
    """

    held: ClassVar[list[SlowServer]] = []
    last, most = 0.0, 0

    def connection_made(self, transport: Any) -> None:
        self._transport, self._head, self._left = transport, b"", 0

    def data_received(self, data: bytes) -> None:
        SlowServer.last = time.monotonic()
        if not self._left:
            self._head += data
            head, found, data = self._head.partition(b"\r\n\r\n")
            if not found:
                return
            self._head = b""
            length = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
            if not length or not int(length[1]):  # a GET, by which the client looks whether there is a server
                self._write()
                return
            self._left = int(length[1])
        self._left -= len(data)
        if not self._left:
            self.held.append(self)
            SlowServer.most = max(SlowServer.most, len(self.held))

    @classmethod
    async def answer(cls, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds / 4)
            if time.monotonic() - cls.last > seconds:
                for one in cls.held:
                    one._write()
                cls.held.clear()

    def _write(self) -> None:
        self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(_ANSWER), _ANSWER))


def serve(seconds: float) -> None:
    """Prints the port, and the most requests at once when stdin closes."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(SlowServer, "127.0.0.1", 0, backlog=2048)
        print(server.sockets[0].getsockname()[1], flush=True)
        answering = asyncio.create_task(SlowServer.answer(seconds))
        await asyncio.to_thread(sys.stdin.read)
        answering.cancel()
        print(SlowServer.most, flush=True)

    asyncio.run(run())


@contextlib.contextmanager
def slow_server(seconds: float) -> Iterator[tuple[str, list[int]]]:
    command = [sys.executable, "-m", "tests.bench.media", "--serve", str(seconds)]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert server.stdout is not None
    most: list[int] = []
    yield f"http://127.0.0.1:{server.stdout.readline().strip()}", most
    most.append(int(server.communicate()[0]))


async def own_base64(document: Document, generate: Any) -> Any:
    """What users write without ``images``."""
    url = f"data:image/png;base64,{base64.b64encode(document.media[0].media_bytes).decode()}"
    document.media = []
    part = {"type": "image_url", "image_url": {"url": url}}
    return await generate({"messages": [{"role": "user", "content": [{"type": "text", "text": "Read."}, part]}]})


def make_pictures(folder: Path, size: int) -> None:
    folder.mkdir(exist_ok=True)
    for number in range(_FILES):
        path = folder / f"{number}.png"
        if not path.exists() or path.stat().st_size != size:
            path.write_bytes(b"\x89PNG\r\n\x1a\n" + random.Random(number).randbytes(size - 8))


def documents(way: str, number: int, folder: Path) -> Iterator[Document]:
    for index in range(number):
        path = folder / f"{index % _FILES}.png"
        data = None if way == "paths" else path.read_bytes()
        yield Document("Read.", str(index), [Media("", 0, "", path=path.name, media_bytes=data)])


def run_one(way: str, number: int, folder: Path, url: str, at_once: int) -> dict[str, float]:
    """One rank in this process. Peak memory in bytes, seconds, CPU seconds."""
    before = _resident()
    config = InferenceConfig("endpoint", "mock", endpoint_url=url, max_concurrent_generations=at_once)
    rollout: Any = own_base64 if way == "own" else PromptRollout(images="media", media_folder=str(folder))
    unlimited = mock.patch.object(scheduler, "media_bytes", return_value=sys.maxsize)
    started, cpu = time.monotonic(), time.process_time()
    with tempfile.TemporaryDirectory() as kept, unlimited if way == "own" else contextlib.nullcontext():
        writer = JsonlWriter(f"{kept}/output", "${rank}_chunk_${chunk_index}.jsonl", compression=None)
        step = InferenceRunner(
            rollout, config, writer, checkpoints_local_dir=f"{kept}/checkpoints", on_document_error="dead_letter"
        )
        step.run(documents(way, number, folder))
        written = sum(path.read_text().count("A page.") for path in Path(kept, "output").iterdir())
    assert written == number, written
    return {
        "peak": highest_memory() * 1024 * 1024,
        "before": before,
        "seconds": time.monotonic() - started,
        "cpu": time.process_time() - cpu,
    }


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measured(way: str, number: int, megabytes: float, seconds: float, at_once: int, folder: Path) -> dict[str, float]:
    """In a process of its own. Also "at_once", the most requests that the server had."""
    make_pictures(folder, int(megabytes * 1e6))
    with slow_server(seconds) as (url, most):
        command = [sys.executable, "-m", "tests.bench.media", "--one", way, str(number), str(folder), url, str(at_once)]
        ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return found | {"at_once": most[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ways", nargs="*", default=WAYS, metavar="WAY")
    parser.add_argument("--documents", type=int, default=1000)
    parser.add_argument("--own", type=int, default=100, help="documents of `own`, which may need all memory")
    parser.add_argument("--megabytes", type=float, default=10)
    parser.add_argument("--seconds", type=float, default=3, help="the server answers when nothing came for so long")
    parser.add_argument("--pictures", type=Path, default=Path(tempfile.gettempdir(), "datatrove-ckpt-pictures"))
    parser.add_argument("--serve", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--one", nargs=5, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve is not None:
        serve(given.serve)
        return
    if given.one:
        way, number, folder, url, at_once = given.one
        print(json.dumps(run_one(way, int(number), Path(folder), url, int(at_once))))
        return
    found = []
    for way in given.ways:
        number = given.own if way == "own" else given.documents
        one = measured(way, number, given.megabytes, given.seconds, 1000, given.pictures)
        more = one["peak"] - one["before"]
        figures = [f"{one['peak'] / 1e6:,.0f}", f"{more / one['at_once'] / given.megabytes / 1e6:.2f}"]
        found.append([way, number, f"{one['at_once']:.0f}", *figures, f"{one['seconds']:.0f}", f"{one['cpu']:.0f}"])
    print(f"Pictures of {given.megabytes:g} MB; this process may hold {media_bytes() / 1e6:,.0f} MB of media.")
    head = ["way", "documents", "at once", "peak MB", "times a picture, each at once", "seconds", "CPU seconds"]
    table(head, found)


if __name__ == "__main__":
    main()
