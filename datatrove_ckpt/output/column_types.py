"""The column types of a Parquet chunk, over all its documents, and whether chunks load as one
dataset.

datatrove's ParquetWriter takes the schema of a file's first document, and the columns of each
batch's first document: a column that is None at first fails later, and a new column is dropped
silently. Here a chunk's schema is the union over all its documents: null with any type is that
type, integers with floats are float64, dicts have the keys of all. Loaders (``pyarrow.dataset``,
``datasets``) take the columns of the first file, and convert other files (measured, Arrow 26 and
datasets 5.2):

- A column without any value is written as text, also inside lists and dicts: only null could follow
  Arrow's null type. Text without a value converts to numbers, dates, booleans and bytes. In a first
  file it turns numbers, dates and booleans of later files into text, and does not load with bytes.
  The field's metadata marks it.
- A later file may lack columns, or keys of dicts, and may hold integers where the first has floats.
- The opposite order cannot be known when the first file is written. Only a ``schema`` given to the
  writer helps. Such a chunk causes a warning, and ``verify --full`` names both files.
- Types that cannot be united, such as text and integers, stop the rank before the second type is
  published.

A chunk is first written with the schema of the chunk before. If its own schema proves different,
the chunk is written again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from datatrove.data import Document
from datatrove.io import DataFolder
from datatrove.pipeline.writers.disk_base import DiskWriter

from datatrove_ckpt.checkpoint.journal import Finished
from datatrove_ckpt.common.formatting import safe_repr, safe_text
from datatrove_ckpt.output.arrow_types import (
    NO_TYPES,
    DataType,
    Field,
    NotUnited,
    Row,
    Schema,
    Types,
    type_of,
    unite,
)
from datatrove_ckpt.output.formats import PARQUET
from datatrove_ckpt.output.given_schema import check_rows

_EMPTY_DICT = "_"
_NO_VALUE = {b"datatrove_ckpt": b"no value"}


def infers_schema(writer: DiskWriter) -> bool:
    return PARQUET.is_written_by(writer) and writer.schema is None


class ColumnTypes:
    """Collects the types of rows.

    Args:
        given: types of the input's columns, by their paths in the rows.

    Attributes:
        types: of each column.
    """

    def __init__(self, given: Types = NO_TYPES) -> None:
        self.types: dict[str, DataType] = {}
        self._given = given

    def add(self, rows: list[Row]) -> None:
        """Raises NotUnited, or what ``type_of`` raises."""
        for name in dict.fromkeys(name for row in rows for name in row):
            kind = type_of([row.get(name) for row in rows], name, self._given)
            self.types[name] = unite(self.types.get(name), kind, name)

    def schema(self) -> Schema:
        import pyarrow as pa

        return pa.schema([_writable(pa.field(name, kind)) for name, kind in self.types.items()])


def _writable(field: Field) -> Field:
    """Returns the field with text for no type, and a key in a dict without keys."""
    import pyarrow as pa

    kind = field.type
    if pa.types.is_null(kind):
        return pa.field(field.name, pa.string(), metadata=_NO_VALUE)
    if pa.types.is_struct(kind):
        fields = [_writable(inner) for inner in kind] or [
            pa.field(_EMPTY_DICT, pa.string(), metadata=_NO_VALUE)
        ]
        return pa.field(field.name, pa.struct(fields))
    if pa.types.is_list(kind):
        return pa.field(field.name, pa.list_(_writable(kind.value_field)))
    return field


def raw_type(field: Field) -> DataType:
    import pyarrow as pa

    kind = field.type
    if (field.metadata or {}).get(b"datatrove_ckpt"):
        return pa.null()
    if pa.types.is_struct(kind):
        fields = [(inner.name, raw_type(inner)) for inner in kind]
        if fields == [(_EMPTY_DICT, pa.null())]:
            return pa.struct([])
        return pa.struct(fields)
    if pa.types.is_list(kind):
        return pa.list_(raw_type(kind.value_field))
    return kind


def raw_types(schema: Schema) -> dict[str, DataType]:
    return {field.name: raw_type(field) for field in schema}


def name_culprit(
    writer: DiskWriter,
    documents: Iterable[Finished],
    decode: Callable[[bytes], Document],
    known: dict[str, DataType],
    given: Types,
) -> str | None:
    """Returns which document cannot be written, and why; None if every row alone can.

    Args:
        documents: it is read twice.
        known: the types of the chunks before, if the writer has no schema.
        given: types of the input's columns.
    """

    def find(check: Callable[[Row], object], where: str) -> str | None:
        for finished in documents:
            document = decode(finished.document)
            name = f"document {safe_repr(document.id)} (number {finished.ordinal} of this task)"
            row = writer.adapter(document)
            try:
                check(row)
            except NotUnited as error:
                return (
                    f"{name}: column {error.column!r} is {error.new} there, and {error.old} in "
                    f"{where}"
                )
            except Exception as error:
                return f"{name}: {safe_text(error)}"
        return None

    if writer.schema is not None:
        return find(lambda row: check_rows([row], writer.schema), "the writer's schema")
    types = ColumnTypes(given)
    types.types = dict(known)
    culprit = find(lambda row: types.add([row]), "it or one before it")
    if culprit is not None:
        return culprit
    schema = types.schema()
    return find(lambda row: check_rows([row], schema), "all documents together")


def read_schema(folder: DataFolder, path: str) -> Schema | None:
    """Returns a Parquet file's schema; None if it cannot be read, or pyarrow is not installed."""
    try:
        import pyarrow.parquet as pq

        with folder.open(path, "rb") as file:
            return pq.ParquetFile(file).schema_arrow
    except (ImportError, OSError, ValueError):
        return None


class Misfit(NamedTuple):
    """A column by which a file does not fit after a first one.

    Attributes:
        column: a path as in ``metadata.scores[]``.
        first, later: its type in each file, ``missing`` or ``without a value``.
    """

    column: str
    first: str
    later: str


ONE_TYPE = (
    "Give ParquetWriter a schema that fits, or an adapter that sets one type, or go on with "
    "output_format: jsonl, which takes values of any types. Each needs accept_changes: what is "
    "committed stays as it is"
)


def warning(found: list[Misfit], chunk_index: int, rank: int) -> str:
    columns = "; ".join(
        f"column {one.column!r} is {one.first} in one file, and {one.later} in a later one"
        for one in found
    )
    return (
        f"{columns} (seen at chunk {chunk_index} of task {rank}). Loaders take the types of the "
        "first file, so the dataset may not load as one, or values load as texts that are none. "
        f"{ONE_TYPE}."
    )


def misfits(first: Schema, later: Schema, inside: str = "") -> list[Misfit]:
    """Returns why a file does not load after another one. ``inside``: a struct's column, a dot."""
    known = {field.name: field for field in first}
    found: list[Misfit] = []
    for field in later:
        if field.name in known:
            found += _misfits(known[field.name], field, f"{inside}{field.name}")
        else:
            found.append(Misfit(f"{inside}{field.name}", "missing", str(field.type)))
    return found


def _misfits(first: Field, later: Field, column: str) -> Iterator[Misfit]:
    import pyarrow as pa

    old = first.type
    new = later.type
    if pa.types.is_null(new):
        return
    no_value = "without a value"
    if pa.types.is_null(raw_type(later)):
        if not _takes_empty_text(old):
            yield Misfit(column, str(old), no_value)
    elif pa.types.is_null(raw_type(first)):
        if not (pa.types.is_string(new) or pa.types.is_large_string(new)):
            yield Misfit(column, no_value, str(new))
    elif pa.types.is_struct(old) and pa.types.is_struct(new):
        yield from misfits(old, new, f"{column}.")
    elif pa.types.is_list(old) and pa.types.is_list(new):
        yield from _misfits(old.value_field, new.value_field, f"{column}[]")
    elif not _takes(old, new, column):
        yield Misfit(column, str(old), str(new))


def _takes(old: DataType, new: DataType, column: str) -> bool:
    import pyarrow as pa

    if old.equals(new):
        return True
    try:
        both = unite(old, new, column)
    except NotUnited:
        return False
    # Time zones differ only in display.
    return bool(both.equals(old) or (pa.types.is_timestamp(old) and both.unit == old.unit))


def _takes_empty_text(kind: DataType) -> bool:
    """Whether a loader converts a column of text without any value to the type."""
    import pyarrow as pa

    try:
        pa.nulls(1, pa.string()).cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError):
        return False
    return not pa.types.is_nested(kind)


class RankColumns:
    def __init__(self) -> None:
        self.guess: Schema | None = None
        self.known: dict[str, DataType] = {}
        self._first: tuple[int, Schema] | None = None
        self._warned: set[str] = set()

    def start(self, chunk_index: int, schema: Schema) -> None:
        """``schema``: of the first file that earlier attempts committed."""
        self._first = (chunk_index, schema)
        self.known = raw_types(schema)

    def add(self, chunk_index: int, schema: Schema) -> list[Misfit]:
        """Adds a chunk. Returns why it and the first chunk do not load as one, once for each
        column.

        Raises:
            NotUnited: it can never be one dataset with the chunks before.
        """
        # A new dict: ``name_culprit`` needs the types of the chunks before.
        raw = raw_types(schema).items()
        self.known = self.known | {
            name: unite(self.known.get(name), kind, name) for name, kind in raw
        }
        self.guess = schema
        if self._first is None:
            self._first = (chunk_index, schema)
        first_index, first = self._first
        if chunk_index < first_index:
            self._first = (chunk_index, schema)
            found = misfits(schema, first)
        else:
            found = misfits(first, schema)
        new = [misfit for misfit in found if misfit.column not in self._warned]
        self._warned.update(misfit.column for misfit in new)
        return new
