"""Checks of the input before a run: its files, its first documents, and whether each task gets some."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any

from datatrove.pipeline.readers.base import BaseDiskReader

from datatrove_ckpt.errors import CkptError, ConfigError
from datatrove_ckpt.formatting import byte_size, error_text, plural
from datatrove_ckpt.generation.as_read import as_read
from datatrove_ckpt.preflight.checks import PreflightCheck, within
from datatrove_ckpt.preflight.probes import REMOTE_SECONDS, RemoteFailed
from datatrove_ckpt.preflight.requirements import check_codecs
from datatrove_ckpt.preflight.shares import COMPRESSED, check_shares, grown
from datatrove_ckpt.readers import HuggingFaceDatasetReader
from datatrove_ckpt.readers.hub_messages import is_on_hub, no_files
from datatrove_ckpt.readers.inputs import list_input
from datatrove_ckpt.readers.no_documents import NoDocument, explain

_SAMPLE_DOCUMENTS = 100
_SAMPLE_SECONDS = 2.0
# Files without a document that are read before the input counts as unreadable: the first may be empty.
_TRIED_FILES = 3
# Files of a list whose size is asked for, each with a request; the others count as large as these on average.
_MEASURED_FILES = 10_000
_THREADS = 16


@dataclass(frozen=True)
class Sample:
    """The first documents of the input.

    Attributes:
        number: how many were read.
        mean: their mean size in bytes, as a journal stores them.
        is_all: the input has no others.
        input_bytes: size of the whole input, uncompressed; compressed files count ``GROWTH`` times. 0 if unknown.
        compressed: some of the input is compressed.
        refused: why a file that was read gave no document, by the file's index.
        first: the first one, encoded; empty if there is none.
    """

    number: int = 0
    mean: float = 0.0
    is_all: bool = False
    input_bytes: int = 0
    compressed: bool = False
    refused: dict[int, NoDocument] = field(default_factory=dict)
    first: bytes = b""

    @property
    def documents(self) -> int:
        """How many documents the whole input has, about; 0 if unknown."""
        return self.number if self.is_all else round(self.input_bytes / self.mean) if self.mean else 0


def check_input(
    subject: str, reader: Any, tasks: int, workers: int = 1, waits: bool = False
) -> tuple[list[PreflightCheck], Sample]:
    """Reads the first documents with a copy of the reader, and compares the shares of the tasks.

    Args:
        workers: how many tasks run at once.
        waits: another executor will create the input.
    """
    if waits:
        return [PreflightCheck("ok", subject, "readable", "is not read: another executor will create it.")], Sample()
    if not isinstance(reader, BaseDiskReader):
        text = "is not read: only readers of files are tested."
        return [PreflightCheck("ok", subject, "readable", text)], Sample()
    where = reader.data_folder.resolve_paths("")
    is_dataset, whole = isinstance(reader, HuggingFaceDatasetReader), reader
    if is_dataset:
        reader = reader.preview()
    try:
        names, sizes = within(REMOTE_SECONDS, lambda: _list(reader), where)
        check_codecs(where, reader, names)
        sample = within(REMOTE_SECONDS, lambda: _read_some(reader, names, sizes), where)
        if not is_dataset:
            _refuse_tasks_without_documents(sample, len(names), tasks)
    except (RemoteFailed, CkptError) as error:
        return [PreflightCheck("problem", subject, "readable", str(error))], Sample()
    except Exception as error:  # whatever a reader, an adapter or a file system raises
        text = f"{where}: {error_text(error)}. Correct the path, its permissions or the reader's arguments."
        return [PreflightCheck("problem", subject, "readable", text)], Sample()
    if not sample.number and names and not sample.input_bytes:
        return [PreflightCheck("warning", subject, "readable", f"{where}: all files are empty.")], sample
    if not sample.number:
        files = "" if names else ": no file matches"
        text = f"{where} holds no documents for this reader{files}. {_advice(reader, names)}"
        return [PreflightCheck("problem", subject, "readable", text)], sample
    which = "all" if sample.is_all else "the first"
    text = f"{where}: {which} {plural(sample.number, 'document')} read, {byte_size(sample.mean)} on average."
    # With a limit, a task reads as many documents of a large file as of a small one.
    known = sizes if len(sizes) == len(names) and reader.limit < 0 else None
    if is_dataset and whole.shares_rows(len(names)):
        equal = f"each of {plural(tasks, 'task')} gets an equal part of the rows."
        shares = PreflightCheck("ok", subject, "shares", equal)
    else:
        shares = check_shares(subject, names, known, tasks, workers)
    return [PreflightCheck("ok", subject, "readable", text), shares, *_name_refused(subject, names, sample)], sample


def _refuse_tasks_without_documents(sample: Sample, files: int, tasks: int) -> None:
    """Raises NoDocument for a task whose files were all refused, or if nothing else was found."""
    for first in range(min(files, tasks)):
        if sample.refused.keys() >= set(range(first, files, tasks)):
            raise sample.refused[first]
    if sample.refused and not sample.number:
        raise next(iter(sample.refused.values()))


def _name_refused(subject: str, names: list[str], sample: Sample) -> list[PreflightCheck]:
    if not sample.refused:
        return []
    shown = ", ".join(repr(names[index]) for index in list(sample.refused)[:_TRIED_FILES])
    text = f"{plural(len(sample.refused), 'file')} will give no document: {shown}. Correct or move what is no input."
    return [PreflightCheck("warning", subject, "files", text)]


def _list(reader: Any) -> tuple[list[str], list[int]]:
    """The names of all files, and their sizes; of a very long list, the sizes of the first. One listing."""
    folder = reader.data_folder
    is_listed = not reader.paths_file and not isinstance(reader, HuggingFaceDatasetReader)
    if is_listed and not is_on_hub(folder) and not folder.isdir(""):
        raise ConfigError(f"{folder.resolve_paths('')}: there is no such folder. Correct data_folder.")
    inputs = list_input(reader)
    names = list(inputs.names)
    if is_listed and is_on_hub(folder) and not names:
        raise no_files(folder)
    measured = range(min(len(names), _MEASURED_FILES) if reader.paths_file else len(names))
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="datatrove-ckpt sizes") as threads:
        return names, list(threads.map(inputs.size, measured) if reader.paths_file else map(inputs.size, measured))


def _read_some(reader: Any, names: list[str], file_sizes: list[int]) -> Sample:
    sizes: list[int] = []
    first = b""
    deadline = time.monotonic() + _SAMPLE_SECONDS
    refused: dict[int, NoDocument] = {}

    def take(document: Any) -> bool:
        nonlocal first
        data = as_read(document).data
        first = first or data
        sizes.append(len(data))
        return len(sizes) < _SAMPLE_DOCUMENTS and time.monotonic() <= deadline

    is_all = _read_files(reader, len(names), take, refused)
    measured = sum(grown(name, size) for size, name in zip(file_sizes, names, strict=False))
    total = round(measured / max(1, len(file_sizes)) * len(names))
    compressed = any(name.endswith(COMPRESSED) for name in names)
    mean = sum(sizes) / len(sizes) if sizes else 0.0
    return Sample(len(sizes), mean, is_all and bool(sizes), total, compressed, refused, first)


def _read_files(reader: Any, files: int, take: Callable[[Any], bool], refused: dict[int, NoDocument]) -> bool:
    """Reads file after file until ``take`` is False. Returns whether all were read.

    One file per rank: a reader reads on, without a document to stop at, where no line fits its ``text_key``. Files
    that are refused for that are added to ``refused``.
    """
    found, deadline = False, time.monotonic() + _SAMPLE_SECONDS
    for rank in range(files):
        if not found and (len(refused) == _TRIED_FILES or (rank >= _TRIED_FILES and time.monotonic() > deadline)):
            return False
        one = copy.deepcopy(reader)
        try:
            with closing(one.run(None, rank=rank, world_size=files)) as documents:
                for document in documents:
                    found = True
                    if not take(document):
                        return False
        except NoDocument as error:
            refused[rank] = error
        if found and one.limit >= 0:  # it counts for a task, which has more files than one
            return False
    return True


def _advice(reader: Any, names: list[str]) -> str:
    """For datatrove's own readers; ours say it themselves."""
    text = ""
    with suppress(Exception):  # whatever a file system or a decompressor raises; the check says what it knows without
        text = explain(reader, names[0]) if names else ""
    return f"{names[0]!r}: {text}" if text else "Check data_folder, glob_pattern and text_key."
