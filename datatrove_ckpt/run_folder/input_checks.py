"""Checks of the input before a run: its files, its first documents, and whether each task gets
some.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from functools import partial

from datatrove.data import Document
from datatrove.pipeline.readers.base import BaseDiskReader, BaseReader

from datatrove_ckpt.common.formatting import plural
from datatrove_ckpt.common.retrying import failure_line
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.errors.setting_names import setting_name, step_place
from datatrove_ckpt.output.file_managers import missing_codec
from datatrove_ckpt.readers import BatchReader, HuggingFaceDatasetReader
from datatrove_ckpt.readers.empty_input import NoDocuments, explain
from datatrove_ckpt.readers.inputs import (
    InputFiles,
    InputFolder,
    check_reachable,
    list_input,
    refuse_pointers,
)
from datatrove_ckpt.run_folder.finding import Finding, FindingState, with_timeout
from datatrove_ckpt.run_folder.run_plan import RunPlan

_SAMPLE_DOCUMENTS = 1000
_SAMPLE_SECONDS = 2.0
# Files without documents to read before the input counts as unreadable.
_TRIED_FILES = 3


def check_input(reader: BaseReader, plan: RunPlan, sample: list[Document]) -> Iterator[Finding]:
    """Reads the first documents with a copy of the reader, and checks that each task has some.

    Args:
        sample: a list that gets these documents, unless it has some.
    """
    tasks = plan.tasks
    if plan.waits:
        yield Finding("ok", "readable", "is not read: another executor will create it.")
        return
    if not isinstance(reader, BaseDiskReader):
        yield Finding("ok", "readable", "is not read: only readers of files are tested.")
        return
    location = reader.data_folder.resolve_paths("")
    is_dataset = isinstance(reader, HuggingFaceDatasetReader)
    tried = reader
    if is_dataset:
        tried = reader.preview()
    inputs = with_timeout(partial(list_files, setting_name("data_folder"), tried), location)
    names = list(inputs.names)
    if isinstance(reader, BatchReader) and reader.data_folder.is_local():
        reader.check()
    documents: list[Document] = []
    refused: dict[int, NoDocuments] = {}
    with_timeout(partial(_read_some, tried, len(names), documents, refused), location)
    if not is_dataset:
        for first in range(min(len(names), tasks)):
            if refused.keys() >= set(range(first, len(names), tasks)):
                raise refused[first]
        if refused and not documents:
            raise next(iter(refused.values()))
    if not documents:
        if not any(map(inputs.size, range(min(len(names), _TRIED_FILES)))):
            yield Finding("warning", "readable", f"{location}: the first files are empty.")
            return
        advice = "Check the path of the input, its pattern, and text_key."
        # File systems and decompressors raise anything; the check reports what it knows.
        with suppress(Exception):
            text = explain(tried, names[0])  # of datatrove's own readers; ours do it themselves
            advice = f"{names[0]!r}: {text}" if text else advice
        text = f"{location} holds no documents for this reader. {advice}"
        yield Finding("problem", "readable", text)
        return
    if not sample:
        sample += documents
    text = f"{location}: the first {plural(len(documents), 'document')} read."
    yield Finding("ok", "readable", text)
    if refused:
        examples = ", ".join(repr(names[index]) for index in list(refused)[:_TRIED_FILES])
        text = (
            f"{plural(len(refused), 'file')} will give no document: {examples}. Correct or move "
            "what is no input."
        )
        yield Finding("warning", "files", text)
    state: FindingState = "ok"
    text = f"{plural(len(names), 'file')} for {plural(tasks, 'task')}."
    if is_dataset and reader.shares_rows(len(names)):
        text = f"each of {plural(tasks, 'task')} gets an equal part of the rows."
    elif len(names) < tasks:  # datatrove deals out whole files
        state = "warning"
        text = (
            f"{tasks - len(names)} of {tasks} tasks have no input: {text} Set tasks to "
            f"{len(names)}, or split the input into at least {tasks} files."
        )
    yield Finding(state, "shares", text)


def refuse_input(plan: RunPlan, index: int, step: object) -> None:
    """Refuses an input folder without files: datatrove only warns, and marks the empty ranks
    complete.

    Lists local folders, and others only before paid jobs. A retry does not need its input.

    Raises:
        ConfigError: see ``list_files``.
        InputError, OSError: the tasks run here, and their input cannot be reached.
    """
    folder = getattr(step, "data_folder", None)
    if plan.waits or plan.retries or folder is None or getattr(step, "paths_file", None):
        return
    place = f"{step_place(index, step)}: {setting_name('data_folder')}"
    if not folder.is_local():
        if not plan.incomplete():
            return
        if plan.is_local:
            check_reachable(folder)
        if not plan.as_jobs:
            return
    if hasattr(step, "glob_pattern"):
        plan.listed[step] = list_files(place, step).names
        if isinstance(step, BatchReader) and not any(
            root.exists() for _, root in plan.with_checkpoints
        ):
            step.check()
    elif not folder.isdir(""):  # of the media that documents name
        raise ConfigError(f'{place}: "{folder.path}" is not a folder.')


def list_files(setting: str, reader: BaseDiskReader) -> InputFiles:
    """Lists the input of a reader. ``setting`` names the reader's setting in errors.

    Raises:
        ConfigError: the folder is missing, no file matches, or a package for a compression is
            missing.
        InputError: a file is a pointer of Git LFS.
    """
    folder = reader.data_folder
    location = f'{setting}: "{folder.resolve_paths("")}"'
    if folder.is_local() and not reader.paths_file and not folder.isdir(""):
        raise ConfigError(f"{location} is not a folder.")
    try:
        inputs = list_input(reader)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{location} is not there, or this account may not see it: {failure_line(error)}"
        ) from error
    if not inputs.names:
        pattern = ""
        if reader.glob_pattern:
            pattern = f' that match "{reader.glob_pattern}"'
        raise ConfigError(f"{location} contains no files{pattern}.")
    if folder.is_local():
        refuse_pointers(inputs)
    for name in inputs.names:
        advice = missing_codec(getattr(reader, "compression", None), name)
        if advice:
            raise ConfigError(f'{location}: "{name}" cannot be read: {advice}')
    return inputs


def _read_some(
    reader: BaseDiskReader, files: int, collected: list[Document], refused: dict[int, NoDocuments]
) -> None:
    """Adds the first documents, file after file, and the files without documents to ``refused``.

    Each file is read as a rank, because a reader continues through files in which no line fits its
    ``text_key``.
    """
    deadline = time.monotonic() + _SAMPLE_SECONDS
    for rank in range(files):
        if not collected and (
            len(refused) == _TRIED_FILES or (rank >= _TRIED_FILES and time.monotonic() > deadline)
        ):
            return
        reader_copy = copy.deepcopy(reader)
        InputFolder.give(reader_copy)
        try:
            with closing(reader_copy.run(None, rank=rank, world_size=files)) as documents:
                for document in documents:
                    if collected and (
                        len(collected) == _SAMPLE_DOCUMENTS or time.monotonic() > deadline
                    ):
                        return
                    collected.append(document)
        except NoDocuments as error:
            refused[rank] = error
        if (
            collected and reader_copy.limit >= 0
        ):  # it counts for a task, which has more files than one
            return
