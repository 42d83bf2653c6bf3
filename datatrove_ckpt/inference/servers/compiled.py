"""What an engine compiled for a model on one node, for its servers on other nodes."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import threading
import time
from contextvars import copy_context
from importlib.metadata import distributions
from pathlib import Path
from typing import Protocol

import xxhash

from datatrove_ckpt.common.redaction import Secret
from datatrove_ckpt.config import InferenceConfig

# Longer than engines compile (10 to 70 s) is no gain.
_FETCH_SECONDS = 60.0
_POLL = 0.05  # seconds
_PORT = 1  # any, but one for all
_CHIP = re.compile(r"^(?:Model|model name)\s*:\s*(.+)", re.MULTILINE)


class CompileCache(Protocol):
    """Exchanges folders of compiled code between nodes. No method raises an error."""

    def fetch(self, key: str, folder: Path) -> None:
        """Adds another node's files to the folder, unless the folder has the key."""

    def save(self, key: str, folder: Path) -> None:
        """Copies the folder for other nodes, unless they have the key."""


def files_of(config: InferenceConfig) -> tuple[str, Path] | None:
    """Returns a key and the folder of what the engine compiles; None: it keeps nothing.

    The key names release, command line and chip. In the folder the engine finds its files by hashes
    of its own.
    """
    engine = config.engine
    command = engine.launch(config, _PORT, Secret(""))
    folder = engine.compile_cache(command.environment(os.environ))
    if folder is None:
        return None
    program, *arguments = command.argv
    beside = map(str, Path(program).parent.parent.glob("lib/python*/site-packages"))
    packages = distributions(name=engine.package, path=[*beside, *sys.path])
    parts = engine.name, [one.version for one in packages][:1], arguments, _chip()
    return xxhash.xxh3_128_hexdigest(repr(parts).encode()), folder


def _chip() -> str:
    """Returns the name of the first GPU, else of the CPU."""
    gpus = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    for path in [*gpus, Path("/proc/cpuinfo")]:
        if path.exists() and (name := _CHIP.search(path.read_text())):
            return name[1].strip()
    return ""


async def fetch_compiled(cache: CompileCache, key: str, folder: Path) -> None:
    thread = in_thread(cache.fetch, key, folder)
    end = time.monotonic() + _FETCH_SECONDS
    while thread.is_alive() and time.monotonic() < end:  # noqa: ASYNC110
        # No thread may call into a loop that has ended.
        await asyncio.sleep(_POLL)


def in_thread(*call: object) -> threading.Thread:
    # A daemon: neither a stop nor the end of a run waits for the mirror.
    thread = threading.Thread(
        target=copy_context().run, args=call, name="datatrove-ckpt compiled", daemon=True
    )
    thread.start()
    return thread
