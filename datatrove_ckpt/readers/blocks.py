"""Divides an input into blocks of rows, each of which can be read alone.

A block is a row group or record batch, or a slice of it, so that its memory does not grow with the
groups of a file.

The blocks depend on the files alone: not on the columns, or on the reader's ``limit`` and ``skip``.
``folder_reader`` and ``hub_reader`` find the reader for the files of a folder, or of a dataset.
"""

from __future__ import annotations

import fcntl
import os
import uuid
from base64 import b64decode, b64encode
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import orjson
from loguru import logger
from xxhash import xxh3_128_hexdigest

import datatrove_ckpt.readers.jsonl as jsonl
from datatrove_ckpt.common.formatting import plural
from datatrove_ckpt.common.lazy_pyarrow import pa
from datatrove_ckpt.common.threads import in_threads
from datatrove_ckpt.errors import ConfigError, InputError
from datatrove_ckpt.readers.block_file import (
    BlockFile,
    BlockRows,
    FileIndex,
    Group,
    ParquetBlocks,
    check_columns,
)
from datatrove_ckpt.readers.compressed import uncompressed
from datatrove_ckpt.readers.huggingface import HuggingFaceDatasetReader
from datatrove_ckpt.readers.inputs import InputFiles, Row, list_input
from datatrove_ckpt.readers.jsonl import JsonlReader
from datatrove_ckpt.readers.tables import IpcReader, ParquetReader

FilesReader = JsonlReader | ParquetReader | IpcReader
"""The readers whose rows can be counted, and read in any order."""

_KINDS: tuple[type[FilesReader], ...] = (ParquetReader, IpcReader, JsonlReader)
_READERS = {suffix: kind for kind in _KINDS for suffix in kind.suffixes.split()}


def folder_reader(folder: str | os.PathLike[str], glob_pattern: str | None) -> FilesReader:
    folder = os.fspath(folder)
    names = list_input(JsonlReader(folder, glob_pattern=glob_pattern)).names
    if not any(names):  # for a file, the listing has one empty name
        raise ConfigError(
            f"{folder!r} is no folder with files. Give a folder, and glob_pattern to choose files."
        )
    if "state.json" in names:  # written by save_to_disk; map() leaves cache-*.arrow behind
        return IpcReader(folder, glob_pattern="data-*.arrow")
    ending = _ending(names, folder)
    return _READERS[ending](folder, glob_pattern=glob_pattern or f"**/*{ending}*")


def hub_reader(path: str, name: str | None, split: str, revision: str | None) -> FilesReader:
    arguments = {"name": name, "split": split, "revision": revision}
    options = {key: value for key, value in arguments.items() if value is not None}
    dataset = HuggingFaceDatasetReader(
        path, dataset_options=options, streaming=True, text_key=None
    ).list_dataset()
    root = f"hf://datasets/{path}@{dataset.commit}"
    other_urls = [url for url in dataset.urls if not url.startswith(root)]
    if other_urls:
        raise ConfigError(
            f"{other_urls[0]} is not a file of a dataset on the hub. Use from_folder."
        )
    names = [url.removeprefix(f"{root}/") for url in dataset.urls]
    listed = b64encode("\n".join(names).encode()).decode()
    reader = _READERS[_ending(names, path)]
    return reader(root, paths_file=f"data:text/plain;base64,{listed}")


def _ending(names: Iterable[str], location: str) -> str:
    suffixes = _READERS.keys() & {uncompressed(name).suffix for name in names}
    if len(suffixes) > 1:
        suffixes.discard(".json")
    if len(suffixes) != 1:
        raise ConfigError(
            f"{location!r} has {' and '.join(sorted(suffixes)) or 'no'} files, and one kind of "
            f"{', '.join(_READERS)} is needed. Choose them by a pattern, or convert them."
        )
    return suffixes.pop()


# A larger row becomes a block.
MAX_ROWS = 2**16
MAX_BYTES = 2**24


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive rows of one file.

    Attributes:
        bytes: rough size of the rows in memory, with all columns.
    """

    file: int
    first: int
    rows: int
    bytes: int


class BlockInput:
    """The blocks of a reader's files, in their order.

    Args:
        reader: its ``limit``, ``skip`` and shuffle are ignored.

    Attributes:
        sequential: numbers of the compressed JSONL files, whose blocks need all earlier blocks.
        gives_dicts: whether the rows of a block are a list instead of a table.
        gives_views: whether rows keep a mapped file, or a whole record batch, in memory.

    Raises:
        ConfigError: a file is an Arrow stream with dictionaries.
        InputError: a file is damaged.
    """

    def __init__(self, reader: FilesReader) -> None:
        self._reader = reader
        self.inputs = reader.list_inputs(0, 1, None)
        self.names = self.inputs.names
        self._opened: OrderedDict[int, BlockFile] = OrderedDict()
        self._process = os.getpid()
        self._keys: set[str] = set()
        self._schemas: dict[bytes, bytes] = {}
        self._size = 4
        self._index = self._index_files()
        self.sequential = frozenset(
            number for number, file in enumerate(self._index) if file.sequential
        )
        self.gives_dicts = isinstance(reader, jsonl.JsonlReader)
        self.gives_views = isinstance(reader, IpcReader)
        self._size = self._size_in_memory()
        self._blocks = list(_cut(self._index, self._size))

    def __getitem__(self, index: int) -> Block:
        return self._blocks[index]

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks)

    def read(
        self,
        block: Block,
        columns: Sequence[str] | None = None,
        unified: UnifiedSchema | None = None,
    ) -> BlockRows:
        """Reads the rows of a block.

        Args:
            columns: names of columns; None: all. A line of JSONL without such a key has None.

        Raises:
            ConfigError: a file has no such column.
            InputError: the file is damaged.
            CheckpointMismatch: the file has changed since its rows were counted.
        """
        rows = self._file(block.file).read(block.first, block.rows, columns)
        if isinstance(rows, list):
            return self._of_columns(rows, columns, self.names[block.file])
        if unified is None:
            return rows
        return unified.apply(rows, self.names[block.file])

    def _of_columns(
        self, rows: list[Row | None], columns: Sequence[str] | None, name: str
    ) -> list[Row | None]:
        if columns is None:
            return rows
        if not self._keys.issuperset(columns):
            # A key must occur in the first block that is read. Later blocks may lack rare keys.
            keys = {key: None for row in rows if row for key in row}
            check_columns([*keys, *self._keys.difference(keys)], columns, name)
            self._keys.update(columns)
        return [row and {column: row.get(column) for column in columns} for row in rows]

    def unified(self, columns: Sequence[str] | None) -> UnifiedSchema | None:
        if self.gives_dicts:
            return None
        schemas: dict[bytes, str] = {}
        for name, file in zip(self.names, self._index, strict=True):
            if file.rows:
                schemas.setdefault(file.schema, name)
        return UnifiedSchema(schemas.items(), columns)

    def expect(self, file: int, blocks: Iterable[Block]) -> None:
        """Announces the blocks that are read next, so that small blocks are read together."""
        opened = self._file(file)
        opened.expected = sorted({opened.part_of(block.first)[0] for block in blocks})

    def drop_buffers(self, file: int) -> None:
        self._file(file).drop_buffers()

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_opened": OrderedDict()}

    def _index_files(self) -> list[FileIndex]:
        numbers = range(len(self.names))
        # The footers of Parquet files have the rows.
        if isinstance(self._reader, ParquetReader) and self._reader.data_folder.is_local():
            return in_threads(self._index_file, numbers)
        options = [
            getattr(self._reader, name, None) for name in ("compression", "stream", "encoding")
        ]
        kind = f"{self._reader.format}/{options}/{jsonl.PART_BYTES}"
        counts = RowCounts(self.inputs, kind)
        self._counts = counts
        indexes = in_threads(counts.get, numbers)
        if None not in indexes:
            return [index for index in indexes if index is not None]
        logger.info(
            f"One process counts the rows of {plural(indexes.count(None), 'file')} in "
            f"{self.inputs.folder.path}, once."
        )
        with counts.counting():

            def count(number: int) -> FileIndex:
                index = indexes[number] or counts.get(number)
                if index is None:
                    index = self._index_file(number)
                    counts.put(number, index)
                return index

            return in_threads(count, numbers)

    def _index_file(self, number: int) -> FileIndex:
        with closing(self._reader.open_file(self.names[number])) as file:
            index = file.index()
        return replace(index, schema=self._schemas.setdefault(index.schema, index.schema))

    def _size_in_memory(self) -> int:
        """Returns the size of rows in memory, in quarters of their file size, from a sample of
        three files.

        Parquet counts repeated texts once: rows of a long prompt can be a thousand times larger.
        """
        full = [number for number, index in enumerate(self._index) if index.rows]
        if self.gives_dicts or not full:
            return 4
        size = 4
        for number in {full[0], full[len(full) // 2], full[-1]}:
            group = next(group for group in self._index[number].groups if group.rows)
            in_file = max(1, group.bytes)
            sampled = max(1, 2**22 * group.rows // in_file)
            with closing(self._open(number)) as file:
                rows = file.read(0, min(group.rows, 64, sampled))
            size = max(size, -(-4 * _decoded(rows).nbytes * group.rows // (in_file * len(rows))))
        return size

    def _file(self, number: int) -> BlockFile:
        if self._process != os.getpid():  # a fork shares the offsets of these files with its parent
            self._opened = OrderedDict()
            self._process = os.getpid()
        file = self._opened.pop(number, None) or self._open(number)
        self._opened[number] = file
        if len(self._opened) > 32:
            self._opened.popitem(last=False)[1].close()
        return file

    def _open(self, number: int) -> BlockFile:
        file = self._reader.open_file(self.names[number])
        if isinstance(file, ParquetBlocks):
            file.size = self._size
        file.use(self._index[number])
        return file


def _cut(files: Sequence[FileIndex], size: int) -> Iterator[Block]:
    for file, index in enumerate(files):
        first = 0
        for rows, in_file, _ in index.groups:
            in_memory = in_file * size // 4
            count = min(rows, max(-(-rows // MAX_ROWS), -(-in_memory // MAX_BYTES)))
            for part in range(count):
                start = rows * part // count
                end = rows * (part + 1) // count
                yield Block(file, first + start, end - start, in_memory * (end - start) // rows)
            first += rows


_VERSION = 4
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "created")
"""Names of file systems for the time of the last change."""


class RowCounts:
    """Stores the numbers of rows of files, so that the next process need not read the files again.

    Counting JSONL reads all of it. The counts of each file are stored in a small file in the folder
    ``$DATATROVE_CKPT_CACHE`` (empty: no counts are stored), or else ``datatrove-ckpt/rows`` in the
    user's cache folder. The small file's name changes with size, time of change and sample of the
    counted file (``InputFiles.sample``). Reading notices a wrong count. The files may be deleted at
    any time.

    Args:
        kind: format and settings that affect the counts.
    """

    def __init__(self, inputs: InputFiles, kind: str) -> None:
        self._inputs = inputs
        self._source = f"{_VERSION}/{kind}/{inputs.folder.resolve_paths('')}"
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = os.environ.get("DATATROVE_CKPT_CACHE", str(cache / "datatrove-ckpt/rows"))
        self._folder = Path(folder) if folder else None

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Lets one process at a time count, if the file system can lock."""
        if self._folder is None:
            yield
            return
        name = xxh3_128_hexdigest(self._source.encode())
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            lock = (self._folder / f"{name}.lock").open("a")
        except OSError as error:
            logger.warning(
                f"The rows that are counted cannot be kept, so the next start counts again: {error}"
            )
            self._folder = None
            yield
            return
        with lock:
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def get(self, number: int) -> FileIndex | None:
        path = self._path(number)
        if path is None:
            return None
        with suppress(OSError, KeyError, TypeError, ValueError):
            fields = orjson.loads(path.read_bytes())
            groups = tuple(Group(*group) for group in fields["groups"])
            return FileIndex(groups, fields["sequential"], b64decode(fields["schema"]))
        return None

    def put(self, number: int, index: FileIndex) -> None:
        path = self._path(number)
        if path is None:
            return
        fields = asdict(index) | {"schema": b64encode(index.schema).decode()}
        # A file that was damaged is replaced. Nodes may share the folder, and process ids.
        part = path.with_suffix(f".{uuid.uuid4().hex}")
        with suppress(OSError):
            part.write_bytes(orjson.dumps(fields, list))
            part.replace(path)

    def _path(self, number: int) -> Path | None:
        info = self._inputs.info(number)
        changed = next((str(info[name]) for name in _TIMES if info.get(name)), "")
        sample = self._inputs.sample(number)
        if self._folder is None or not (changed or sample):
            return None
        key = (self._inputs.names[number], str(self._inputs.size(number)), changed, sample)
        return self._folder / f"{xxh3_128_hexdigest('/'.join((self._source, *key)).encode())}.json"


class UnifiedSchema:
    """One schema for all files of an input, whose column types may differ.

    If only the rows of a shuffled window were unified, a row's type would depend on its neighbours,
    and on where a run was resumed. So the types of all files count.

    Args:
        columns: columns that are read and that all files must have; None: all columns of all files.

    Raises:
        ConfigError: a file lacks a column, or the types of a column cannot be unified.
    """

    def __init__(self, schemas: Iterable[tuple[bytes, str]], columns: Sequence[str] | None) -> None:
        unified = pa.schema([])
        for serialized, name in schemas:
            file_schema = pa.ipc.read_schema(pa.py_buffer(serialized))
            needed = file_schema.names if columns is None else columns
            check_columns(file_schema.names, needed, name)
            schema = pa.schema([(column, file_schema.field(column).type) for column in needed])
            if not unified.names:
                unified = schema
            elif schema != unified:
                try:
                    unified = pa.unify_schemas(
                        [_plain_schema(unified), _plain_schema(schema)],
                        promote_options="permissive",
                    )
                except pa.ArrowException as error:
                    raise ConfigError(
                        f"The input file {name!r} and files before it have no common type: "
                        f"{error}. Write the files with one type, choose other columns, or read "
                        "without shuffle()."
                    ) from error
        self._schema = unified

    def apply(self, table: pa.Table, name: str) -> pa.Table:
        schema = self._schema
        if table.column_names == schema.names and table.schema.types == schema.types:
            return table
        # Unlike a cast, this adds missing fields of a struct.
        tables = [_decoded(table), schema.empty_table()]
        try:
            return pa.concat_tables(tables, promote_options="permissive").select(schema.names)
        except pa.ArrowException as error:
            raise InputError(
                f"The input file {name!r} has a value that does not fit the types of all files: "
                f"{error}. Write the files with one type, or read without shuffle()."
            ) from error


def _decoded(table: pa.Table) -> pa.Table:
    return table.cast(_plain_schema(table.schema))


def _plain_schema(schema: pa.Schema) -> pa.Schema:
    views = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}
    fields = []
    for field in schema:
        kind = field.type
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
        fields.append((field.name, views.get(kind, kind)))
    return pa.schema(fields)
