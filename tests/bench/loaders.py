"""Our torch dataset beside ``datasets`` and MosaicML Streaming: speed, resume, memory and shuffle, in one table.

    python -m tests.bench.loaders --mosaic-python other-environment/bin/python

MosaicML Streaming needs older versions of packages that we need, so it has a virtual environment of its own
(``pip install mosaicml-streaming torch``). Without ``--mosaic-python`` its rows are left out.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.bench import tables
from tests.bench.loader_systems import SYSTEMS, WINDOW

_SCRIPT = Path(__file__).with_name("loader_systems.py")
_HEAD = [
    "system",
    "rows per CPU second",
    "resume, CPU ms",
    "resumes exactly",
    "displacement",
    "neighbours within 1 %",
    "files in a batch of 32",
    "memory, MB",
    "state, bytes",
]


def run(python: str, *arguments: str) -> str:
    ended = subprocess.run([python, str(_SCRIPT), *arguments], capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"{arguments[0]} failed:\n{ended.stderr[-3000:]}")
    return ended.stdout


def measured(
    folder: Path, rows: int, files: int, mosaic_python: str | None, systems: Iterable[str] = SYSTEMS
) -> dict[str, dict[str, Any]]:
    """The figures of each system."""
    run(sys.executable, "parquet", str(folder), str(rows), str(files))
    if mosaic_python:
        run(mosaic_python, "mds", str(folder), str(rows), str(files))
    found = {}
    for name in systems:
        is_mosaic = name.startswith("MosaicML")
        if is_mosaic and not mosaic_python:
            continue
        python = str(mosaic_python) if is_mosaic else sys.executable
        found[name] = json.loads(run(python, name, str(folder), str(rows), str(files)).splitlines()[-1])
        print(f"{name}: {json.dumps(found[name])}", file=sys.stderr)
    return found


def exactness(figures: dict[str, Any]) -> str:
    if figures["exact"]:
        return "yes"
    return f"no: {figures['repeated']:,} repeated, {figures['skipped']:,} skipped"


def table(found: dict[str, dict[str, Any]]) -> str:
    return tables.markdown(
        _HEAD,
        (
            [
                name,
                f"{figures['rows/s']:,.0f}",
                f"{figures['resume s'] * 1000:,.0f}",
                exactness(figures),
                f"{figures['displacement']:.3f}",
                f"{figures['neighbours']:.1%}".replace("%", " %"),
                f"{figures['files in a batch']:.1f}",
                f"{figures['MB']:.0f}",
                f"{figures['state bytes']:,}",
            ]
            for name, figures in found.items()
        ),
    )


def main() -> None:
    parser = tables.parser(__doc__)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--files", type=int, default=10)
    parser.add_argument("--mosaic-python", help="the Python of an environment with mosaicml-streaming")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measured(Path(folder), given.rows, given.files, given.mosaic_python)
    print(f"{given.rows:,} rows in {given.files} files, {WINDOW:,} rows shuffled at once where this is a setting\n")
    print(table(found))


if __name__ == "__main__":
    main()
