"""Presents a dataset of the library ``datasets`` as files of a ``SeekingReader``: its shards.

A streaming dataset consists of shards, mostly files. A map-style dataset counts as one file, whose
rows can be indexed. As in datatrove's reader, a rank has every n-th shard if a stream has several,
else every n-th row.

A position in a shard is the number of the rank's rows before it. A resumed stream skips earlier
shards, and then rows (``IterableDataset.skip``), which the dataset reads. Only public parts of
``datasets`` are used, but not its ``state_dict``: a state that was taken in ``iter(batch_size)``
continues some rows early with another batch size.
"""

import copy
import os
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from datatrove.io import DataFolder
from fsspec import AbstractFileSystem
from xxhash import xxh3_64_hexdigest

from datatrove_ckpt.common import JsonObject, retrying
from datatrove_ckpt.errors import InputError
from datatrove_ckpt.readers.input_errors import explain_hub_error
from datatrove_ckpt.readers.inputs import InputFiles, fingerprint

_HUB_FILE = re.compile(r"hf://datasets/(?P<repository>[^@]+)@(?P<commit>[^/]+)/(?P<path>.+)")
_SAMPLED_ROWS = 32


class DatasetFiles:
    """Replaces datatrove's ``DataFolder`` in messages and in checks of settings."""

    fs = None
    storage_options: JsonObject = {}  # noqa: RUF012 (always empty)

    def __init__(self, dataset: str) -> None:
        self.path = dataset

    def is_local(self) -> bool:
        return False  # the files are known only once the dataset is open

    def isdir(self, path: str) -> bool:
        return True

    def resolve_paths(self, path: str) -> str:
        return path or f"the dataset {self.path}"


class DatasetInputs(InputFiles):
    """The shards of an opened dataset, or of one rank. A ``Dataset`` is one shard."""

    def __init__(
        self,
        folder: DatasetFiles,
        dataset: Any,
        files: Sequence[str] | None,
        token: str | bool | None,
        commit: str | None,
    ) -> None:
        """Names the shards.

        Args:
            dataset: a ``Dataset`` or ``IterableDataset``, which have no types.
            files: a stream's files; None: the dataset is map-style.
        """
        self.dataset = dataset
        self.token = token
        self.commit = commit
        self.is_map = files is None
        if files is None:
            self.urls = [f"{folder.path} (split {dataset.split})"]
            super().__init__(folder, self.urls)
        else:
            self.urls = list(files)
            count = max(1, dataset.num_shards)
            if len(files) != count:
                self.urls = [f"shard {number}" for number in range(count)]
            super().__init__(folder, _short_names(self.urls))
        self.shards = range(len(self.urls))

    def shard(self, rank: int, world_size: int) -> InputFiles:
        chosen = copy.copy(self)
        if len(self.names) <= 1:
            chosen.row_shard = (rank, world_size)
            return chosen
        chosen.names = self.names[rank::world_size]
        chosen.urls = self.urls[rank::world_size]
        chosen.shards = self.shards[rank::world_size]
        return chosen

    def info(self, index: int) -> JsonObject:
        if self.is_map:
            return {"size": int(self.dataset.data.nbytes)}
        name = self.names[index]
        if name not in self._infos:
            self._infos |= self._fetch_infos(index)
        return self._infos[name]

    def size_for_people(self, index: int) -> int:
        return self.size(index)  # the reader also needs the sizes, with all files of the hub

    @cached_property
    def _sample(self) -> str:
        """The hash of some rows of a map-style dataset."""
        count = len(self.dataset)
        sampled_rows = []
        if count:
            rows = sorted(
                {number * (count - 1) // (_SAMPLED_ROWS - 1) for number in range(_SAMPLED_ROWS)}
            )
            sampled_rows = self.dataset.with_format("arrow")[rows].to_pylist()
        columns = self.dataset.column_names
        return str(xxh3_64_hexdigest(repr((count, columns, sampled_rows)).encode()))

    def fingerprint(self, index: int) -> str:
        """Hashes some rows, or the file's beginning and end, or returns the hub's own hash."""
        if self.is_map:
            return self._sample
        info = self.info(index)
        hub_hash = (info.get("lfs") or {}).get("sha256") or info.get("blob_id")
        if hub_hash:
            return str(hub_hash)
        size = self.size(index)
        if size == 0:
            return ""
        fs, path = _file_system(_innermost(self.urls[index]), self.token)
        folder, _, name = path.rpartition("/")
        return fingerprint(DataFolder(folder or "/", fs=fs), name, size)

    def sample(self, index: int) -> str:
        return self.fingerprint(index)

    def _fetch_infos(self, index: int) -> dict[str, JsonObject]:
        """Looks up a shard; for a shard on the hub all shards in its folder, in one request.

        A shard without a file, or on a server that reports no size, has size 0.
        """
        name = self.names[index]
        url = _innermost(self.urls[index])
        if "/" not in url:
            return {name: {"size": 0}}
        match = _HUB_FILE.fullmatch(url)
        fs, path = _file_system(url, self.token)
        try:
            if match is None:
                return {name: retrying.READING.run(lambda: fs.info(path), url)}
            listed = retrying.READING.run(
                lambda: fs.ls(path.rpartition("/")[0], expand_info=False), url
            )
        except Exception as error:
            # An HTTP server may refuse HEAD.
            if match is None and not isinstance(error, FileNotFoundError):
                return {name: {"size": 0}}
            if match is None or (
                retrying.http_status(error) is None and not isinstance(error, OSError)
            ):
                raise
            raise InputError(
                explain_hub_error(match["repository"], error, match["commit"])
            ) from error
        infos = {f"hf://{info['name']}": info for info in listed}
        if url not in infos:
            raise FileNotFoundError(self.urls[index])
        paths = dict(zip(self.names, map(_innermost, self.urls), strict=True))
        return {name: infos[path] for name, path in paths.items() if path in infos}

    def batches(self, index: int, first: int, size: int) -> Iterator[dict[str, list[object]]]:
        """Yields the rank's rows of one shard from number ``first`` on, in batches of
        ``dataset.iter``.
        """
        number, shares = self.row_shard
        if self.is_map:
            share = self.dataset.shard(shares, number, contiguous=False)
            if first >= len(share):
                return iter(())
            rows = share.select(range(first, len(share)))
        else:
            from datasets.distributed import split_dataset_by_node

            shard = self.dataset.shard(self.dataset.num_shards, self.shards[index])
            rows = split_dataset_by_node(shard.skip(first * shares), number, shares)
        batches: Iterator[dict[str, list[object]]] = rows.iter(size)
        return batches


def commit_of(url: str) -> str | None:
    match = _HUB_FILE.fullmatch(_innermost(url))
    if match is None:
        return None
    return match["commit"]


def _innermost(url: str) -> str:
    return url.rpartition("::")[2]


def without_commit(url: str) -> str:
    """Removes the commit, because a new commit may leave the file unchanged."""
    return re.sub(r"(hf://datasets/[^@]+)@[^/]+/", r"\1/", url)


def _short_names(urls: Sequence[str]) -> list[str]:
    """Removes the common folder, because a copy elsewhere is the same input."""
    names = [without_commit(url) for url in urls]
    common = os.path.commonprefix([name[: name.rfind("/") + 1] for name in names])  # noqa: RUF071 (cut at "/" below)
    return [name[common.rfind("/") + 1 :] for name in names]


def _file_system(url: str, token: str | bool | None) -> tuple[AbstractFileSystem, str]:
    from fsspec.core import url_to_fs

    options = {}
    if url.startswith("hf://") and token is not None:
        options["token"] = token
    result: tuple[AbstractFileSystem, str] = url_to_fs(url, **options)
    return result
