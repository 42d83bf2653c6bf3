"""HuggingFaceDatasetReader seeks by shard and row in a stream, by index in a map-style dataset.

A ``FilePosition`` is (rows of the rank in this shard so far,). A resume begins at a whole batch of
the shard, counted from its beginning: if the dataset has no features, missing columns are filled
within a batch.

As in datatrove's reader, a rank has every n-th shard if a stream has several, else every n-th row.

A resumed stream skips earlier shards, and then rows (``IterableDataset.skip``), which the dataset
reads. Only public parts of ``datasets`` are used, but not its ``state_dict``: a state that was
taken in ``iter(batch_size)`` continues some rows early with another batch size.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import repeat
from pathlib import Path
from types import MethodType
from typing import Any

import orjson
from datatrove.data import Document
from datatrove.io import DataFolder
from datatrove.pipeline.readers import huggingface
from fsspec import AbstractFileSystem
from xxhash import xxh3_64_hexdigest

from datatrove_ckpt.common import JsonObject, retrying
from datatrove_ckpt.errors import CkptError, ConfigError, InputError
from datatrove_ckpt.readers.base import SeekingReader
from datatrove_ckpt.readers.compressed import naming_damage
from datatrove_ckpt.readers.empty_input import NoDocuments
from datatrove_ckpt.readers.inputs import (
    FilePosition,
    FileRead,
    InputFiles,
    ReaderState,
    Row,
    RowBlock,
    explain_hub_error,
    fingerprint,
    is_commit,
    job_revisions,
    one_line,
    shorten,
)
from datatrove_ckpt.readers.shard_record import plain_settings

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
        count = len(self.dataset)
        sampled_rows = []
        if count:
            rows = sorted(
                {number * (count - 1) // (_SAMPLED_ROWS - 1) for number in range(_SAMPLED_ROWS)}
            )
            sampled_rows = self.dataset.with_format("arrow")[rows].to_pylist()
        columns = self.dataset.column_names
        return xxh3_64_hexdigest(repr((count, columns, sampled_rows)).encode())

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
        if match is None:
            try:
                return {name: retrying.READING.run(lambda: fs.info(path), url)}
            except FileNotFoundError:
                raise
            except Exception:  # an HTTP server may refuse HEAD
                return {name: {"size": 0}}
        try:
            folder = path.rpartition("/")[0]
            listed = retrying.READING.run(lambda: fs.ls(folder, expand_info=False), url)
        except Exception as error:
            dataset = f"The dataset {match['repository']!r}"
            raise InputError(explain_hub_error(dataset, error, match["commit"])) from error
        infos = {f"hf://{info['name']}": info for info in listed}
        if url not in infos:
            raise FileNotFoundError(self.urls[index])
        paths = dict(zip(self.names, map(_innermost, self.urls), strict=True))
        return {name: infos[path] for name, path in paths.items() if path in infos}

    def batches(self, index: int, first: int, size: int) -> Iterator[dict[str, list[object]]]:
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


# Arguments of load_dataset that choose the rows; the others choose how to store them.
_CHOOSING = ("name", "split", "data_dir", "data_files", "revision", "columns", "filters")
_FILES = ("data_dir", "data_files")
# A stream is not stored.
_FOR_STORAGE = ("num_proc", "keep_in_memory", "save_infos", "verification_mode")


class HuggingFaceDatasetReader(SeekingReader, huggingface.HuggingFaceDatasetReader):  # type: ignore[misc, unused-ignore]
    """datatrove's ``HuggingFaceDatasetReader``, with its arguments and a position on each document.

    ``shuffle_files`` shuffles all rows of a map-style dataset by a fixed seed, as in datatrove.
    With ``streaming`` it is refused: a shuffle buffer cannot be resumed.

    Raises:
        ConfigError: an argument that cannot work, or a token among ``dataset_options``.
    """

    format = "datasets"
    _order_options = (
        "skip",
        "dataset",
        "streaming",
        "shuffle_files",
        "load_from_disk",
    )
    dataset_settings = (
        "dataset",
        "streaming",
        "shuffle_files",
        "load_from_disk",
        "chosen",
    )

    def __init__(
        self,
        dataset: str,
        dataset_options: JsonObject | None = None,
        streaming: bool = False,
        limit: int = -1,
        skip: int = 0,
        batch_size: int = 1000,
        doc_progress: bool = False,
        adapter: Callable[..., Row] | None = None,
        text_key: str | None = "text",
        id_key: str = "id",
        default_metadata: Row | None = None,
        shuffle_files: bool = False,
        load_from_disk: bool = False,
    ) -> None:
        arguments = dict(locals())
        huggingface.HuggingFaceDatasetReader.__init__(**arguments)
        if isinstance(self.dataset_options.get("token"), str):
            raise ConfigError(
                "dataset_options: a token would be pickled with the executor. Set HF_TOKEN where "
                "the tasks run, or log in there (hf auth login)."
            )
        if shuffle_files and streaming and not load_from_disk:
            raise ConfigError(
                "shuffle_files=True with streaming=True cannot be resumed. Set streaming=False, "
                "or leave shuffle_files out."
            )
        # The base class expects this of a reader of files.
        self.data_folder = DatasetFiles(dataset)
        self.paths_file = self.glob_pattern = self.shuffle_seed = None
        self.recursive = True
        self.file_progress = False
        self.add_file_path = False

    @property
    def chosen(self) -> str:
        options = {}
        if not self.load_from_disk:
            options = {
                name: value for name, value in self.dataset_options.items() if name in _CHOOSING
            }
        return orjson.dumps(plain_settings(options), option=orjson.OPT_SORT_KEYS).decode()

    def get_document_from_dict(
        self, data: Row, source_file: str, id_in_file: int | str
    ) -> Document | None:
        document = SeekingReader.get_document_from_dict(self, data, source_file, id_in_file)
        if document is not None:
            document.metadata.setdefault("dataset", source_file)
        return document

    def schemas(self) -> Iterator[tuple[str, object]]:
        features = self.list_dataset().dataset.features
        if features is not None:
            yield self.dataset, features.arrow_schema

    def shares_rows(self, shards: int) -> bool:
        return self.load_from_disk or not self.streaming or shards <= 1

    def preview(self) -> HuggingFaceDatasetReader:
        """Returns a reader that streams the same rows, for a check before the run.

        Returns itself for a part of a split ("train[:10%]"), which cannot be streamed.
        """
        if self.load_from_disk or self.streaming or "[" in str(self.dataset_options.get("split")):
            return self
        streamed = copy.copy(self)
        streamed.adapter = MethodType(self.adapter.__func__, streamed)
        streamed.streaming = True
        streamed.shuffle_files = False
        return streamed

    def _options(self) -> ReaderState:
        return super()._options() | {"dataset_options": shorten(self.chosen)}

    def list_inputs(self, rank: int, world_size: int, state: ReaderState | None) -> InputFiles:
        return self.list_dataset((state or {}).get("commit")).shard(rank, world_size)

    def _read_input(
        self, inputs: InputFiles, index: int, file_position: FilePosition, number: tuple[int, int]
    ) -> FileRead:
        assert isinstance(inputs, DatasetInputs)
        rank, documents = number
        blocks = self._blocks(inputs, index, file_position)
        return self.documents_of(self.dataset, blocks, documents, task=f"{rank:05d}/")

    def _blocks(
        self, inputs: DatasetInputs, index: int, file_position: FilePosition
    ) -> Iterator[RowBlock]:
        done = file_position[0] if file_position else 0
        row = done - done % self.batch_size
        extent = self._file_extent
        share, shares = inputs.row_shard

        if inputs.is_map:
            rows = max(0, len(inputs.dataset) - share)
            extent.per = extent.size / max(1, -(-rows // shares))
        with self._naming(without_commit(inputs.urls[index])):
            for batch in inputs.batches(index, row, self.batch_size):
                values = list(zip(*batch.values(), strict=False))[max(0, done - row) :]
                row = max(row, done)
                numbers = range(row + 1, row + 1 + len(values))
                lines = [dict(zip(batch, cells, strict=False)) for cells in values]
                yield RowBlock("row {}", zip(lines, repeat(None), zip(numbers), numbers))
                row += len(values)

    def _refuse_without_documents(self, name: str, damaged: bool) -> None:
        if not self.has_default_adapter():
            raise NoDocuments(
                "This task's input holds no document: the adapter found no text in any row of "
                f"{name!r}. Correct that."
            )

    @contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        try:
            with naming_damage(name):
                yield
        except (CkptError, GeneratorExit):
            raise
        except Exception as error:
            if not type(error).__module__.startswith(
                ("datasets", "huggingface_hub", "httpx", "fsspec")
            ):
                raise
            raise InputError(
                f"The input {name!r} could not be read: {one_line(error)}. Run again, or check "
                "that the dataset is complete."
            ) from error

    def list_dataset(self, commit: str | None = None) -> DatasetInputs:
        """Opens the dataset at the commit of a saved position, or else at the commit of the job.

        Raises:
            InputError: the dataset cannot be opened, or has no such split or column.
        """
        token = self.dataset_options.get("token")
        commit = self._commit(commit)
        try:
            dataset, names = retrying.READING.run(
                lambda: self._load(commit), f"The dataset {self.dataset} cannot be opened"
            )
        except (CkptError, ImportError):
            raise
        except Exception as error:
            raise InputError(
                explain_hub_error(f"The dataset {self.dataset!r}", error, commit)
            ) from error
        if isinstance(dataset, dict):
            raise InputError(
                f"The dataset {self.dataset!r} has several splits. Set 'split' in "
                f"dataset_options to one of: {', '.join(map(str, dataset))}."
            )
        self._check_columns(dataset)
        if self.shuffle_files:
            dataset = dataset.shuffle(seed=42)
        inputs = DatasetInputs(self.data_folder, dataset, names, token, commit)
        if not inputs.urls:
            raise InputError(
                f"The dataset {self.dataset!r} has no files for these dataset_options. Correct "
                "them."
            )
        inputs.commit = commit or next(filter(is_commit, map(commit_of, inputs.urls)), None)
        return inputs

    def _load(self, commit: str | None) -> tuple[Any, list[str] | None]:
        from datasets import load_dataset, load_dataset_builder, load_from_disk

        if self.load_from_disk:
            return load_from_disk(self.dataset), None
        options = dict(self.dataset_options)
        if commit:
            options["revision"] = commit
        if not self.streaming:
            return load_dataset(self.dataset, **options), None
        split = options.pop("split", None)
        options = {name: value for name, value in options.items() if name not in _FOR_STORAGE}
        builder = load_dataset_builder(self.dataset, **options)
        files = (builder.config.data_files or {}).get(str(split), [])
        return builder.as_streaming_dataset(split=split), list(files)

    def _commit(self, commit: str | None) -> str | None:
        """Returns the commit to read; None if the dataset is not on the hub, or if its revision is
        a commit.
        """
        repository = self._repository()
        if repository is None:
            return None
        revision = str(self.dataset_options.get("revision") or "main")
        if is_commit(revision):
            return None

        def resolve() -> str | None:
            return commit or self._request_commit(repository, revision)

        revisions = job_revisions()
        if revisions is None:
            return resolve()
        recorded = revisions.commit(repository, revision, resolve)
        return commit or recorded

    def _request_commit(self, repository: str, revision: str) -> str | None:
        from huggingface_hub import HfApi

        api = HfApi(token=self.dataset_options.get("token"))
        try:
            request_info = partial(api.dataset_info, repository, revision=revision)
            info = retrying.OPENING.run(
                request_info, f"The dataset {repository} cannot be found on the hub"
            )
        except Exception as error:
            if type(error).__name__ == "OfflineModeIsEnabled":
                return None  # datasets may have it in its cache
            raise InputError(explain_hub_error(f"The dataset {self.dataset!r}", error)) from error
        return str(info.sha)

    def _repository(self) -> str | None:
        name = str(self.dataset).removeprefix("hf://datasets/")
        is_local = name == self.dataset and Path(name).exists()
        # The name of a format, such as "json", needs one of these options.
        is_format = "/" not in name and not self.dataset_options.keys().isdisjoint(_FILES)
        if self.load_from_disk or is_local or is_format or name.count("/") > 1:
            return None
        return name

    def _check_columns(self, dataset: Any) -> None:
        columns = dataset.column_names
        if columns is None or not self.has_default_adapter() or self.text_key in (None, *columns):
            return
        column_names = ", ".join(map(repr, columns[:20]))
        raise NoDocuments(
            f"The dataset {self.dataset!r} has no column {self.text_key!r}. Its columns: "
            f"{column_names}. Set text_key to one, or to null if the rollout needs no text."
        )
