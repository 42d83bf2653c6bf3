"""The last line of ``run``: what all ranks and all attempts have done, and what to do next."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from datatrove_ckpt.checkpoint.commits import Commit, DocumentCounts, read_commits
from datatrove_ckpt.checkpoint.layout import COMMITS, RETRIES, SHARD, rank_folder, rank_numbers, retry_number
from datatrove_ckpt.errors import CheckpointCorrupt, InputError
from datatrove_ckpt.readers.shard import ShardRecord, SkippedLines
from datatrove_ckpt.runner import InferenceRunner


def closing_line(step: InferenceRunner, command: str) -> str:
    """The closing line, over all ranks and all attempts."""
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
        f"{counts.written} of {counts.read} documents are in {files} files in "
        f"{step.output_writer.output_folder.resolve_paths('')} ({counts.dropped} dropped, {counts.dead} dead letters), "
        f"for {counts.requests} requests with {counts.prompt_tokens} prompt and {counts.completion_tokens} completion "
        f"tokens.{skipped} {_next_step(step, counts, command)}"
    )


def _count(root: Path) -> tuple[DocumentCounts, int]:
    """The documents by outcome and the number of output files, of all ranks and their retries.

    Raises:
        CheckpointCorrupt: the commits contradict each other.
    """
    counts, files = DocumentCounts(), 0
    for commit in _commits(root):
        counts.add(commit.counts)
        files += len(commit.files)
    for retry in sorted(root.glob(RETRIES)):
        for commit in _commits(retry) if retry_number(retry.name) is not None else ():
            counts.add(commit.counts)
            counts.read -= commit.counts.read  # they were read, and dead letters, before
            counts.dead -= commit.counts.read
            files += len(commit.files)
    if counts.dead < 0 or counts.written + counts.dropped + counts.dead != counts.read:
        raise CheckpointCorrupt(
            f"The commits in {root} contradict each other: {counts.read} documents were read, {counts.written} are "
            f"written, {counts.dropped} dropped, {counts.dead} dead letters. Do not use the output before you have "
            f"run: {_verify(root)}"
        )
    return counts, files


def _commits(root: Path) -> Iterator[Commit]:
    for rank in rank_numbers(root):
        yield from read_commits(rank_folder(root, rank) / COMMITS).values()


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
