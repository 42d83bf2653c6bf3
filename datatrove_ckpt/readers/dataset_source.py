"""An opened dataset of the library ``datasets`` as input of a ``SeekingReader``: its shards are the files.

A streaming dataset consists of shards, which are files as a rule. A map-style dataset is one file, whose rows can be
indexed. The ranks share both as datatrove's reader does: every n-th shard if a stream has several, else every n-th row.

A place in a shard is the number of the rank's rows before it. A stream is entered there by leaving out its earlier
shards, the earlier row groups of a Parquet shard, and then the earlier rows of the tables that the dataset's own
builder makes. So each row goes through the same code as in datatrove's reader: casts, media, missing columns.

``IterableDataset.load_state_dict`` would read the shard of the position from its beginning: of Parquet, too.
"""

from __future__ import annotations

import copy
import itertools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from datatrove.io import DataFolder
from loguru import logger
from xxhash import xxh3_64_hexdigest

from datatrove_ckpt.common import retrying
from datatrove_ckpt.common.retrying import http_status
from datatrove_ckpt.errors import InputError
from datatrove_ckpt.readers.input_errors import explain_hub_error
from datatrove_ckpt.readers.inputs import Inputs, fingerprint
from datatrove_ckpt.readers.tables import take_rows

_HUB_FILE = re.compile(r"hf://datasets/(?P<repository>[^@]+)@(?P<commit>[^/]+)/(?P<path>.+)")
Count = Callable[[int], object]
_LISTS_OF_NAMES = ("original_files", "base_files", "files", "tar_paths", "lance_files_paths")
_SAMPLED_ROWS = 32


class DatasetFiles:
    """Stands for datatrove's ``DataFolder`` where messages and checks of settings ask for the folder of an input."""

    fs: Any = None
    storage_options: dict[str, Any] = {}  # noqa: RUF012 (always empty)

    def __init__(self, dataset: str) -> None:
        self.path = dataset

    def is_local(self) -> bool:
        return False  # the dataset knows its files, nobody else may list them

    def isdir(self, path: str) -> bool:
        return True

    def resolve_paths(self, path: str) -> str:
        return path or f"the dataset {self.path}"


class DatasetInputs(Inputs):
    """The shards of an opened dataset, or those of one rank.

    Args:
        dataset: a ``datasets.IterableDataset``, or a ``datasets.Dataset`` as one shard.
        token: for the hub; None: that of the environment.
    """

    def __init__(self, folder: DatasetFiles, dataset: Any, token: str | bool | None, commit: str | None) -> None:
        self.dataset = dataset
        self.token = token
        self.commit = commit
        self.is_map = not hasattr(dataset, "_ex_iterable")
        self._sample: str | None = None
        if self.is_map:
            self.urls = [f"{folder.path} (split {dataset.split})"]
            super().__init__(folder, self.urls)
        else:
            self.urls = _shard_names(dataset)
            super().__init__(folder, _short_names(self.urls))
        self.shards = list(range(len(self.urls)))

    def shard(self, rank: int, world_size: int) -> Inputs:
        """Every ``world_size``-th shard, from ``rank`` on."""
        chosen = copy.copy(self)
        numbers = range(len(self.urls))[rank::world_size]
        chosen.names = [self.names[number] for number in numbers]
        chosen.urls = [self.urls[number] for number in numbers]
        chosen.shards = [self.shards[number] for number in numbers]
        chosen._infos = {new: self._infos[old] for new, old in enumerate(numbers) if old in self._infos}
        return chosen

    def of_rank(self, rank: int, world_size: int) -> Inputs:
        """What datatrove's reader reads in one rank: every n-th shard of a stream with several, else every n-th row."""
        if len(self.names) > 1:
            if rank >= len(self.names):
                logger.warning(f"The dataset has {len(self.names)} shards, so rank {rank} of {world_size} gets none.")
            return self.shard(rank, world_size)
        shared = copy.copy(self)
        shared.row_shard = (rank, world_size)
        return shared

    def info(self, index: int) -> dict[str, Any]:
        """Size in bytes, and what else is known. All shards of the hub are looked up in one go."""
        if self.is_map:
            return {"size": int(self.dataset.data.nbytes)}
        if index not in self._infos:
            self._infos |= self._look_up(index)
        return self._infos[index]

    def size_for_people(self, index: int) -> int:
        return self.size(index)  # of the hub's files, the reader looks up all in one go anyway

    def fingerprint(self, index: int, size: int, whole: bool) -> str:
        """A hash of the content: of some rows, or of the file's beginning and end, or the hub's own."""
        if self.is_map:
            if self._sample is None:
                self._sample = _sample_rows(self.dataset)
            return self._sample
        info = self.info(index)
        known = (info.get("lfs") or {}).get("sha256") or info.get("blob_id")
        if known:
            return str(known)
        if size == 0:
            return ""
        return _sample_file(self.urls[index], size, self.token)

    def sample(self, index: int) -> str:
        return self.fingerprint(index, self.size(index), whole=True)

    def _look_up(self, index: int) -> dict[int, dict[str, Any]]:
        """Of a shard on the hub, what is known of all shards in its folder, in one go.

        A shard without a file, or on a server that tells no size, has size 0.
        """
        paths = {number: _innermost(url) for number, url in enumerate(self.urls)}
        url = paths[index]
        if "/" not in url:
            return {index: {"size": 0}}
        found = _HUB_FILE.fullmatch(url)
        fs, path = _file_system(url, self.token)
        try:
            if found is None:
                return {index: retrying.READING.run(lambda: fs.info(path), url)}
            listed = retrying.READING.run(lambda: fs.ls(path.rpartition("/")[0], expand_info=False), url)
        except Exception as error:
            if found is None and not isinstance(error, FileNotFoundError):  # an HTTP server may refuse HEAD
                return {index: {"size": 0}}
            if found is None or (http_status(error) is None and not isinstance(error, OSError)):
                raise
            raise InputError(explain_hub_error(found["repository"], error, found["commit"])) from error
        infos = {f"hf://{info['name']}": info for info in listed}
        if url not in infos:
            raise FileNotFoundError(self.urls[index])
        return {number: infos[path] for number, path in paths.items() if path in infos}

    # Reading -------------------------------------------------------------------------------------------------------

    def batches(self, index: int, first: int, size: int, count: Count) -> Iterator[dict[str, list[Any]]]:
        """The rank's rows of one shard from its ``first``-th on, in batches as ``dataset.iter`` makes them.

        ``count`` gets the number of rows of the whole shard, if that is known before they are read.
        """
        number, shares = self.row_shard
        if self.is_map:
            count(len(self.dataset))
            share = self.dataset.shard(shares, number, contiguous=False)
            if first >= len(share):
                return iter(())
            rows = share
            if first:
                rows = share.select(range(first, len(share)))
        else:
            rows = _from_row(self.dataset, self.shards[index], number + first * shares, shares, count)
        found: Iterator[dict[str, list[Any]]] = rows.iter(size)
        return found


def commit_of(url: str) -> str | None:
    """The commit in the URL of a file on the hub, as ``datasets`` makes it."""
    found = _HUB_FILE.fullmatch(_innermost(url))
    if found is None:
        return None
    return found["commit"]


def _innermost(url: str) -> str:
    """Of "zip://a::hf://b": the file that is stored, hf://b."""
    return url.rpartition("::")[2]


def without_commit(url: str) -> str:
    """A new commit that leaves a file as it is does not change the input."""
    return re.sub(r"(hf://datasets/[^@]+)@[^/]+/", r"\1/", url)


def _short_names(urls: Sequence[str]) -> list[str]:
    """Without the folder in which all are: a copy elsewhere is the same input."""
    names = [without_commit(url) for url in urls]
    common = os.path.commonprefix([name[: name.rfind("/") + 1] for name in names])  # noqa: RUF071 (cut at "/" below)
    return [name[common.rfind("/") + 1 :] for name in names]


def _shard_names(dataset: Any) -> list[str]:
    count = max(1, dataset.num_shards)
    lists = getattr(dataset._ex_iterable, "kwargs", {})
    for name in _LISTS_OF_NAMES:
        found = _paths(lists.get(name) or [])
        if len(found) == count or lists.get(name) == []:
            return found
    return [f"shard {number}" for number in range(count)]


def _paths(found: Sequence[Any]) -> list[str]:
    """The paths of files; empty if they are something else. Until version 4.5 there is an iterable for each."""
    paths = []
    for entry in found:
        files = [entry]
        if type(entry).__name__ == "FilesIterable":
            files = list(entry)
        if len(files) == 1 and isinstance(files[0], str):
            paths.append(files[0])
    return paths


# What is known of a file ---------------------------------------------------------------------------------------------


def _sample_file(url: str, size: int, token: str | bool | None) -> str:
    fs, path = _file_system(_innermost(url), token)
    folder, _, name = path.rpartition("/")
    return fingerprint(DataFolder(folder or "/", fs=fs), name, size, whole=True)


def _file_system(url: str, token: str | bool | None) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    options = {}
    if url.startswith("hf://") and token is not None:
        options["token"] = token
    found: tuple[Any, str] = url_to_fs(url, **options)
    return found


def _sample_rows(dataset: Any) -> str:
    """A hash of the number of rows, the columns, and some rows; the same wherever and however they are stored."""
    count = len(dataset)
    content = []
    if count:
        rows = sorted({number * (count - 1) // (_SAMPLED_ROWS - 1) for number in range(_SAMPLED_ROWS)})
        content = dataset.with_format("arrow")[rows].to_pylist()
    return str(xxh3_64_hexdigest(repr((count, dataset.column_names, content)).encode()))


# A stream from a row on ----------------------------------------------------------------------------------------------


def _from_row(dataset: Any, shard: int, first: int, step: int, number_of_rows: Count) -> Any:
    """An ``IterableDataset`` of the rows ``first``, ``first + step``, ... of one shard."""
    count = max(1, dataset.num_shards)
    source = dataset._ex_iterable.shard_data_sources(num_shards=count, index=shard, contiguous=False)
    rest = object.__new__(type(dataset))
    rest.__dict__ = dict(dataset.__dict__)  # copy.copy would share it
    rest._ex_iterable = _Rows(source, first, step, number_of_rows)
    return rest


def _parquet_tables(source: Any, first: int, count: Count) -> Iterator[tuple[int, Any]] | None:
    """The tables of a Parquet shard as the builder of ``datasets`` reads it, without row groups before row ``first``.

    None if the shard is of another format, or if filters decide which rows it has. The builder's own argument for the
    row groups, ``row_groups_list``, is ignored by some of its versions.
    """
    arguments = getattr(source, "kwargs", {})
    builder = getattr(getattr(source, "generate_tables_fn", None), "__self__", None)
    if type(builder).__module__ != "datasets.packaged_modules.parquet.parquet" or builder is None:
        return None
    names = _paths(arguments.get("files") or [])
    config = builder.config
    usual = config.filters is None and getattr(config, "on_bad_files", "error") == "error"
    if len(names) != 1 or not usual or arguments.get("row_groups_list", [None]) != [None]:
        return None
    return _read_parquet(builder, names[0], first, count)


def _read_parquet(builder: Any, name: str, first: int, count: Count) -> Iterator[tuple[int, Any]]:
    """The number of a table's first row, and the table."""
    import pyarrow as pa
    import pyarrow.dataset as ds
    from datasets.download.download_config import DownloadConfig
    from datasets.utils.file_utils import xopen

    config = builder.config
    scan = getattr(config, "fragment_scan_options", None)  # since version 4.2
    file_format = ds.ParquetFileFormat(default_fragment_scan_options=scan)
    download = DownloadConfig(token=builder.token, storage_options=builder.storage_options)
    with xopen(name, "rb", download_config=download) as file:
        fragment = file_format.make_fragment(file)
        sizes = [group.num_rows for group in fragment.row_groups]
        count(sum(sizes))
        start = 0
        groups = [number for number, size in enumerate(sizes) if size]
        while groups and start + sizes[groups[0]] <= first:
            start += sizes[groups.pop(0)]
        if not groups:
            return
        batches = fragment.subset(row_group_ids=groups).to_batches(
            batch_size=config.batch_size or sizes[groups[0]],
            columns=config.columns,
            batch_readahead=0,
            fragment_readahead=0,
        )
        for batch in batches:
            yield start, builder._cast_table(pa.Table.from_batches([batch]))
            start += batch.num_rows


class _Rows:
    """Rows of an examples iterable of ``datasets``, and itself one: the part that ``IterableDataset`` calls."""

    num_shards = 1

    def __init__(self, source: Any, first: int, step: int, count: Count) -> None:
        self._source = source
        self._first = first
        self._step = step
        self._count = count

    @property
    def iter_arrow(self) -> Callable[[], Iterator[tuple[Any, Any]]] | None:
        if not self._source.iter_arrow:
            return None
        return self._tables

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def _init_state_dict(self) -> dict[str, Any]:
        return {}  # positions are counted by the reader

    def state_dict(self) -> dict[str, Any]:
        return {}

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return itertools.islice(iter(self._source), self._first, None, self._step)

    def _tables(self) -> Iterator[tuple[Any, Any]]:
        row = self._first
        for number, (start, table) in enumerate(self._source_tables()):
            length = len(table)
            if row < start + length:
                rows = range(row - start, length, self._step)
                row += len(rows) * self._step
                if self._step == 1:
                    yield number, table.slice(rows[0])
                else:
                    yield number, take_rows(table, rows)

    def _source_tables(self) -> Iterator[tuple[int, Any]]:
        """The number of a table's first row, and the table."""
        parquet = _parquet_tables(self._source, self._first, self._count)
        if parquet is not None:
            yield from parquet
            return
        start = 0
        for _, table in self._source.iter_arrow():
            yield start, table
            start += len(table)
