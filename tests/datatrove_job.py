"""A job of datatrove's own InferenceRunner, to be killed: a program that runs it, and what tests need to go on with it.

One process imports datatrove and forks for each run, because the import takes longer than the runs.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from datatrove.data import Document
from datatrove.pipeline.writers import JsonlWriter, ParquetWriter
from datatrove.pipeline.writers.disk_base import DiskWriter

from datatrove_ckpt.readers import JsonlReader
from datatrove_ckpt.testing import FakeServer
from datatrove_ckpt.testing.server import Payload

SIZE = 4
"""``records_per_chunk``."""
TEMPLATE = "${rank}_chunk_${chunk_index}.jsonl"


async def rollout(document: Document, generate: Any) -> Any:
    """One request, a second one for some documents, and no result for others."""
    result = await generate(payload(f"first {document.text}"))
    if "twice" in document.text:
        result = await generate(payload(f"second {document.text} {result.text}"))
    return None if "dropped" in document.text else result


def payload(text: str) -> Payload:
    return {"messages": [{"role": "user", "content": text}], "temperature": 0.5}


def text_of(number: int) -> str:
    """The text of the document with this number."""
    kind = {3: " twice", 5: " dropped"}.get(number % 7, "")
    return f"text {number}{kind}"


def write_input(folder: Path, *numbers: int) -> None:
    """Writes a file for each of the numbers, of so many documents."""
    (folder / "input").mkdir(exist_ok=True)
    rows = [json.dumps({"id": f"id {n}", "text": text_of(n), "group": n % 3}) for n in range(sum(numbers))]
    for index, number in enumerate(numbers):
        (folder / "input" / f"{index}.jsonl").write_text("\n".join(rows[:number]))
        rows = rows[number:]


def make_writer(folder: Path, template: str = TEMPLATE, compression: str | None = None) -> DiskWriter:
    if template.endswith(".parquet"):
        return ParquetWriter(str(folder / "output"), template)
    return JsonlWriter(str(folder / "output"), template, compression=compression)


@dataclass
class Datatrove:
    """A process that runs jobs of datatrove's own runner, each in a fork, until it has ended or is killed."""

    _process: subprocess.Popen[str] = field(init=False)

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "tests.datatrove_job", str(os.getpid())]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self

    @property
    def pid(self) -> int:
        """Of the process itself; that of a run is what ``start`` returns."""
        return self._process.pid

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._process as process:
            assert process.stdin is not None
            process.stdin.close()

    def start(self, folder: Path, url: str, **settings: Any) -> int:
        """Starts a run, and returns its process id. See ``_job``."""
        return int(self._ask({"folder": str(folder), "url": url, **settings}))

    def end(self) -> int:
        """Waits for the run. Returns its exit code; negative: the signal that killed it."""
        return int(self._ask({}))

    def _ask(self, order: dict[str, Any]) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        if not (answer := self._process.stdout.readline()):
            raise RuntimeError(f"datatrove's process has ended with {self._process.wait()}; its last lines say why")
        return answer


class Killer:
    """Kills a run a random moment after the server has been asked so often.

    Args:
        seed: of what chance decides.
    """

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.server = FakeServer(delay=self._delay)
        self._left = 0
        self._process: int | None = None  # a descriptor: it never means another process
        self._timer: threading.Timer | None = None

    def run(self, datatrove: Datatrove, folder: Path, requests: int, **settings: Any) -> int:
        """Runs the job, and kills it after ``requests`` requests. Returns how it ended."""
        self._left = requests
        self._process = os.pidfd_open(datatrove.start(folder, self.server.url, **settings))
        try:
            return datatrove.end()
        finally:
            if self._timer is not None:
                self._timer.join()
            os.close(self._process)
            self._process = self._timer = None

    def _delay(self, asked: Payload, times: int) -> float:
        self._left -= 1
        if self._left == 0 and self._process is not None:
            self._timer = threading.Timer(self.chance.choice([0, 0.001, 0.01, 0.03]), self._kill)
            self._timer.start()
        return self.chance.choice([0, 0, 0.002, 0.02])

    def _kill(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, signal.SIGKILL)


# the process ---------------------------------------------------------------------------------------------------------


def _job(
    folder: str,
    url: str,
    tasks: int = 1,
    concurrent: int = 3,
    template: str = TEMPLATE,
    compression: str | None = None,
    size: int = SIZE,
) -> None:
    """Runs it, with datatrove's executor if there are several tasks."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.inference.run_inference import InferenceConfig, InferenceRunner

    config = InferenceConfig(
        server_type="endpoint",
        model_name_or_path="fake",
        endpoint_url=url,
        max_concurrent_generations=concurrent,
        metric_interval=3600,
    )
    runner = InferenceRunner(
        rollout,
        config,
        make_writer(Path(folder), template, compression),
        checkpoints_local_dir=f"{folder}/checkpoints",
        records_per_chunk=size,
    )
    reader = JsonlReader(f"{folder}/input")
    if tasks == 1:
        runner.run(reader.run())
    else:
        LocalPipelineExecutor([reader, runner], tasks, workers=1, logging_dir=f"{folder}/logs").run()


NEEDS = ("httpx", "aiofiles", "aiosqlite")
"""What datatrove's runner imports when it runs. It waits without end, and without a word, for a server that it cannot
ask for want of ``httpx``."""
_PR_SET_PDEATHSIG = 1


_C = ctypes.CDLL(None, use_errno=True)


def _end_with_parent() -> None:
    """The kernel kills this process when its parent ends, even if that is killed."""
    _C.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _fork(work: Callable[[], None]) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        if os.getppid() != parent:
            os._exit(1)
        os.setsid()
        work()
        os._exit(0)
    except BaseException as error:
        print(repr(error), file=sys.stderr)
        os._exit(1)


def _serve() -> None:
    if lacking := [name for name in NEEDS if find_spec(name) is None]:
        sys.exit(f"datatrove's runner needs {', '.join(lacking)}: pip install {' '.join(lacking)}")
    _end_with_parent()
    os.register_at_fork(after_in_child=_end_with_parent)  # a fork does not inherit that
    if os.getppid() != int(sys.argv[1]):
        return
    import datatrove.pipeline.inference.run_inference  # noqa: F401 - before the forks
    from loguru import logger

    logger.disable("datatrove")
    pid = 0
    for line in sys.stdin:
        order = json.loads(line)
        if order:
            pid = _fork(lambda order=order: _job(**order))  # type: ignore[misc]
            print(pid, flush=True)
        else:
            status = os.waitpid(pid, 0)[1]
            with suppress(ProcessLookupError):  # datatrove's executor leaves a manager behind
                os.killpg(pid, signal.SIGKILL)
            print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    _serve()
