"""Whether files whose types are known load as one dataset: loaders take the types of the first file.

``column_types`` says what loaders do, as it was measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from datatrove_ckpt.output.arrow_types import NotUnited, unite
from datatrove_ckpt.output.column_types import Schema, raw_type, raw_types

SCHEMA_ADVICE = (
    "Give ParquetWriter a schema, or an adapter that sets one type (a new adapter needs accept_changes=True)"
)
"""What to do about column types."""


@dataclass(frozen=True)
class Misfit:
    """A column by which a file does not fit after a first one.

    Attributes:
        column: a path as in ``metadata.scores[]``.
        first: its type in the first file, ``missing`` or ``without a value``.
        later: its type in the later file, or ``without a value``.
        as_text: both load as one, but the values of the later file, which are no texts, load as texts.
    """

    column: str
    first: str
    later: str
    as_text: bool = False


def warning(found: list[Misfit], chunk_index: int) -> str:
    """What to tell the user of a rank, whose chunk this is."""
    columns = "; ".join(
        f"column {one.column!r} is {one.first} in one file, and {one.later} in a later one" for one in found
    )
    said = [f"{columns} (seen at chunk {chunk_index}). Loaders take the types of the first file"]
    if any(not one.as_text for one in found):
        said.append("so the dataset may not load as one")
    if texts := [repr(one.column) for one in found if one.as_text]:
        said.append(f"so the values of {', '.join(texts)} load as texts")
    return f"{', '.join(said)}. {SCHEMA_ADVICE}."


def misfits(first: Schema, later: Schema) -> list[Misfit]:
    """Why a file does not load after another one, or not as what it is."""
    names = set(first.names)
    found: list[Misfit] = []
    for field in later:
        if field.name in names:
            found += _misfits(first.field(field.name), field, field.name)
        else:
            found.append(Misfit(field.name, "missing", str(field.type)))
    return found


def _misfits(first: Any, later: Any, column: str) -> Iterator[Misfit]:
    import pyarrow as pa

    old, new = first.type, later.type
    if pa.types.is_null(new):
        return
    no_value = "without a value"
    empty, empty_later = pa.types.is_null(raw_type(first)), pa.types.is_null(raw_type(later))
    if empty_later:
        if not _takes_empty_text(old):
            yield Misfit(column, str(old), no_value)
    elif empty:
        if not (pa.types.is_string(new) or pa.types.is_large_string(new)):
            yield Misfit(column, no_value, str(new), as_text=_reads_as_text(new))
    elif pa.types.is_struct(old) and pa.types.is_struct(new):
        keys = {field.name: field for field in old}
        for field in new:
            if field.name in keys:
                yield from _misfits(keys[field.name], field, f"{column}.{field.name}")
            else:
                yield Misfit(f"{column}.{field.name}", "missing", str(field.type))
    elif pa.types.is_list(old) and pa.types.is_list(new):
        yield from _misfits(old.value_field, new.value_field, f"{column}[]")
    elif not _takes(old, new, column):
        yield Misfit(column, str(old), str(new))


def _takes(old: Any, new: Any, column: str) -> bool:
    import pyarrow as pa

    if old.equals(new):
        return True
    try:
        both = unite(old, new, column)
    except NotUnited:
        return False
    # Another time zone is only another way to show the same time.
    return bool(both.equals(old) or (pa.types.is_timestamp(old) and both.unit == old.unit))


def _takes_empty_text(kind: Any) -> bool:
    """Whether a loader converts a column of text without any value to the type. Not to a time of day, for example."""
    import pyarrow as pa

    try:
        pa.array([None], pa.string()).cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError):
        return False
    return not pa.types.is_nested(kind)


def _reads_as_text(kind: Any) -> bool:
    """Whether a loader converts values of the type to text. Bytes are no text, and lists none either."""
    import pyarrow as pa

    try:
        pa.nulls(1, kind).cast(pa.string())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError):
        return False
    return not pa.types.is_nested(kind) and not pa.types.is_binary(kind)


class RankColumns:
    """The types of the chunks of one rank: a guess for the next one, and whether it fits the others."""

    def __init__(self) -> None:
        self.guess: Schema | None = None
        self.known: dict[str, Any] = {}
        self._first: tuple[int, Schema] | None = None
        self._warned: set[str] = set()

    def start(self, chunk_index: int, schema: Schema) -> None:
        """``schema``: of the first file that earlier attempts committed."""
        self._first, self.known = (chunk_index, schema), raw_types(schema)

    def add(self, chunk_index: int, schema: Schema) -> list[Misfit]:
        """Adds a chunk. Returns why it and the first chunk do not load as one, once for each column.

        Raises:
            NotUnited: it can never be one dataset with the chunks before.
        """
        # A new dict: who names the culprit of this chunk needs the types of those before.
        raw = raw_types(schema).items()
        self.known = self.known | {name: unite(self.known.get(name), kind, name) for name, kind in raw}
        self.guess = schema
        first_index, first = self._first or (chunk_index, schema)
        found = misfits(first, schema) if first_index <= chunk_index else misfits(schema, first)
        if self._first is None or chunk_index < first_index:
            self._first = chunk_index, schema
        new = [one for one in found if one.column not in self._warned]
        self._warned.update(one.column for one in new)
        return new
