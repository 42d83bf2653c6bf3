"""HuggingFaceDatasetReader seeks by shard and row in a stream, by index in a map-style dataset.

A ``FilePosition`` is (rows of the rank in this shard so far,). A resume begins at a whole batch of
the shard, counted from its beginning: if the dataset has no features, missing columns are filled
within a batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import repeat
from pathlib import Path
from types import MethodType
from typing import Any, ClassVar

import orjson
from datatrove.data import Document
from datatrove.pipeline.readers import huggingface

from datatrove_ckpt.common import JsonObject, retrying
from datatrove_ckpt.errors import CkptError, ConfigError, InputError
from datatrove_ckpt.readers.base import SeekingReader
from datatrove_ckpt.readers.compressed import naming_damage
from datatrove_ckpt.readers.dataset_source import (
    DatasetFiles,
    DatasetInputs,
    commit_of,
    without_commit,
)
from datatrove_ckpt.readers.empty_input import NoDocuments
from datatrove_ckpt.readers.input_errors import explain_hub_error, one_line
from datatrove_ckpt.readers.inputs import InputFiles, shorten
from datatrove_ckpt.readers.positions import (
    FilePosition,
    FileRead,
    ReaderState,
    Row,
    RowBlock,
    job_revisions,
)
from datatrove_ckpt.readers.revisions import is_commit
from datatrove_ckpt.readers.step_records import plain_settings

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
    dataset_settings: ClassVar[tuple[str, ...]] = (
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
                "dataset_options: a token does not belong there, because it is pickled with the "
                "executor. Leave it out, and set HF_TOKEN where the tasks run, or log in there "
                "with `hf auth login`."
            )
        if shuffle_files and streaming and not load_from_disk:
            raise ConfigError(
                "shuffle_files=True with streaming=True cannot be resumed: the rows in the "
                "shuffle buffer would be lost. Set streaming=False, which shuffles all rows by a "
                "fixed seed, or leave shuffle_files out."
            )
        # The base class expects this of a reader of files.
        self.data_folder = DatasetFiles(dataset)
        self.paths_file = self.glob_pattern = self.shuffle_seed = None
        self.recursive = True
        self.file_progress = False
        self.add_file_path = False

    @property
    def chosen(self) -> str:
        """The part of ``dataset_options`` that decides which rows are read, as JSON."""
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

    def schemas(self) -> Iterator[tuple[str, Any]]:
        features = self.list_dataset().dataset.features
        if features is not None:
            yield self.dataset, features.arrow_schema

    def shares_rows(self, shards: int) -> bool:
        """Whether the tasks share a dataset with this number of shards by rows, not by shards."""
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
                f"{name!r}. Correct that, and run the same command again."
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
                f"The input {name!r} could not be read: {one_line(error)}. Run the same command "
                "again; if that does not help, see whether the dataset is complete and readable."
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
        except Exception as error:  # any error of datasets, the hub or file systems
            raise InputError(explain_hub_error(self.dataset, error, commit)) from error
        if isinstance(dataset, dict):
            raise InputError(
                f"The dataset {self.dataset!r} has several splits, and dataset_options names none. "
                f"Set 'split' in it to one of: {', '.join(map(str, dataset))}."
            )
        self._check_columns(dataset)
        if self.shuffle_files:
            dataset = dataset.shuffle(seed=42)  # datatrove's
        inputs = DatasetInputs(self.data_folder, dataset, names, token, commit)
        if not inputs.urls:
            raise InputError(
                f"The dataset {self.dataset!r} has no files for these dataset_options. Correct "
                "them."
            )
        inputs.commit = commit or next(filter(is_commit, map(commit_of, inputs.urls)), None)
        return inputs

    def _load(self, commit: str | None) -> tuple[Any, list[str] | None]:
        """Returns the dataset, or a dict with a dataset for each split, and a stream's files."""
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
            raise InputError(explain_hub_error(self.dataset, error)) from error
        return str(info.sha)

    def _repository(self) -> str | None:
        """Returns the dataset's name on the hub; None if the dataset is elsewhere.

        The order is that ``load_dataset`` uses.
        """
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
            f"The dataset {self.dataset!r} has no column {self.text_key!r}. Its columns are "
            f"{column_names}. Set text_key to one of them, or to null if the rollout needs no text."
        )
