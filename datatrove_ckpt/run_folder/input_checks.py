"""Checks of the input before a run: its files, its first documents, and whether each task gets
some.
"""

import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

from datatrove.data import Document
from datatrove.io import get_datafolder
from datatrove.pipeline.readers.base import BaseDiskReader, BaseReader
from loguru import logger

from datatrove_ckpt.checkpoint.identity import recorded_settings
from datatrove_ckpt.checkpoint.layout import SHARD, is_finished, rank_folder, rank_numbers
from datatrove_ckpt.checkpoint.ledger import JobSums
from datatrove_ckpt.common.formatting import plural
from datatrove_ckpt.common.retrying import failure_line
from datatrove_ckpt.errors import CheckpointMismatch, ConfigError, InputError
from datatrove_ckpt.errors.names import setting_name, step_place
from datatrove_ckpt.generation.run_identity import code_of
from datatrove_ckpt.output.file_managers import missing_codec
from datatrove_ckpt.readers import BatchReader, HuggingFaceDatasetReader
from datatrove_ckpt.readers.inputs import (
    MISSING,
    InputFolder,
    Inputs,
    check_reachable,
    list_input,
    options_of,
    refuse_pointers,
    sample_files,
    shuffled_names,
)
from datatrove_ckpt.readers.no_document import NoDocument, explain
from datatrove_ckpt.readers.positions import Reading
from datatrove_ckpt.readers.revisions import Revisions
from datatrove_ckpt.readers.shard import FileRecord, ReaderRecord, ShardRecord
from datatrove_ckpt.readers.step_records import describe_pipeline, differences
from datatrove_ckpt.run_folder.checks import Finding, within
from datatrove_ckpt.run_folder.run_plan import RunPlan

_SAMPLE_DOCUMENTS = 1000
_SAMPLE_SECONDS = 2.0
# Files without documents to read before the input counts as unreadable.
_TRIED_FILES = 3


def check_input(reader: BaseReader, plan: RunPlan, sample: list[Document]) -> Iterator[Finding]:
    """Reads the first documents with a copy of the reader, and looks whether each task has some.

    Args:
        sample: gets these documents, unless it has some.
    """
    tasks = plan.tasks
    if plan.waits:
        yield Finding("ok", "readable", "is not read: another executor will create it.")
        return
    if not isinstance(reader, BaseDiskReader):
        yield Finding("ok", "readable", "is not read: only readers of files are tested.")
        return
    where = reader.data_folder.resolve_paths("")
    is_dataset = isinstance(reader, HuggingFaceDatasetReader)
    tried = reader
    if is_dataset:
        tried = reader.preview()
    inputs = within(partial(list_files, setting_name("data_folder"), tried), where)
    names = list(inputs.names)
    if isinstance(reader, BatchReader) and reader.data_folder.is_local():
        reader.check()
    documents: list[Document] = []
    refused: dict[int, NoDocument] = {}
    within(partial(_read_some, tried, len(names), documents, refused), where)
    if not is_dataset:
        for first in range(min(len(names), tasks)):
            if refused.keys() >= set(range(first, len(names), tasks)):
                raise refused[first]
        if refused and not documents:
            raise next(iter(refused.values()))
    if not documents:
        if names and not any(map(inputs.size, range(min(len(names), _TRIED_FILES)))):
            yield Finding("warning", "readable", f"{where}: the first files are empty.")
            return
        text = f"{where} holds no documents for this reader. {_advice(tried, names)}"
        yield Finding("problem", "readable", text)
        return
    if not sample:
        sample += documents
    text = f"{where}: the first {plural(len(documents), 'document')} read."
    yield Finding("ok", "readable", text)
    if refused:
        shown = ", ".join(repr(names[index]) for index in list(refused)[:_TRIED_FILES])
        text = (
            f"{plural(len(refused), 'file')} will give no document: {shown}. Correct or move what "
            "is no input."
        )
        yield Finding("warning", "files", text)
    if is_dataset and reader.shares_rows(len(names)):
        equal = f"each of {plural(tasks, 'task')} gets an equal part of the rows."
        yield Finding("ok", "shares", equal)
        return
    text = f"{plural(len(names), 'file')} for {plural(tasks, 'task')}."
    if len(names) >= tasks:  # datatrove deals out whole files
        yield Finding("ok", "shares", text)
        return
    idle = f"{tasks - len(names)} of {tasks} tasks have no input: {text}"
    advice = f"Set tasks to {len(names)}, or split the input into at least {tasks} files."
    yield Finding("warning", "shares", f"{idle} {advice}")


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
        if isinstance(step, BatchReader) and not any(root.exists() for _, root in plan.kept):
            step.check()
    elif not folder.isdir(""):  # of the media that documents name
        raise ConfigError(f'{place}: "{folder.path}" is not a folder.')


def list_files(place: str, reader: BaseDiskReader) -> Inputs:
    """Lists the input of a reader. ``place`` names the reader's setting in errors.

    Raises:
        ConfigError: the folder is missing, no file matches, or a package for a compression is
            missing.
        InputError: a file is a pointer of Git LFS.
    """
    folder = reader.data_folder
    where = f'{place}: "{folder.resolve_paths("")}"'
    if folder.is_local() and not reader.paths_file and not folder.isdir(""):
        raise ConfigError(f"{where} is not a folder.")
    try:
        inputs = list_input(reader)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{where} is not there, or this account may not see it: {failure_line(error)}"
        ) from error
    if not inputs.names:
        pattern = ""
        if reader.glob_pattern:
            pattern = f' that match "{reader.glob_pattern}"'
        raise ConfigError(f"{where} contains no files{pattern}.")
    if folder.is_local():
        refuse_pointers(inputs)
    for name in inputs.names:
        advice = missing_codec(getattr(reader, "compression", None), name)
        if advice:
            raise ConfigError(f'{where}: "{name}" cannot be read: {advice}')
    return inputs


def _read_some(
    reader: BaseDiskReader, files: int, found: list[Document], refused: dict[int, NoDocument]
) -> None:
    """Adds the first documents, file after file, and the files that are ``refused``.

    One file per rank, because a reader continues through files in which no line fits its
    ``text_key``.
    """
    deadline = time.monotonic() + _SAMPLE_SECONDS
    for rank in range(files):
        if not found and (
            len(refused) == _TRIED_FILES or (rank >= _TRIED_FILES and time.monotonic() > deadline)
        ):
            return
        one = copy.deepcopy(reader)
        InputFolder.give(one)
        try:
            with closing(one.run(None, rank=rank, world_size=files)) as documents:
                for document in documents:
                    if found and (len(found) == _SAMPLE_DOCUMENTS or time.monotonic() > deadline):
                        return
                    found.append(document)
        except NoDocument as error:
            refused[rank] = error
        if found and one.limit >= 0:  # it counts for a task, which has more files than one
            return


def _advice(reader: BaseDiskReader, names: list[str]) -> str:
    """Explains datatrove's own readers; ours do it themselves."""
    text = ""
    # File systems and decompressors raise anything; the check reports what it knows.
    with suppress(Exception):
        if names:
            text = explain(reader, names[0])
    if text:
        return f"{names[0]!r}: {text}"
    return "Check the path of the input, its pattern, and text_key."


def note_steps(plan: RunPlan) -> None:
    if plan.depends is not None:
        note_steps(plan.depends)
    for runner in plan.runners:
        runner.step.note_steps_before(runner.before)


# Checks that finished ranks would read the same input today. datatrove skips a finished rank, so
# the old output would stand for a changed input. The own check of a finished rank without its
# marker misses files that were replaced by others of equal size.

_NAMED_FILES = 10
_OTHER_CONTENT = "has other content"


def check_inputs_unchanged(plan: RunPlan) -> None:
    """Compares the input with what each finished rank has read: a listing per reader, a sample per
    file.

    It skips runs with another number of tasks, sources that are no files, and retries of dead
    letters, whose input may be gone.

    Raises:
        CheckpointMismatch: a file was added, removed or changed, or an option of a reader, or a
            step before the runner.
        OSError: the input cannot be listed.
    """
    for runner, root in plan.kept:
        records = _records(plan, root)
        is_retry = runner.step.retry_dead_letters
        if not is_retry:  # a retry does not run the steps before it
            _check_steps(runner.before, records)
        if plan.waits:
            continue  # another executor has yet to create the input
        readers = [one for one in runner.before if isinstance(one, BaseDiskReader)]
        records = {
            rank: record for rank, record in records.items() if len(record.readers) == len(readers)
        }
        if not records:
            continue
        # A retry does not read the input.
        resuming = set(plan.incomplete(skip_completed=True if is_retry else None))
        with Reading(revisions=Revisions(root)):  # a dataset is listed as the ranks read it
            for number, reader in enumerate(readers):
                # A listing would open the dataset; and the input may be gone.
                if is_retry and isinstance(reader, HuggingFaceDatasetReader):
                    continue
                try:
                    if is_retry and not list_input(reader).names:
                        continue
                except (FileNotFoundError, InputError):  # such as a repository on the hub
                    continue
                read = {rank: record.readers[number] for rank, record in records.items()}
                _check_reader(plan.tasks, reader, read, resuming, plan.listed.get(reader, ()))


def _records(plan: RunPlan, root: Path) -> dict[int, ShardRecord]:
    # The number of tasks is refused elsewhere, with a better message.
    if recorded_settings(root).get("tasks") != plan.tasks:
        return {}
    records = {}
    for rank in rank_numbers(root):
        folder = rank_folder(root, rank)
        if is_finished(folder):
            record = ShardRecord.read(folder / SHARD)
            if record is not None:
                records[rank] = record
    return records


def _check_steps(pipeline: Sequence[object], records: dict[int, ShardRecord]) -> None:
    listed = describe_pipeline(pipeline, code_of)
    changed = {
        rank: differences(record.pipeline, listed)
        for rank, record in records.items()
        if record.pipeline is not None
    }
    ranks = [rank for rank, lines in changed.items() if lines]
    if ranks:
        lines = "\n  ".join(changed[ranks[0]])
        raise CheckpointMismatch(
            f"The steps before InferenceRunner are not those through which {_who(ranks)} read the "
            f"input:\n  {lines}\n"
            "A finished task is not run again, so its output would stay that of the old steps. Put "
            "the steps back, or process the new input as another run.",
            starts_over="with old results",
        )


def _who(ranks: Sequence[int]) -> str:
    others = len(ranks) - 1
    if not others:
        return f"task {ranks[0]} has"
    return f"task {ranks[0]} and {plural(others, 'other finished task')} have"


def _check_reader(
    tasks: int,
    reader: BaseDiskReader,
    records: dict[int, ReaderRecord],
    resuming: set[int],
    listed: Sequence[str],
) -> None:
    inputs = None
    # Listing such a dataset would download it: its name and kept commit stand for it.
    is_dataset = isinstance(reader, HuggingFaceDatasetReader)
    if not is_dataset or reader.load_from_disk or reader.streaming:
        inputs = list_input(reader)
    now = then = {file.name: file for record in records.values() for file in record.files}
    if inputs is not None:
        known = [index for index, name in enumerate(inputs.names) if name in then]
        now = {file.name: file for file in sample_files(inputs, known)}
        unread = sorted({*listed} - {*inputs.names} - then.keys())
        if unread and not any(record.limited for record in records.values()):
            raise InputError(
                f"The input file {unread[0]!r} in {reader.data_folder.path} is gone since this run "
                "began, and no task has read it. Put it back, and process it as another run."
            )
    changed = {name: _difference(file, now.get(name)) for name, file in then.items()}
    changed = {name: text for name, text in changed.items() if text}
    without = {"path_columns": False, "delimiter": ","}  # a record has what is set
    options_now = without | options_of(reader)
    options = dict[str, str]()
    ranks = []  # those that something of it concerns
    for rank, record in records.items():
        read = {file.name for file in record.files}
        if rank in resuming:
            if any(changed.get(name) == _OTHER_CONTENT for name in read):
                ranks.append(rank)
            continue
        would_read = read
        if inputs is not None:
            names = inputs.shard(rank, tasks).names
            if (seed := getattr(reader, "shuffle_seed", None)) is not None:
                names = shuffled_names(names, seed)
            if record.limited:
                names = names[: len(record.files)]
            would_read = set(names)
        changed |= dict.fromkeys(would_read - then.keys(), "was not read then")
        differing = {
            name: f"{value!r} -> {options_now[name]!r}"
            for name, value in (without | record.options).items()
            if value != options_now[name]
        }
        options |= differing
        if differing or would_read != read or not read.isdisjoint(changed):
            ranks.append(rank)
    if ranks:
        lines = [f"  {name!r} {text}" for name, text in sorted(changed.items())]
        if len(lines) > _NAMED_FILES:
            lines[_NAMED_FILES:] = [f"  and {len(lines) - _NAMED_FILES} more"]
        lines += [f"  {name}: {text}" for name, text in options.items()]
        raise CheckpointMismatch(
            f"The input in {reader.data_folder.path} is not what {_who(ranks)} read:\n"
            + "\n".join(lines or ["  the files are dealt out to the tasks in another order"])
            + "\nA finished task is not run again, so its output would stay that of the old input. "
            "Put the input back, or process the new one as another run.",
            starts_over="with old results",
        )
    # Samples do not show an edit in the middle of a long file that keeps its size.
    touched = sum(
        file.modified != now[name].modified for name, file in then.items() if name not in changed
    )
    if touched:
        logger.warning(
            f"{plural(touched, 'input file')} of finished tasks in {reader.data_folder.path}: the "
            "time of the last change is another, size and samples of the content are the same. "
            "They are taken as unchanged."
        )


def _difference(then: FileRecord, now: FileRecord | None) -> str:
    if now is None or now.size == MISSING:
        return "is gone"
    if then.size != now.size:
        return f"had {then.size} bytes, has {now.size}"
    if then.sample and now.sample and then.sample != now.sample:
        return _OTHER_CONTENT
    return ""


def refuse_vanished_input(root: Path, job: JobSums) -> None:
    """Raises InputError if a rank without a file had one when another rank listed the input."""
    for rank in sorted({*range(job.with_input)} - job.known):
        record = ShardRecord.read(rank_folder(root, rank) / SHARD)
        if record is None or not record.readers:
            continue
        if not any(reader.files for reader in record.readers):
            raise InputError(
                f"The input file of task {rank} was gone before the task started. Put it back, and "
                "process it as another run."
            )


def input_names(folder: str, pattern: str | None) -> list[str]:
    """Returns the names of the input files in a folder, as readers list them."""
    found = get_datafolder(folder)
    names: list[str] = InputFolder(found.path, found.fs).list_files(glob_pattern=pattern)
    return names
