"""The last line of ``run``: what all ranks and all attempts have done, and what to do next."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from datatrove_ckpt.checkpoint.commits import DocumentCounts, read_commits
from datatrove_ckpt.checkpoint.history import read_history
from datatrove_ckpt.checkpoint.history_records import WorkCounts
from datatrove_ckpt.checkpoint.layout import COMMITS, HISTORY, RETRIES, SHARD, rank_folder, rank_numbers, retry_number
from datatrove_ckpt.errors import CheckpointCorrupt, InputError
from datatrove_ckpt.formatting import plural, plural_is
from datatrove_ckpt.preflight.before_run import Checked
from datatrove_ckpt.readers.shard import ShardRecord, SkippedLines
from datatrove_ckpt.runner import InferenceRunner

_LAST_LINES = 1 << 14  # bytes of a history: its last progress line is there


def closing_line(step: InferenceRunner, command: str, checked: Checked) -> str:
    """The closing line, over all ranks, their retries and all attempts, with what was checked."""
    root = step.checkpoints_root
    counts, files = _count(root)
    skipped = SkippedLines()
    for rank in rank_numbers(root):
        record = ShardRecord.read(rank_folder(root, rank) / SHARD)
        skipped += record.skipped if record else SkippedLines()
    if not counts.read and (skipped.damaged or skipped.without_text):
        rows = skipped._replace(files=0, names=())  # every file would be named
        raise InputError(
            f"No row of the whole input is a document.{rows} Check text_key and the adapter of the reader, and "
            "start again with another checkpoints_local_dir and logging_dir."
        )
    return (
        f"{counts.written} of {plural_is(counts.read, 'document')} in {plural(files, 'file')} in "
        f"{step.output_writer.output_folder.resolve_paths('')} "
        f"({counts.dropped} dropped, {plural(counts.dead, 'dead letter')}), "
        f"for {plural(counts.requests, 'request')} with {counts.prompt_tokens} prompt and "
        f"{plural(counts.completion_tokens, 'completion token')}.{skipped}{_attempts(root, counts)}{_checked(checked)} "
        f"{_next_step(step, counts, command)}"
    )


def _attempts(root: Path, counts: DocumentCounts) -> str:
    """What all attempts sent, as a sentence with a space before it; empty if every rank had one, without a repetition.

    A history does not hold the last minute of an attempt that was killed.
    """
    ranks = attempts = 0
    sent = WorkCounts()
    for folder in _folders(root):
        history = read_history(folder / HISTORY, _LAST_LINES)
        ranks += 1
        attempts += max(1, history.last_attempt)
        sent = sent.plus(history.last.total) if history.last is not None else sent
    if not sent.sent or (attempts == ranks and not sent.retries + sent.resent):
        return ""
    at_least, again = "at least " if attempts > ranks else "", sent.retries + sent.resent
    known = sent.known_sent(counts.requests)
    said = (
        f" In {plural(attempts, 'attempt')} of {plural(ranks, 'task')}, {at_least}{plural(known, 'request')} "
        f"{'was' if known == 1 else 'were'} sent{f', {again} of them again' if again else ''}"
    )
    unused = sent.completion_tokens - counts.completion_tokens
    return f"{said}, and {plural(unused, 'completion token')} paid that no document has." if unused > 0 else f"{said}."


def _checked(checked: Checked) -> str:
    """A sentence with a space before it; empty if nothing could be compared here."""
    parts = []
    if checked.files is not None:
        parts.append(f"{plural(checked.files, 'output file')} by name and size")
    if checked.inputs:
        parts.append(f"{plural(checked.inputs, 'input file')} by size and samples")
    return f" Checked: {' and '.join(parts)}, none is gone or changed." if parts else ""


def _count(root: Path) -> tuple[DocumentCounts, int]:
    """The documents by outcome and the number of output files, of all ranks and their retries.

    Raises:
        CheckpointCorrupt: the commits contradict each other.
    """
    counts, files = DocumentCounts(), 0
    for folder in _folders(root):
        for commit in read_commits(folder / COMMITS).values():
            counts.add(commit.counts)
            files += len(commit.files)
            if folder.parent != root:  # of a retry: they were read, and dead letters, before
                counts.read -= commit.counts.read
                counts.dead -= commit.counts.read
    if counts.dead < 0 or counts.written + counts.dropped + counts.dead != counts.read:
        raise CheckpointCorrupt(
            f"The commits in {root} contradict each other: {plural(counts.read, 'document')} read, {counts.written} "
            f"written, {counts.dropped} dropped, {plural(counts.dead, 'dead letter')}. Do not use the output before "
            f"you have run: {_verify(root)}"
        )
    return counts, files


def _folders(root: Path) -> Iterator[Path]:
    """Those of all ranks, and of their retries."""
    for parent in (root, *sorted(root.glob(RETRIES))):
        if parent == root or retry_number(parent.name) is not None:
            yield from (rank_folder(parent, rank) for rank in rank_numbers(parent))


def _verify(checkpoints: Path | str) -> str:
    return f"{shlex.join(['datatrove-ckpt', 'verify', str(checkpoints)])} --full"


def _next_step(step: InferenceRunner, counts: DocumentCounts, command: str) -> str:
    if counts.dead:
        retry = "" if "--retry-dead-letters" in command.split() else " --retry-dead-letters"
        return f"To retry the dead letters: {command}{retry}"
    return f"To check the files: {_verify(_typed(step))}"


def _typed(step: InferenceRunner) -> str:
    """The checkpoint folder as a shell takes it: the setting, or, if that has ``~`` or a variable, where it is."""
    given = str(step.checkpoints_local_dir)
    return str(step.checkpoints_root) if given.startswith("~") or "$" in given else given
