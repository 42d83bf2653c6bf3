"""A dataset of the library ``datasets`` as input of a ``SeekingReader``: its shards are the files.

A streaming dataset consists of shards, mostly files. A map-style dataset is one file, whose rows
can be indexed. As in datatrove's reader, a rank has every n-th shard if a stream has several, else
every n-th row.

A place in a shard is the number of the rank's rows before it. A resumed stream skips earlier
shards, earlier row groups of Parquet, and then rows of the dataset's own builder, so casts, media
and missing columns are as in datatrove's reader. ``IterableDataset.load_state_dict`` would read the
shard from its beginning.
"""

from __future__ import annotations

import copy
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from datatrove.io import DataFolder
from fsspec import AbstractFileSystem
from loguru import logger
from xxhash import xxh3_64_hexdigest

from datatrove_ckpt.common import JsonObject, retrying
from datatrove_ckpt.common.retrying import http_status
from datatrove_ckpt.errors import InputError
from datatrove_ckpt.readers.input_errors import explain_hub_error
from datatrove_ckpt.readers.inputs import Inputs, fingerprint
from datatrove_ckpt.readers.table_files import take_rows

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset, IterableDataset
    from datasets.iterable_dataset import _BaseExamplesIterable
    from datasets.packaged_modules.parquet.parquet import Parquet

    Table = tuple[int, pa.Table]
    """The number of a table's first row, and the table."""

_HUB_FILE = re.compile(r"hf://datasets/(?P<repository>[^@]+)@(?P<commit>[^/]+)/(?P<path>.+)")
Count = Callable[[int], object]
_LISTS_OF_NAMES = ("original_files", "base_files", "files", "tar_paths", "lance_files_paths")
_SAMPLED_ROWS = 32


class DatasetFiles:
    """Stands for datatrove's ``DataFolder`` in messages and in checks of settings."""

    fs = None
    storage_options: JsonObject = {}  # noqa: RUF012 (always empty)

    def __init__(self, dataset: str) -> None:
        self.path = dataset

    def is_local(self) -> bool:
        return False  # only the dataset knows its files

    def isdir(self, path: str) -> bool:
        return True

    def resolve_paths(self, path: str) -> str:
        return path or f"the dataset {self.path}"


class DatasetInputs(Inputs):
    """The shards of an opened dataset, or those of one rank. A ``Dataset`` is one shard."""

    def __init__(
        self,
        folder: DatasetFiles,
        dataset: Dataset | IterableDataset,
        token: str | bool | None,
        commit: str | None,
    ) -> None:
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
        chosen = copy.copy(self)
        if len(self.names) <= 1:
            chosen.row_shard = (rank, world_size)
            return chosen
        if rank >= len(self.names):
            logger.warning(
                f"The dataset has {len(self.names)} shards, so task {rank} of {world_size} gets "
                "none."
            )
        chosen.names = self.names[rank::world_size]
        chosen.urls = self.urls[rank::world_size]
        chosen.shards = self.shards[rank::world_size]
        return chosen

    def info(self, index: int) -> JsonObject:
        if self.is_map:
            return {"size": int(self.dataset.data.nbytes)}
        name = self.names[index]
        if name not in self._infos:
            self._infos |= self._look_up(index)
        return self._infos[name]

    def size_for_people(self, index: int) -> int:
        return self.size(index)  # of the hub's files, the reader looks up all in one go anyway

    def fingerprint(self, index: int, size: int, whole: bool) -> str:
        """Hashes some rows, or the file's beginning and end, or returns the hub's own hash."""
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
        fs, path = _file_system(_innermost(self.urls[index]), self.token)
        folder, _, name = path.rpartition("/")
        return fingerprint(DataFolder(folder or "/", fs=fs), name, size, whole=True)

    def sample(self, index: int) -> str:
        return self.fingerprint(index, self.size(index), whole=True)

    def _look_up(self, index: int) -> dict[str, JsonObject]:
        """Looks up a shard, and with a shard on the hub all shards in its folder, in one request.

        A shard without a file, or on a server that tells no size, has size 0.
        """
        name = self.names[index]
        url = _innermost(self.urls[index])
        if "/" not in url:
            return {name: {"size": 0}}
        found = _HUB_FILE.fullmatch(url)
        fs, path = _file_system(url, self.token)
        try:
            if found is None:
                return {name: retrying.READING.run(lambda: fs.info(path), url)}
            listed = retrying.READING.run(
                lambda: fs.ls(path.rpartition("/")[0], expand_info=False), url
            )
        except Exception as error:
            # An HTTP server may refuse HEAD.
            if found is None and not isinstance(error, FileNotFoundError):
                return {name: {"size": 0}}
            if found is None or (http_status(error) is None and not isinstance(error, OSError)):
                raise
            raise InputError(
                explain_hub_error(found["repository"], error, found["commit"])
            ) from error
        infos = {f"hf://{info['name']}": info for info in listed}
        if url not in infos:
            raise FileNotFoundError(self.urls[index])
        paths = dict(zip(self.names, map(_innermost, self.urls), strict=True))
        return {name: infos[path] for name, path in paths.items() if path in infos}

    def batches(
        self, index: int, first: int, size: int, count: Count
    ) -> Iterator[dict[str, list[object]]]:
        """Yields the rank's rows of one shard from its ``first``-th on, in batches as
        ``dataset.iter`` makes them.

        ``count`` gets the number of rows of the whole shard, if that is known before they are read.
        """
        number, shares = self.row_shard
        if self.is_map:
            count(len(self.dataset))
            share = self.dataset.shard(shares, number, contiguous=False)
            if first >= len(share):
                return iter(())
            rows = share.select(range(first, len(share)))
        else:
            rows = _from_row(
                self.dataset, self.shards[index], number + first * shares, shares, count
            )
        found: Iterator[dict[str, list[object]]] = rows.iter(size)
        return found


def commit_of(url: str) -> str | None:
    found = _HUB_FILE.fullmatch(_innermost(url))
    if found is None:
        return None
    return found["commit"]


def _innermost(url: str) -> str:
    return url.rpartition("::")[2]


def without_commit(url: str) -> str:
    """Removes the commit, because a new commit may leave a file as it is."""
    return re.sub(r"(hf://datasets/[^@]+)@[^/]+/", r"\1/", url)


def _short_names(urls: Sequence[str]) -> list[str]:
    """Removes the common folder, because a copy elsewhere is the same input."""
    names = [without_commit(url) for url in urls]
    common = os.path.commonprefix([name[: name.rfind("/") + 1] for name in names])  # noqa: RUF071 (cut at "/" below)
    return [name[common.rfind("/") + 1 :] for name in names]


def _shard_names(dataset: IterableDataset) -> list[str]:
    count = max(1, dataset.num_shards)
    lists = getattr(dataset._ex_iterable, "kwargs", {})
    for name in _LISTS_OF_NAMES:
        found = _paths(lists.get(name) or [])
        if len(found) == count or lists.get(name) == []:
            return found
    return [f"shard {number}" for number in range(count)]


def _paths(found: Sequence[object]) -> list[str]:
    paths = []
    for entry in found:
        files = [entry]
        # Before version 4.5.
        if type(entry).__name__ == "FilesIterable" and isinstance(entry, Iterable):
            files = list(entry)
        if len(files) == 1 and isinstance(files[0], str):
            paths.append(files[0])
    return paths


def _file_system(url: str, token: str | bool | None) -> tuple[AbstractFileSystem, str]:
    from fsspec.core import url_to_fs

    options = {}
    if url.startswith("hf://") and token is not None:
        options["token"] = token
    found: tuple[AbstractFileSystem, str] = url_to_fs(url, **options)
    return found


def _sample_rows(dataset: Dataset) -> str:
    count = len(dataset)
    content = []
    if count:
        rows = sorted(
            {number * (count - 1) // (_SAMPLED_ROWS - 1) for number in range(_SAMPLED_ROWS)}
        )
        content = dataset.with_format("arrow")[rows].to_pylist()
    return str(xxh3_64_hexdigest(repr((count, dataset.column_names, content)).encode()))


def _from_row(
    dataset: IterableDataset, shard: int, first: int, step: int, number_of_rows: Count
) -> IterableDataset:
    count = max(1, dataset.num_shards)
    source = dataset._ex_iterable.shard_data_sources(
        num_shards=count, index=shard, contiguous=False
    )
    rest = object.__new__(type(dataset))
    rest.__dict__ = dict(dataset.__dict__)  # copy.copy would share it
    rest._ex_iterable = _Rows(source, first, step, number_of_rows)
    return rest


def _parquet_tables(
    source: _BaseExamplesIterable, first: int, count: Count
) -> Iterator[Table] | None:
    """Reads a Parquet shard as the builder of ``datasets`` does, without row groups before row
    ``first``.

    None for another format, or with filters on rows. Some versions of the builder ignore its
    argument ``row_groups_list``.
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


def _read_parquet(builder: Parquet, name: str, first: int, count: Count) -> Iterator[Table]:
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


@dataclass(eq=False)
class _Rows:
    num_shards = 1
    _source: _BaseExamplesIterable
    _first: int
    _step: int
    _count: Count

    @property
    def iter_arrow(self) -> Callable[[], Iterator[Table]] | None:
        if not self._source.iter_arrow:
            return None
        return self._tables

    def __getattr__(self, name: str) -> object:
        return getattr(self._source, name)

    def state_dict(self) -> JsonObject:
        return {}  # positions are counted by the reader

    _init_state_dict = state_dict

    def __iter__(self) -> Iterator[tuple[object, object]]:
        return itertools.islice(iter(self._source), self._first, None, self._step)

    def _tables(self) -> Iterator[Table]:
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

    def _source_tables(self) -> Iterator[Table]:
        parquet = _parquet_tables(self._source, self._first, self._count)
        if parquet is not None:
            yield from parquet
            return
        start = 0
        for _, table in self._source.iter_arrow():
            yield start, table
            start += len(table)
