"""The last line of ``run``: what all ranks and all attempts have done, and what to do next."""

from __future__ import annotations

import shlex

from datatrove_ckpt.checkpoint.commits import DocumentCounts, read_commits
from datatrove_ckpt.checkpoint.layout import COMMITS, RETRIES, SHARD
from datatrove_ckpt.errors import InputError
from datatrove_ckpt.readers.shard import ShardRecord, SkippedLines
from datatrove_ckpt.runner import InferenceRunner


def closing_line(step: InferenceRunner, command: str) -> str:
    """The closing line, over all ranks and all attempts."""
    counts, files = DocumentCounts(), 0
    for log in sorted(step.checkpoints_root.glob(f"*/{COMMITS}")):
        for commit in read_commits(log).values():
            counts.add(commit.counts)
            files += len(commit.files)
    for log in sorted(step.checkpoints_root.glob(f"{RETRIES}/*/{COMMITS}")):
        for commit in read_commits(log).values():
            counts.written += commit.counts.written
            counts.dropped += commit.counts.dropped
            counts.dead += commit.counts.dead - commit.counts.read  # they were dead letters before
            counts.requests += commit.counts.requests
            files += len(commit.files)
    skipped = SkippedLines()
    for path in sorted(step.checkpoints_root.glob(f"*/{SHARD}")):
        record = ShardRecord.read(path)
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


def _next_step(step: InferenceRunner, counts: DocumentCounts, command: str) -> str:
    if counts.dead:
        retry = "" if "--retry-dead-letters" in command.split() else " --retry-dead-letters"
        return f"To retry the dead letters: {command}{retry}"
    return f"To check the files: {shlex.join(['datatrove-ckpt', 'verify', _typed(step)])} --full"


def _typed(step: InferenceRunner) -> str:
    """The checkpoint folder as a shell takes it: the setting, or, if that has ``~`` or a variable, where it is."""
    given = str(step.checkpoints_local_dir)
    return str(step.checkpoints_root) if given.startswith("~") or "$" in given else given
