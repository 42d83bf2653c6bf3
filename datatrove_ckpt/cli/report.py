"""``datatrove-ckpt report``: writes one HTML page about a run.

Exit codes: 0 the page is written; 1 it could not be; 2 a mistake on the command line.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.cli.printing import write_out
from datatrove_ckpt.cli.what import place_of
from datatrove_ckpt.errors import CkptError, ConfigError, StorageFailed
from datatrove_ckpt.formatting import byte_size, plural
from datatrove_ckpt.maintenance.documents import ShownDocument, read_documents
from datatrove_ckpt.maintenance.read_state import read_run_state, wanted_files
from datatrove_ckpt.maintenance.report.gather import Prices, gather
from datatrove_ckpt.maintenance.where import Place

_DOCUMENTS = 10


def report(arguments: argparse.Namespace) -> int:
    """Writes the page. Returns the exit code."""
    prices = Prices(arguments.price_per_gpu_hour, arguments.price_per_million_tokens, arguments.gpus_per_rank)
    with place_of(arguments, wanted_files) as place:
        beside = place.folder.parent if place.folder.name == "checkpoints" else Path()
        target: str = arguments.output or str(beside / "report.html")
        if Path(target).is_dir():
            raise ConfigError(f"--output: {target} is a folder. Give the name of a file, such as {target}/report.html.")
        state = read_run_state(place)
        page = gather(state, prices, place.config, list(_documents(place)))
    text = page.html().encode()
    if target == "-":
        write_out(text.decode(), raw=True)
    else:
        _write(Path(target), text)
        number = plural(len(state.ranks), "rank")
        write_out(f"{target}: the report of {number} ({byte_size(len(text))}). Open it in a browser.\n")
    return 0


def _documents(place: Place) -> Iterator[ShownDocument]:
    """The first documents, or why they cannot be read: the output may be out of reach, and the page has more."""
    try:
        yield from islice(read_documents(place), _DOCUMENTS)
    except (CkptError, OSError) as error:
        yield ShownDocument("", "", place.said(f"cannot be shown: {error}"))


def _write(path: Path, content: bytes) -> None:
    """Replaces the file in one step: a browser that loads it again never sees half a page."""
    path = path.resolve()  # of a link, the file that it names
    try:
        if path.exists() and not path.is_file():  # /dev/stdout, a pipe
            path.write_bytes(content)
        else:
            files.disk.replace(path, content, files.PUBLIC_FILE)
    except (OSError, StorageFailed) as error:
        with suppress(OSError):
            path.with_name(path.name + ".new").unlink()
        cause = error.__cause__ or error
        why = getattr(cause, "strerror", None) or cause
        raise StorageFailed(f"--output: {path} cannot be written: {why}. Give another file with -o.") from error
