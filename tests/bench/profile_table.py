"""Prints what ``profiling.py`` found: CPU per thread, garbage collection, and the dearest functions of each thread."""

from __future__ import annotations

import json
import pstats
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.bench.measure import Result, table

_SHOWN = 15


def print_profile(folder: Path, documents: int, run: Callable[[], Result]) -> None:
    """Runs twice: without a profiler, for totals, and with it, for the share of each function."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "no-profiler").touch()
    result = run()
    plain = _seconds(folder)
    (folder / "no-profiler").unlink()
    run()
    profiled = _seconds(folder)
    print(f"{documents} documents, {result['rate']:.0f}/s, {result['us']:.0f} us of CPU per document, of which")
    print(f"{result['system_cpu'] / documents * 1e6:.0f} us in the kernel. By thread:\n")
    table(["thread", "us/document"], [[name, 1e6 * seconds / documents] for name, seconds in plain.items()])
    collections = json.loads((folder / "collections.json").read_text())
    table(
        ["garbage collection", "times", "us/document", "longest ms"],
        [[f"generation {key}", times, 1e6 * seconds / documents, 1e3 * longest]
         for key, (times, seconds, longest) in collections.items()],
    )  # fmt: skip
    for path in sorted(folder.glob("*.pstats")):
        name = path.stem.replace("-", " ")
        thread = next((thread for thread in plain if thread.replace("-", " ") == name), None)
        # The profiler makes everything dearer; what a function really costs is its share of the plain run.
        scale = plain[thread] / profiled[thread] if thread else 1.0
        print(f"{name} (scaled by {scale:.2f})\n")
        table(["own us", "with callees us", "calls", "function"], _dearest(path, documents, scale))


def _seconds(folder: Path) -> dict[str, float]:
    return dict(json.loads((folder / "threads.json").read_text()))


def _dearest(path: Path, documents: int, scale: float) -> list[list[Any]]:
    stats: Any = pstats.Stats(str(path))
    dearest = sorted(stats.stats.items(), key=lambda item: -item[1][2])[:_SHOWN]
    each = 1e6 * scale / documents
    return [
        [own * each, whole * each, calls / documents, f"{'/'.join(Path(file).parts[-2:])}:{line} {name}"]
        for (file, line, name), (_, calls, own, whole, _) in dearest
    ]
