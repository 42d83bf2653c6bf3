"""An input as blocks of rows: which there are, and any of them alone.

A position on a document says where a reader goes on. Training loops need more: how many rows there are, and rows of any
place, in an order that does not follow the files. A block is a row group or record batch, or a slice of one, so that
what is held of a block does not grow with the groups of a file.

    blocks = BlockInput(ParquetReader("corpus"))
    sum(block.rows for block in blocks)             rows of the whole input
    blocks.read(blocks[7], ["input_ids"])           the rows of one block, as a table

The blocks depend on the files alone: not on the columns, the reader's ``limit`` and ``skip``, or on who reads them.

Keeps the rows of files that were counted, so that the next process need not read the files again.

JSONL has no table of contents, so its lines are counted by reading all of it: 1 to 2 GB per second from a page cache,
and what a disk or network gives otherwise. Remote Parquet and Arrow files cost some requests each. The counts of an
input are one small file in the folder ``$DATATROVE_CKPT_CACHE`` (empty: none are kept), else ``datatrove-ckpt/rows`` in
the user's cache folder. Put it on a shared disk, and the nodes of a training share the counts: the first process
counts, and the others wait for it.

A count is used while the file has the same size, time of change and sample (see ``Inputs.sample``). A count that is
wrong nevertheless is noticed when rows are read, see ``block_formats.changed``. The file may be deleted at any time.

One schema for all files of an input, whose columns may have other types in each.

Rows of several files come together in a shuffled window. pyarrow would unify the types of those
that happen to be there, so that a row's type would depend on its neighbours, and on where a run was resumed. Here the
types of all files count, whoever reads what.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
import uuid
from base64 import b64decode, b64encode
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import orjson
from loguru import logger
from xxhash import xxh3_64_hexdigest, xxh3_128_hexdigest

import datatrove_ckpt.torch.block_formats as block_formats
from datatrove_ckpt.errors import ConfigError, InputError
from datatrove_ckpt.readers.base import SeekingReader
from datatrove_ckpt.readers.inputs import Inputs
from datatrove_ckpt.readers.jsonl import JsonlReader
from datatrove_ckpt.readers.tables import IpcReader, ParquetReader
from datatrove_ckpt.torch.block_formats import (
    ArrowBlocks,
    BlockFile,
    FileIndex,
    Group,
    LineBlocks,
    ParquetBlocks,
    Rows,
    check_columns,
)

if TYPE_CHECKING:
    import pyarrow as pa


_VERSION = 1
_SAVE_SECONDS = 30.0
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "created")
"""What file systems call the time of the last change."""


def cache_folder() -> Path | None:
    """Where counts are kept: see above. None: they are not."""
    own = os.environ.get("DATATROVE_CKPT_CACHE")
    if own is not None:
        if own:
            return Path(own)
        return None
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "datatrove-ckpt" / "rows"


class RowCounts:
    """The counts of one input.

    Args:
        inputs: its files.
        kind: what else the counts depend on, such as the format.
    """

    def __init__(self, inputs: Inputs, kind: str) -> None:
        self._inputs = inputs
        source = f"{_VERSION}/{kind}/{inputs.folder.resolve_paths('')}"
        folder = cache_folder()
        self._path = None if folder is None else folder / f"{xxh3_128_hexdigest(source.encode())}.json"
        self._files: dict[str, Any] = {}
        self._lock = threading.Lock()  # files are counted in several threads
        self._changed = False
        self._saved = time.monotonic()

    def load(self) -> None:
        """Reads what is kept. What cannot be read is counted again."""
        if self._path is None:
            return
        with suppress(OSError, ValueError):
            content = orjson.loads(self._path.read_bytes())
            if isinstance(content, dict) and isinstance(content.get("files"), dict):
                self._files = content["files"] | self._files

    @contextmanager
    def counting(self) -> Iterator[None]:
        """For one process at a time, if the file system can lock. What is counted inside is kept at the end."""
        with ExitStack() as stack:
            if self._path is not None:
                with suppress(OSError):  # a folder that cannot be written, or a file system without locks
                    self._path.parent.mkdir(parents=True, exist_ok=True)
                    lock = stack.enter_context(self._path.with_suffix(".lock").open("a"))
                    try:
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError:
                        logger.info("Another process counts the rows of the input. Waiting for it.")
                        fcntl.flock(lock, fcntl.LOCK_EX)
                    self.load()
            stack.callback(self._save)
            yield

    def key(self, number: int) -> str:
        """What changes with a file's content; empty if nothing does."""
        info = self._inputs.info(number)
        changed = next((str(info[name]) for name in _TIMES if info.get(name)), "")
        known = (str(self._inputs.size(number)), changed, self._inputs.sample(number))
        if any(known[1:]):
            return xxh3_64_hexdigest("/".join(known).encode())
        return ""

    def get(self, number: int) -> FileIndex | None:
        """The count of a file; None if it is not known, or if the file has changed since."""
        found = self._files.get(self._inputs.names[number])
        with suppress(KeyError, TypeError, ValueError):
            if found and found["key"] == self.key(number):
                groups = zip(found["rows"], found["bytes"], strict=True)
                parts = tuple(Group(int(rows), int(size)) for rows, size in groups)
                return FileIndex(parts, bool(found["sequential"]), b64decode(found.get("schema", "")))
        return None

    def put(self, number: int, index: FileIndex) -> None:
        """Keeps the count of a file."""
        key = self.key(number)
        if not key:
            return
        rows = [group.rows for group in index.groups]
        sizes = [group.bytes for group in index.groups]
        entry = {"key": key, "rows": rows, "bytes": sizes, "sequential": index.sequential}
        entry |= {"schema": b64encode(index.schema).decode()} if index.schema else {}
        with self._lock:
            self._files[self._inputs.names[number]] = entry
            self._changed = True
            is_due = time.monotonic() - self._saved > _SAVE_SECONDS
        if is_due:
            self._save()

    def _save(self) -> None:
        with self._lock:
            if not self._changed or self._path is None:
                return
            self._changed = False
            self._saved = time.monotonic()
            content = orjson.dumps({"files": self._files})
            part = self._path.with_suffix(f".{uuid.uuid4().hex}")  # nodes may share the folder, and process ids
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                part.write_bytes(content)
                part.replace(self._path)
            except OSError as error:
                logger.warning(f"The rows that were counted cannot be kept, so the next start counts again: {error}")
                with suppress(OSError):
                    part.unlink()


class Unified:
    """The types that all rows get.

    Args:
        schemas: each schema that occurs, serialized, and a file that has it.
        columns: the columns that are read, which all files must have; None: all that some file has. Where a file lacks
            one, its rows have None.

    Raises:
        ConfigError: a file lacks a column, or the types of a column cannot be unified.
    """

    def __init__(self, schemas: Iterable[tuple[bytes, str]], columns: Sequence[str] | None) -> None:
        import pyarrow as pa

        kinds: dict[str, dict[pa.DataType, str]] = {}
        for serialized, name in schemas:
            schema = pa.ipc.read_schema(pa.py_buffer(serialized))
            check_columns(schema.names, schema.names if columns is None else columns, name)
            for column in schema.names if columns is None else columns:
                kinds.setdefault(column, {}).setdefault(schema.field(column).type, name)
        self._schema = pa.schema([(column, _unify(column, files)) for column, files in kinds.items()])

    def apply(self, table: pa.Table, name: str) -> pa.Table:
        """The table in these types.

        Args:
            name: of its file.

        Raises:
            InputError: a value does not fit the type.
        """
        import pyarrow as pa

        schema = self._schema
        if table.column_names == schema.names and table.schema.types == schema.types:
            return table
        columns = []
        for field in schema:
            if field.name not in table.column_names:
                columns.append(pa.nulls(table.num_rows, field.type))
                continue
            try:
                columns.append(_cast(table[field.name], field.type))
            except pa.ArrowException as error:
                raise InputError(
                    f"The input file {name!r} has {field.name!r} as {table[field.name].type}, other files have it in "
                    f"types that make it {field.type}, and a value does not fit: {error}. Write the files with one "
                    "type, or read without shuffle_seed."
                ) from error
        return pa.table(columns, schema=schema)


def _unify(column: str, kinds: dict[pa.DataType, str]) -> pa.DataType:
    """The type that holds the values of all these types, each with a file that has it."""
    import pyarrow as pa

    found, *others = kinds
    for kind in others:
        try:
            schemas = [pa.schema([("", _plain(one))]) for one in (found, kind)]
            found = pa.unify_schemas(schemas, promote_options="permissive").field(0).type
        except pa.ArrowException as error:
            raise ConfigError(
                f"The column {column!r} is {kind} in the input file {kinds[kind]!r} and {found} in files before it, "
                "which are no values of one column. Write the files with one type, choose other columns, or read "
                "without shuffle_seed."
            ) from error
    return found


def _plain(kind: pa.DataType) -> pa.DataType:
    """The type of the values of a dictionary, or of views of texts."""
    import pyarrow as pa
    import pyarrow.types as types

    kind = kind.value_type if types.is_dictionary(kind) else kind
    views = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}
    return views.get(kind, kind)


def _cast(column: Any, kind: pa.DataType) -> Any:
    import pyarrow as pa

    if column.type == kind:
        return column
    # Casts do not add the fields of a struct; this does, as it has unified the types.
    tables = [pa.table({"": column.cast(_plain(column.type))}), pa.table({"": pa.array([], kind)})]
    unified = pa.concat_tables(tables, promote_options="permissive").column(0)
    return pa.chunked_array([chunk for chunk in unified.chunks if len(chunk)], kind)


MAX_ROWS = 2**16
MAX_BYTES = 2**24
"""The most rows and bytes of a block. A row that is larger than this is a block of its own."""

_SAMPLED_ROWS = 64
_SAMPLED_BYTES = 2**22
_OPEN_FILES = 32
_THREADS = 16

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive rows of one file.

    Attributes:
        file: the number of the file, in the reader's order.
        first: the number of the first row in the file.
        rows: how many rows.
        bytes: how large they are in memory, roughly, with all columns.
    """

    file: int
    first: int
    rows: int
    bytes: int


class BlockInput:
    """The blocks of a reader's files, in their order, and the rows of each. Files stay open while they are read.

    Args:
        reader: a reader of ``readers`` for JSONL, Parquet or Arrow files.

    Attributes:
        names: the files, in the reader's order.
        sequential: the numbers of the files of which a block costs reading all earlier ones: of these, read blocks in
            order. These are compressed JSONL files, and Arrow streams with dictionaries.
        gives_dicts: whether the rows of a block are a list, and no table.
        gives_views: whether the rows of a block are a part of more memory: of a mapped file, or of a record batch.

    Raises:
        ConfigError: the reader's files have no blocks.
        InputError: a file is damaged.
    """

    def __init__(self, reader: SeekingReader) -> None:
        self._reader = reader
        self._inputs: Inputs = reader._list_inputs(0, 1, None)
        self.names = self._inputs.names
        self._opened: OrderedDict[int, BlockFile] = OrderedDict()
        self._process = os.getpid()
        self._keys: set[str] = set()  # columns that some line of JSONL had
        self._unified: Unified | None = None
        self._schemas: dict[bytes, bytes] = {}  # each kept once
        self._size = 4
        self._index = self._index_files()
        self.sequential = frozenset(number for number, file in enumerate(self._index) if file.sequential)
        self.gives_dicts = isinstance(reader, JsonlReader)
        self.gives_views = isinstance(reader, IpcReader)
        self._size = self._size_in_memory()
        self._blocks = list(_cut(self._index, self._size))

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, index: int) -> Block:
        return self._blocks[index]

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks)

    def read(self, block: Block, columns: Sequence[str] | None = None) -> Rows:
        """The rows of a block: a table, or for JSONL dicts, with None for a damaged line.

        What is held in memory is the slice in Parquet, in its columns, and 1 MiB of lines in JSONL. Of a local Arrow
        file only the slice is read; of a compressed or remote one the record batch, in its columns.

        Args:
            columns: the names of the columns; None: all. A line of JSONL may lack some, and has None there.

        Raises:
            ConfigError: a file has no such column.
            InputError: the file is damaged.
            CheckpointMismatch: the file has changed since its rows were counted.
        """
        rows = self._file(block.file).read(block.first, block.rows, columns)
        if self._unified is None or isinstance(rows, list):
            return rows
        return self._unified.apply(rows, self.names[block.file])

    def unify(self, columns: Sequence[str] | None) -> None:
        """From now on rows of all files have the same types, in these columns.

        Raises:
            ConfigError: a file lacks a column, or the types of a column cannot be unified.
        """
        schemas: dict[bytes, str] = {}
        for name, file in zip(self.names, self._index, strict=True):
            if any(group.rows for group in file.groups):
                schemas.setdefault(file.schema, name)
        if not isinstance(self._reader, JsonlReader):
            self._unified = Unified(schemas.items(), columns)

    def let_go(self, file: int) -> None:
        """Frees what is kept so that the next block of a file can be read faster."""
        if file in self._opened and self._process == os.getpid():
            self._opened[file].let_go()

    def close(self) -> None:
        """Closes the files. They are opened again when they are needed."""
        while self._opened:
            self._opened.popitem()[1].close()

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_opened": OrderedDict()}

    def _index_files(self) -> list[FileIndex]:
        numbers = range(len(self.names))
        if isinstance(self._reader, JsonlReader) or not self._reader.data_folder.is_local():
            return self._count(RowCounts(self._inputs, self._kind), numbers)
        return self._in_threads(self._index_file, numbers)

    def _count(self, counts: RowCounts, numbers: Sequence[int]) -> list[FileIndex]:
        counts.load()
        known = self._in_threads(counts.get, numbers)
        if None not in known:
            return [index for index in known if index is not None]
        with counts.counting():
            logger.info(f"Counting the rows of {known.count(None)} files in {self._inputs.folder.path}, once")

            def count(number: int) -> FileIndex:
                index = known[number] or counts.get(number)
                if index is None:
                    index = self._index_file(number)
                    counts.put(number, index)
                return index

            return self._in_threads(count, numbers)

    def _in_threads(self, call: Callable[[int], _Result], numbers: Sequence[int]) -> list[_Result]:
        if len(numbers) == 1:
            return [call(numbers[0])]
        with ThreadPoolExecutor(_THREADS) as threads:
            return list(threads.map(call, numbers))

    @property
    def _kind(self) -> str:
        """What the blocks depend on, beside the files."""
        options = [getattr(self._reader, name, None) for name in ("compression", "stream")]
        schema = "" if isinstance(self._reader, JsonlReader) else "/schema"
        return f"{self._reader._format}/{options}/{block_formats.GROUP_BYTES}{schema}"

    def _index_file(self, number: int) -> FileIndex:
        file = self._open(number, None)
        file.close()
        return replace(file.index, schema=self._schemas.setdefault(file.index.schema, file.index.schema))

    def _size_in_memory(self) -> int:
        """How large rows are in memory, in quarters of what the files say of them, by a sample of three files.

        Parquet counts repeated texts once, in dictionaries: rows of a long prompt can be a thousand times larger.
        """
        found = 4
        full = [number for number, index in enumerate(self._index) if sum(group.rows for group in index.groups)]
        for number in {full[0], full[len(full) // 2], full[-1]} if full else ():
            if isinstance(self._reader, JsonlReader):  # dicts are counted elsewhere
                break
            group = next(group for group in self._index[number].groups if group.rows)  # the file's first rows
            in_file = max(1, group.bytes)
            file = self._open(number, self._index[number])
            most = min(group.rows, _SAMPLED_ROWS, max(1, _SAMPLED_BYTES * group.rows // in_file))
            rows = file.read(0, most, None)
            file.close()
            found = max(found, -(-4 * _bytes_of(rows) * group.rows // (in_file * len(rows))))
        return found

    def _file(self, number: int) -> BlockFile:
        if self._process != os.getpid():  # a fork shares the places in these files with its parent
            self._opened = OrderedDict()
            self._process = os.getpid()
        file = self._opened.pop(number, None) or self._open(number, self._index[number])
        self._opened[number] = file
        if len(self._opened) > _OPEN_FILES:
            self._opened.popitem(last=False)[1].close()
        return file

    def _open(self, number: int, known: FileIndex | None) -> BlockFile:
        reader = self._reader
        name = self.names[number]
        if isinstance(reader, JsonlReader):
            return LineBlocks(reader, name, known, self._keys)
        if isinstance(reader, ParquetReader):
            return ParquetBlocks(reader.data_folder, name, known, self._size)
        if isinstance(reader, IpcReader):
            return ArrowBlocks(reader.data_folder, name, known, reader.stream)
        raise ConfigError(
            f"The rows of {type(reader).__name__} cannot be read in blocks. Use JsonlReader, ParquetReader or "
            "IpcReader of datatrove_ckpt.readers."
        )


def _bytes_of(table: Any) -> int:
    """With dictionaries decoded, as rows become."""
    import pyarrow.types as types

    columns = [column.cast(column.type.value_type) if types.is_dictionary(column.type) else column for column in table]
    return sum(int(column.nbytes) for column in columns)


def _cut(files: Sequence[FileIndex], size: int) -> Iterator[Block]:
    for file, index in enumerate(files):
        first = 0
        for rows, in_file in index.groups:
            in_memory = in_file * size // 4
            count = min(rows, max(-(-rows // MAX_ROWS), -(-in_memory // MAX_BYTES)))
            for part in range(count):
                start = rows * part // count
                end = rows * (part + 1) // count
                yield Block(file, first + start, end - start, in_memory * (end - start) // rows)
            first += rows
