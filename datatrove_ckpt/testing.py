"""For tests: a server that answers and counts, and crashes at every point where there can be one.

Public, so that a user can prove a rollout, an adapter or a writer of their own. Imported by nothing in the package.

A crash is simulated at an *effect* (see ``checkpoint/files.py``): it, and every effect of any thread after it, raises
``SimulatedCrash``. The folder as it was at that moment is kept, and put back before the next life, so that what a
dying life still does on its way out (SQLite tidies up when it is closed) never helps the next one.
"""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson
import xxhash
from aiohttp import web

from datatrove_ckpt.checkpoint import files

EFFECTS = (
    "make_dir",
    "create",
    "write",
    "sync",
    "rename",
    "truncate",
    "remove",
    "remove_dir",
    "remove_tree",
    "commit",
)
"""The names of the effects: methods of ``files.Disk``."""


class SimulatedCrash(BaseException):
    """The process is dead. A BaseException, so that no ``except Exception`` survives it."""


class CrashingDisk(files.Disk):
    """A disk that lets ``crash_at`` effects happen, and crashes at the next one.

    Args:
        crash_at: number of effects that happen.
        folder: what is kept as it was at the crash.
        torn: the crash comes in the middle of the effect, if that is a write.
    """

    def __init__(self, crash_at: int, folder: Path, torn: bool = False) -> None:
        super().__init__()
        self.happened: list[str] = []
        self.crashed_at: str | None = None
        self.snapshot = folder.with_name(folder.name + ".at-crash")
        self._crash_at = crash_at
        self._folder = folder
        self._torn = torn
        self._lock = threading.Lock()

    def _effect(self, name: str, *args: Any) -> Any:
        with self._lock:
            if self.crashed_at is not None:
                raise SimulatedCrash(self.crashed_at)
            label = f"{name} {args[-1].name if isinstance(args[-1], Path) else args[0].name}"
            if len(self.happened) == self._crash_at:
                self._crash(name, args, label)
            result = getattr(files.Disk, name)(self, *args)
            self.happened.append(label)
            return result

    def _crash(self, name: str, args: tuple[Any, ...], label: str) -> None:
        if name == "write" and self._torn:
            super().write(args[0], memoryview(args[1])[: len(args[1]) // 2], args[2])
        self.crashed_at = label
        shutil.rmtree(self.snapshot, ignore_errors=True)
        shutil.copytree(self._folder, self.snapshot)
        raise SimulatedCrash(label)

    def restore(self) -> None:
        """Puts the folder back as it was at the crash."""
        _copy(self.snapshot, self._folder)


def _intercepted(name: str) -> Callable[..., Any]:
    def effect(self: CrashingDisk, *args: Any) -> Any:
        return self._effect(name, *args)

    return effect


for _name in EFFECTS:
    setattr(CrashingDisk, _name, _intercepted(_name))


def _copy(source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)


@contextmanager
def crash_at(number: int, folder: Path, torn: bool = False) -> Iterator[CrashingDisk]:
    """Lets ``number`` effects happen, and crashes at the next; swallows the crash, and leaves ``folder`` as it was.

    ``crashed_at`` of what it gives is None if the code ended before there were that many effects.
    """
    disk = CrashingDisk(number, folder, torn)
    before, files.disk = files.disk, disk
    try:
        yield disk
    except SimulatedCrash:
        pass
    finally:
        files.disk = before
        disk.close()
    if disk.crashed_at is not None:
        disk.restore()


def outputs(folder: Path) -> dict[str, bytes]:
    """Every file below the folder, by its relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@dataclass
class CrashReport:
    """What was tried.

    ``points`` are the effects the first life crashed at, ``lives`` the runs it took. ``states`` are the different
    folders that crashes left behind; a folder that was seen before has the same future, and is not tried again.
    """

    points: list[str] = field(default_factory=list)
    lives: int = 0
    states: set[str] = field(default_factory=set)

    def is_new(self, folder: Path) -> bool:
        state = _state(folder)
        if state in self.states:
            return False
        self.states.add(state)
        return True


def assert_same_output_after_crash(
    run: Callable[[Path], None],
    folder: Path,
    *,
    output: str = "output",
    recoveries: bool = True,
    torn: bool = False,
    after_crash: Callable[[Path], None] = lambda folder: None,
) -> CrashReport:
    """Runs a job undisturbed, then crashes it at every effect, and each recovery at every effect, and runs it again.

    Args:
        run: one life of the job, which keeps everything below the folder it is given.
        folder: an empty folder for it; what it holds before the first life (the input) is there in every life.
        output: the folder below it whose files must be the same, byte for byte, in the end.
        recoveries: crash the recoveries, too.
        torn: a crash at a write leaves half of it.
        after_crash: called with the folder after each crash, for further assertions.

    Raises:
        AssertionError: naming the crash points.
    """
    report = CrashReport()
    fresh = folder.with_name(folder.name + ".fresh")
    crashed = folder.with_name(folder.name + ".crashed")
    _copy(folder, fresh)
    run(folder)
    report.lives += 1
    expected = outputs(folder / output)

    def survives(start: Path, crashes: list[str], depth: int) -> None:
        """Crashes at every effect of the life that begins with ``start``."""
        number = 0
        while True:
            _copy(start, folder)
            point = _life(run, folder, number, torn, report)
            if point is None:
                _assert_equal(folder / output, expected, crashes)
                return
            after_crash(folder)
            report.points += [point] if not crashes else []
            if report.is_new(folder) or not crashes:
                goes_on([*crashes, point], depth - 1)
            number += 1

    def goes_on(crashes: list[str], depth: int) -> None:
        if depth:
            here = crashed.with_name(f"{crashed.name}.{depth}")
            _copy(folder, here)
            survives(here, crashes, depth)
        else:
            run(folder)
            report.lives += 1
            _assert_equal(folder / output, expected, crashes)

    survives(fresh, [], 2 if recoveries else 1)
    return report


def _state(folder: Path) -> str:
    """Tells folders apart by what the next life can see. SQLite's files hold random numbers, so its rows count."""
    digest = xxhash.xxh3_128()
    for name, content in outputs(folder).items():
        if name.endswith("/lock") or ".sqlite3-" in name:
            continue
        digest.update(name.encode())
        digest.update(_rows(folder / name) if name.endswith(".sqlite3") else content)
    return str(digest.hexdigest())


def _rows(database: Path) -> bytes:
    with tempfile.TemporaryDirectory() as copy:
        for path in database.parent.glob(database.name + "*"):
            shutil.copy(path, copy)
        connection = sqlite3.connect(Path(copy) / database.name)
        dump = "".join(sorted(connection.iterdump()))
        connection.close()
    return dump.encode()


def _life(run: Callable[[Path], None], folder: Path, number: int, torn: bool, report: CrashReport) -> str | None:
    report.lives += 1
    with crash_at(number, folder, torn) as disk:
        run(folder)
    return disk.crashed_at


def _assert_equal(folder: Path, expected: dict[str, bytes], crashes: list[str]) -> None:
    actual = outputs(folder)
    assert actual.keys() == expected.keys(), f"after {crashes}: files {sorted(actual)}, not {sorted(expected)}"
    for name, content in expected.items():
        assert actual[name] == content, f"after {crashes}: {name} differs:\n{actual[name]!r}\n{content!r}"


class FakeServer:
    """An OpenAI-compatible server in a thread of its own, which counts what it is asked.

    Args:
        answer: gives the text for a payload and the number of times this payload was asked before. By default the
            same payload always gets the same text.
        status: gives an HTTP status other than 200, or None, likewise.
        delay: gives seconds to wait before answering, likewise.
    """

    def __init__(
        self,
        answer: Callable[[dict[str, Any], int], str] | None = None,
        status: Callable[[dict[str, Any], int], int | None] = lambda payload, times: None,
        delay: Callable[[dict[str, Any], int], float] = lambda payload, times: 0.0,
    ) -> None:
        self.asked: Counter[str] = Counter()
        """How often each payload was asked, by its last message or prompt."""
        self.payloads: list[dict[str, Any]] = []
        self._answer = answer or (lambda payload, times: f"answer {xxhash.xxh3_64_hexdigest(orjson.dumps(payload))}")
        self._status = status
        self._delay = delay
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="fake server", daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        runner = self._loop.run_until_complete(self._start())
        self._started.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    async def _start(self) -> web.AppRunner:
        app = web.Application(client_max_size=2**30)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_post("/v1/completions", self._complete)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, reuse_address=True)
        await site.start()
        self._port = runner.addresses[0][1]
        return runner

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "fake", "object": "model"}]})

    async def _complete(self, request: web.Request) -> web.Response:
        payload = orjson.loads(await request.read())
        question = payload["messages"][-1]["content"] if "messages" in payload else payload["prompt"]
        times = self.asked[question]
        self.asked[question] += 1
        self.payloads.append(payload)
        await asyncio.sleep(self._delay(payload, times))
        status = self._status(payload, times)
        if status is not None:
            return web.json_response({"error": {"message": f"refused with {status}"}}, status=status)
        text = self._answer(payload, times)
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
        choice |= {"message": {"role": "assistant", "content": text}} if "messages" in payload else {"text": text}
        usage = {"prompt_tokens": len(question.split()), "completion_tokens": len(text.split())}
        body = orjson.dumps({"id": "fake", "choices": [choice], "usage": usage})
        return web.Response(body=body, content_type="application/json")
