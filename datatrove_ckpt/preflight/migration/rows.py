"""The rows in files that datatrove's own runner wrote: its chunk files, and its output.

Of each row, id, a hash of the text, and the place in the file are kept, so a chunk of 100,000 documents takes some ten
megabytes. A torn line, as a kill leaves it, is named and left out. datatrove appends the next line right behind it, so
that one is lost, too.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

import orjson
import xxhash
from datatrove.pipeline.writers.disk_base import DiskWriter

from datatrove_ckpt.formatting import safe_text
from datatrove_ckpt.output.formats import Jsonl, format_of

NO_RESULTS = "__no_rollouts_remove"
"""datatrove's mark for a document whose rollouts all returned None, or whose request was rejected."""
_ID = re.compile(rb'"id":"((?:[^"\\]|\\.)*)"')
DAMAGED = (OSError, EOFError, ValueError, zlib.error)
"""What reading a damaged file raises, besides the errors of zstandard and pyarrow."""
_OWN_FIELDS = ("text", "id", "media", "metadata")


def digest(text: object) -> int:
    """Hash of a document's text."""
    return int(xxhash.xxh3_64_intdigest(str(text).encode("utf-8", "surrogatepass")))


class Row(NamedTuple):
    """A document in a file.

    Attributes:
        text: hash of its text; None if the file does not hold it.
        name: of the file.
        offset, length: of its line, in the decompressed file; -1 if the document cannot be made of it.
        dropped: datatrove keeps it out of the output.
        work: number of results with their usage, prompt and completion tokens.
        results: their number; -1: the metadata has no such key; None: the file does not show it.
    """

    text: int | None
    name: str
    offset: int
    length: int
    dropped: bool
    work: tuple[int, int, int]
    results: int | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the document can be made of it."""
        return self.offset >= 0


@dataclass
class Rows:
    """Rows of one chunk.

    Attributes:
        by_id: of each id.
        nameless: number of rows without an id.
        problems: what is wrong with the files.
        damaged: the ids that can be read in lines that are torn.
    """

    by_id: dict[str, list[Row]] = field(default_factory=dict)
    nameless: int = 0
    problems: list[str] = field(default_factory=list)
    damaged: set[str] = field(default_factory=set)

    def add(self, id: object, row: Row) -> None:
        self.by_id.setdefault(str(id), []).append(row)

    def take(self, id: str, text: int, any_text: bool = False) -> Row | None:
        """The first row of a document that was not taken yet; None if there is none."""
        rows = self.by_id.get(id, [])
        for index, row in enumerate(rows):
            if any_text or row.text is None or row.text == text:
                return rows.pop(index)
        return None

    @property
    def left(self) -> int:
        """Number of rows that were not taken."""
        return sum(map(len, self.by_id.values()))

    def untaken(self) -> set[tuple[str, int]]:
        """Ids and texts of the rows that were not taken."""
        return {(id, row.text) for id, rows in self.by_id.items() for row in rows if row.text is not None}


def read_chunk_file(path: Path, metadata_key: str) -> Rows:
    """The rows of datatrove's file of an unfinished chunk."""
    rows = Rows()
    with path.open("rb") as file:
        _read(rows, Jsonl().rows(file, ()), path.name, metadata_key)
    return rows


def read_output(writer: DiskWriter, names: Iterable[str], metadata_key: str) -> Rows:
    """The rows of a chunk's output files, and what is wrong with them."""
    rows = Rows()
    for name in names:
        try:
            if (known := format_of(writer)) is None:
                rows.problems.append(f"{name}: files of {type(writer).__name__} cannot be read here")
                continue
            with open_output(writer, name) as file:
                _read(
                    rows,
                    known.rows(file, {"id", "text", "metadata", metadata_key}),
                    name,
                    metadata_key,
                    is_plain(writer),
                )
        except DAMAGED as error:
            rows.problems.append(f"{name} cannot be read to its end ({safe_text(error) or type(error).__name__})")
        except Exception as error:  # of a codec: each has errors of its own
            if type(error).__module__.split(".")[0] not in ("zstandard", "isal", "pyarrow"):
                raise
            rows.problems.append(f"{name} cannot be read to its end ({safe_text(error)})")
    return rows


def open_output(writer: DiskWriter, name: str) -> IO[bytes]:
    """The decompressed content of an output file."""
    known = format_of(writer)
    compression = None if known is not None and known.is_compressed else writer.output_mg.compression or None
    file: IO[bytes] = writer.output_folder.open(name, "rb", compression=compression)
    return file


def is_plain(writer: DiskWriter) -> bool:
    """Whether a line of the output holds the whole document."""
    return getattr(writer.adapter, "__func__", None) is DiskWriter._default_adapter


def metadata_of(row: dict[str, Any]) -> dict[str, Any]:
    """A row's metadata, also where the writer made columns of them."""
    if isinstance(metadata := row.get("metadata"), dict):
        return metadata
    return {name: value for name, value in row.items() if name not in _OWN_FIELDS}


def work_of(results: object) -> tuple[int, int, int]:
    """Number of results that tell their usage, and the sums of prompt and completion tokens."""
    usages = [one.get("usage") for one in results if isinstance(one, dict)] if isinstance(results, list) else []
    numbers = [
        (usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0)
        for usage in usages
        if isinstance(usage, dict)
    ]
    numbers = [(one, two) for one, two in numbers if isinstance(one, int) and isinstance(two, int)]
    return len(numbers), sum(one for one, _ in numbers), sum(two for _, two in numbers)


def _read(
    rows: Rows, found: Iterable[tuple[dict[str, Any] | None, bytes]], name: str, metadata_key: str, plain: bool = True
) -> None:
    offset = 0
    for number, (row, line) in enumerate(found, 1):
        if row is None:
            rows.problems.append(f"{name}, line {number} is torn")
            with suppress(ValueError):
                rows.damaged |= {str(orjson.loads(b'"%s"' % id)) for id in _ID.findall(line)}
        else:
            _add(rows, row, name, metadata_key, (offset, len(line)) if plain and line else (-1, 0), plain)
        offset += len(line)


def _add(rows: Rows, row: dict[str, Any], name: str, metadata_key: str, place: tuple[int, int], plain: bool) -> None:
    if "id" not in row:
        rows.nameless += 1
        return
    metadata = metadata_of(row)
    text = digest(row["text"]) if "text" in row else digest("") if "metadata" in row else None
    dropped = NO_RESULTS in metadata
    results = metadata.get(metadata_key)
    rows.add(
        row["id"], Row(text, name, *place, dropped, work_of(results), _number(results, dropped) if plain else None)
    )


def _number(results: object, dropped: bool) -> int | None:
    if dropped:
        return None
    return len(results) if isinstance(results, list) else -1
