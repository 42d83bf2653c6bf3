"""Lists the files of an input and samples them, for the record that a rank keeps (see ``shard.py``)."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from glob import has_magic
from typing import Any

from datatrove.io import get_shard_from_paths_file
from datatrove.pipeline.readers.base import BaseDiskReader

from datatrove_ckpt.readers.hub_messages import is_on_hub, naming_hub_input
from datatrove_ckpt.readers.inputs import Inputs
from datatrove_ckpt.readers.shard import FileRecord, ReaderRecord
from datatrove_ckpt.readers.steps import plain_settings

MISSING = -1
"""The size of a file that a list names and that does not exist."""
_THREADS = 16
_OPTIONS = ("text_key", "id_key", "limit", "skip")


def options_of(reader: BaseDiskReader) -> dict[str, Any]:
    """The arguments of a reader that decide what it makes of its files."""
    options = {name: getattr(reader, name) for name in (*_OPTIONS, *getattr(reader, "dataset_settings", ()))}
    return options | {"default_metadata": plain_settings(reader.default_metadata or {})}


def record_reader(reader: BaseDiskReader, inputs: Inputs, count: int, limited: bool = False) -> ReaderRecord:
    """Records the first ``count`` files of the input, and samples them."""
    return ReaderRecord(options_of(reader), sample_files(inputs, range(count)), limited)


def sample_files(inputs: Inputs, indices: Sequence[int]) -> list[FileRecord]:
    """The files as records, with the sizes that ``inputs`` knows, and with samples of now."""
    if len(indices) < _THREADS:
        return [_record(inputs, index) for index in indices]
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="datatrove-ckpt sample") as threads:
        return list(threads.map(partial(_record, inputs), indices))


def _record(inputs: Inputs, index: int) -> FileRecord:
    name = inputs.names[index]
    try:
        info, size = inputs.info(index), inputs.size(index)
    except FileNotFoundError:
        return FileRecord(name, MISSING, "", 0.0)
    modified = info.get("mtime")
    sample = inputs.sample(index)
    return FileRecord(name, size, sample, float(modified) if isinstance(modified, int | float) else 0.0)


# The whole input ---------------------------------------------------------------------------------------------------


def list_input(reader: BaseDiskReader) -> Inputs:
    """All files of a reader's input, in the order in which datatrove deals them out to the ranks.

    Raises:
        OSError: the folder or the list cannot be read.
    """
    folder, pattern = reader.data_folder, reader.glob_pattern
    if hasattr(reader, "list_dataset"):  # HuggingFaceDatasetReader
        found: Inputs = reader.list_dataset()
        return found
    if reader.paths_file:
        return Inputs(folder, list(get_shard_from_paths_file(reader.paths_file, 0, 1)))
    folder.invalidate_cache()
    options: dict[str, Any] = {"maxdepth": None if reader.recursive else 1, "detail": True}
    if is_on_hub(folder):
        options["expand_info"] = False  # as DataFolder.list_files: one request instead of one per file
    with naming_hub_input(folder):
        if pattern:
            listed = folder.glob(pattern if has_magic(pattern) else f"*{pattern}", **options)
        else:
            listed = folder.find("", **options)
    names = sorted(name for name, info in listed.items() if info["type"] != "directory")
    return Inputs(folder, names, {index: listed[name] for index, name in enumerate(names)})
