"""A training on several ranks, each a process."""

import json
import multiprocessing
import os
import signal
from contextlib import suppress
from pathlib import Path

import torch
from loguru import logger

from datatrove_ckpt.inference.servers.server import free_port
from tests.real import train as script


def flipped(data, place):
    return data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :]


def of_rank(rank, size, port, variables, target, arguments):
    """What a process of ``Ranks`` runs."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(port), **variables}
    logger.remove()
    target(*arguments)


def called(target, arguments):
    torch.distributed.init_process_group("gloo")
    target(torch.distributed.get_rank(), *arguments)
    torch.distributed.destroy_process_group()


class Ranks:
    """The script, or a function, on several ranks, each a process.

    Args:
        module: of the functions, which is imported once for all processes.
    """

    def __init__(self, module=__name__):
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__, module])

    def _start(self, size, variables, target, *arguments):
        made = (size, free_port(), variables, target, arguments)
        processes = [
            self._context.Process(target=of_rank, args=(rank, *made)) for rank in range(size)
        ]
        for process in processes:
            process.start()
        return processes

    def start(self, size, documents, run, steps, **variables):
        run.mkdir(exist_ok=True)
        return self._start(size, variables, script.main, documents, str(run), steps)

    def run(self, *arguments, **variables):
        join(self.start(*arguments, **variables))

    def call(self, target, size, *arguments):
        join(self.start_call(target, size, *arguments))

    def start_call(self, target, size, *arguments):
        return self._start(size, {}, called, target, arguments)


def join(processes, code=0):
    for process in processes:
        process.join(300)
    assert [process.exitcode for process in processes] == [code] * len(processes)


def losses_of(run, rank=0):
    """By step, those of the last time; each earlier time must have been the same up to a torn last
    line.
    """
    found = {}
    path = Path(run, f"losses-{rank}.jsonl")
    for line in path.read_text().splitlines() if path.exists() else ():
        step, *values = json.loads(line)
        assert found.setdefault(step, values) == values
    return found


def kill(pids, number=signal.SIGKILL):
    for pid in pids:
        with suppress(ProcessLookupError):  # the others have ended, and it with them
            os.kill(pid, number)


def processes_below(pid):
    """The process, its children, and theirs."""
    found = [pid]
    for each in found:
        with suppress(FileNotFoundError):
            for children in Path(f"/proc/{each}/task").glob("*/children"):
                found += map(int, children.read_text().split())
    return found
