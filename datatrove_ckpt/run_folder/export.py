"""Exports a run's output as one file, or to a repository on the hub."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import orjson
from datatrove.io import get_datafolder

from datatrove_ckpt import errors
from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.checksummed_lines import Json
from datatrove_ckpt.common.formatting import missing_package
from datatrove_ckpt.common.lazy_pyarrow import pa, pq
from datatrove_ckpt.common.retrying import failure_line
from datatrove_ckpt.output.arrow_types import (
    DataType,
    Schema,
    Table,
    TypeConflict,
    to_arrow,
    type_of,
    unify_types,
)
from datatrove_ckpt.output.csv_writer import line
from datatrove_ckpt.output.document_codec import for_orjson
from datatrove_ckpt.output.formats import JSONL, PARQUET, format_of_file
from datatrove_ckpt.run_folder.documents import Committed, committed_files, read_rows
from datatrove_ckpt.run_folder.run_location import RunLocation
from datatrove_ckpt.run_folder.verify import REDO_KINDS, VerifyReport, verify

if TYPE_CHECKING:
    import datasets

_HUB = "hf://datasets/"
_BLOCK = 1 << 20  # bytes
_ROWS = 1000  # at once in memory
_GROUP = 1 << 26  # bytes of them in a row group
_OTHER_DOCUMENTS = (*REDO_KINDS, "duplicate", "overlap", "lost", "commits")  # kinds of problems


def dataset(location: RunLocation) -> datasets.Dataset:
    """Returns a dataset of the committed files, which may be larger than the memory.

    Raises as ``committed_files``, and OutputFailed if no column can hold the values of JSON lines.
    """
    import datasets

    files = list(committed_files(location))
    if not files:
        return datasets.Dataset.from_dict({})
    folder = files[0][0]
    if format_of_file(files[0][1].path) is PARQUET:
        return PARQUET.dataset([folder.resolve_paths(file.path) for _, file, _ in files])
    # The loader of JSON lines takes the types of the first file, and makes times of texts; the
    # loader of CSV makes numbers and nulls of texts.
    schema = _united(_columns_of_rows(location))
    if not len(schema):
        return datasets.Dataset.from_dict({})
    return datasets.Dataset.from_generator(
        _whole_rows,
        datasets.Features.from_arrow_schema(schema),
        gen_kwargs={
            "output": folder.resolve_paths(""),
            "files": tuple((file.path, file.xxh128) for _, file, _ in files),
            "columns": tuple(schema.names),
        },
    )


def _whole_rows(
    output: str, files: Sequence[tuple[str, str]], columns: Sequence[str]
) -> Iterator[Json]:
    """Yields rows with all columns. By the hashes in ``files``, ``datasets`` finds them in its
    cache.
    """
    folder = get_datafolder(output)
    for path, _ in files:
        for row in read_rows(folder, path):
            yield {name: row.get(name) for name in columns}


def _columns_of_rows(location: RunLocation) -> Iterator[tuple[str, DataType]]:
    for rows in _batches(location):
        for name in dict.fromkeys(chain.from_iterable(rows)):
            yield name, type_of([row.get(name) for row in rows], name)


def _united(columns: Iterable[tuple[str, DataType]]) -> Schema:
    """Returns columns that hold the values of all rows, or of all tables, unchanged.

    Raises OutputFailed if there are no such columns.
    """
    types = dict[str, DataType]()
    try:
        for name, kind in columns:
            types[name] = unify_types(types.get(name), kind, name)
    except (TypeConflict, ValueError, TypeError) as error:
        raise errors.OutputFailed(
            f"Nothing was exported: {error}. A .jsonl or .csv file takes them."
        ) from error
    return pa.schema(types.items())


def export(location: RunLocation, target: str) -> tuple[int, VerifyReport]:
    """Writes all committed documents, task by task in the order of the input.

    A CSV file has each column that any document has; lists and dictionaries are JSON there.

    Args:
        target: a path that ends with .csv, .jsonl or .parquet, or ``hf://datasets/ORG/NAME``.

    Returns:
        The number of documents, and the report of ``verify``.

    Raises:
        ConfigError: ``target`` is neither, or its file is there already.
        OutputMismatch: the output holds other documents than the commits name.
        CkptError: the output cannot be read.
    """
    if target.startswith(_HUB):
        report = _refuse_changes(location)
        with _named(target):
            whole = dataset(location)
            whole.push_to_hub(target.removeprefix(_HUB), private=True)  # unless it is there
        return len(whole), report
    path = Path(target)
    writers = {".csv": _write_csv, ".jsonl": _write_lines, ".parquet": _write_parquet}
    if path.suffix not in writers:
        raise errors.ConfigError(
            f"{target}: ends with none of {', '.join(writers)}, and is no {_HUB}ORG/NAME."
        )
    is_there = f"{target}: is there already. Remove it, or choose another name."
    if path.exists():
        raise errors.ConfigError(is_there)
    report = _refuse_changes(location)
    with _named(target), TemporaryDirectory(prefix=f"{path.name}.", dir=path.parent) as folder:
        new = Path(folder, path.name)
        count = writers[path.suffix](location, new)
        if not files.disk.put_new(new, path):
            raise errors.ConfigError(is_there)
    return count, report


def _refuse_changes(location: RunLocation) -> VerifyReport:
    report = verify(location)
    wrong = [problem for problem in report.problems if problem.kind in _OTHER_DOCUMENTS]
    if wrong:
        more = f" ({len(wrong)} such problems; datatrove-ckpt verify lists them)"
        raise errors.OutputMismatch(f"Nothing was exported. {wrong[0]}{more if wrong[1:] else ''}")
    return report


@contextmanager
def _named(target: str) -> Iterator[None]:
    try:
        yield
    except errors.CkptError:
        raise
    except Exception as error:  # of datasets, of the hub, of a disk
        missing = isinstance(error, ImportError) and missing_package(str(error))
        raise errors.OutputFailed(
            f"{target} was not written: {missing or failure_line(error)}"
        ) from error


def _write_lines(location: RunLocation, path: Path) -> int:
    count = 0
    with path.open("wb") as target:
        for folder, committed, _ in committed_files(location):
            name = committed.path
            file_format = format_of_file(name)
            if file_format is not JSONL:  # not by pandas, which rounds numbers
                for row in read_rows(folder, name, with_media=True):
                    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
                    target.write(orjson.dumps(for_orjson(row), default=str, option=options))
                    count += 1
                continue
            with file_format.open(folder, name) as file:
                for block in iter(partial(file.read, _BLOCK), b""):
                    target.write(block)
                    count += block.count(b"\n")
    return count


def _write_parquet(location: RunLocation, path: Path) -> int:
    files = [*committed_files(location)]  # a run may commit more of them meanwhile
    if files and format_of_file(files[0][1].path) is PARQUET:
        schema = _united(_columns_of_tables(files))
        tables = _tables(files, schema)
    else:
        schema = _united(_columns_of_rows(location))
        tables = (_table(rows, schema) for rows in _batches(location))
    count = 0
    with pq.ParquetWriter(path, schema) as writer:
        for table in tables:
            writer.write_table(table)
            count += table.num_rows
    return count


def _columns_of_tables(files: Iterable[Committed]) -> Iterator[tuple[str, DataType]]:
    for folder, committed, _ in files:
        with PARQUET.open(folder, committed.path) as file:
            for column in pq.read_schema(file):
                yield column.name, column.type


def _tables(files: Sequence[Committed], schema: Schema) -> Iterator[Table]:
    """Yields the rows as row groups of a usual size, also where files are small or have media."""
    group: list[Table] = []
    for folder, committed, _ in files:
        with PARQUET.open(folder, committed.path) as file, pq.ParquetFile(file) as parquet:
            size = 10 if "media" in parquet.schema_arrow.names else _ROWS
            for batch in parquet.iter_batches(size):
                group.append(_with_schema(batch, schema))
                if sum(table.num_rows for table in group) >= _ROWS or (
                    sum(table.nbytes for table in group) >= _GROUP
                ):
                    yield pa.concat_tables(group)
                    group = []
    if group:
        yield pa.concat_tables(group)


def _with_schema(batch: Table, schema: Schema) -> Table:
    columns = []
    for field in schema:
        if field.name not in batch.schema.names:
            columns.append(pa.nulls(batch.num_rows, field.type))
            continue
        column = batch.column(field.name)
        if not column.type.equals(field.type):
            try:
                column = column.cast(field.type)
            except pa.ArrowException:  # such as a struct with fields in another order
                column = to_arrow(field.type, column.to_pylist())
        columns.append(column)
    return pa.Table.from_arrays(columns, schema=schema)


def _table(rows: Sequence[Json], schema: Schema) -> Table:
    columns = [to_arrow(field.type, [row.get(field.name) for row in rows]) for field in schema]
    return pa.Table.from_arrays(columns, schema=schema)


def _write_csv(location: RunLocation, path: Path) -> int:
    files = [*committed_files(location)]  # a run may commit more of them meanwhile
    columns = dict[str, None]()
    for row in _rows(files):
        columns |= dict.fromkeys(row)
    count = 0
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write(line([*columns]))
        for row in _rows(files):
            file.write(line([row.get(name) for name in columns]))
            count += 1
    return count


def _rows(files: Iterable[Committed]) -> Iterator[Json]:
    for folder, committed, _ in files:
        yield from read_rows(folder, committed.path, with_media=True)


def _batches(location: RunLocation) -> Iterator[list[Json]]:
    rows = _rows(committed_files(location))
    while batch := list(islice(rows, _ROWS)):
        yield batch
