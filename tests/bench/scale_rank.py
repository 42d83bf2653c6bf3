"""Runs one rank of a job as a task on a cluster does: without the checks of all ranks that ``run`` makes before.

    python -m tests.bench.scale_rank FOLDER RANK [COUNTS [--pipeline.1.KEY=VALUE ...]]

COUNTS: a file that gets the number of operations on ``memory://``, which stands for any object store, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from fsspec.implementations.memory import MemoryFileSystem

from datatrove_ckpt.cli.overrides import read_config
from datatrove_ckpt.cli.yaml_config import build

_KINDS = {
    "put": ("pipe_file", "put_file"),
    "copy": ("cp_file",),
    "delete": ("rm_file", "rm"),
    "get": ("cat_file", "cat_ranges", "get_file", "open"),
    "list or head": ("ls", "find", "glob", "info", "exists", "isfile", "isdir"),
}


def count_operations() -> Counter[str]:
    """Counts the calls of ``memory://`` from here on; a call inside another one is a part of it."""
    counts: Counter[str] = Counter()
    inside = threading.local()

    def counted(kind: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*arguments: Any, **options: Any) -> Any:
            if getattr(inside, "it", False):
                return method(*arguments, **options)
            counts[kind] += 1
            if kind == "put" and "generation-" in str(arguments[1]):
                counts["versions"] += 1
            inside.it = True
            try:
                return method(*arguments, **options)
            finally:
                inside.it = False

        return call

    for kind, names in _KINDS.items():
        for name in names:
            setattr(MemoryFileSystem, name, counted(kind, getattr(MemoryFileSystem, name)))
    return counts


def main(folder: str, rank: str, counts_file: str = "", *overrides: str) -> None:
    os.chdir(folder)
    counts = count_operations() if counts_file else Counter()
    build(read_config("job.yaml", list(overrides)))._run_for_rank(int(rank))
    if counts_file:
        Path(counts_file).write_text(json.dumps(counts))


if __name__ == "__main__":
    main(*sys.argv[1:])
