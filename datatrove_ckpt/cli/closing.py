"""The last line of ``run``: what all ranks and all attempts have done, and what to do next."""

from __future__ import annotations

import shlex
from pathlib import Path

from datatrove_ckpt.checkpoint.commits import DocumentCounts
from datatrove_ckpt.checkpoint.layout import SHARD, rank_folder, rank_numbers
from datatrove_ckpt.errors import CheckpointCorrupt, InputError
from datatrove_ckpt.formatting import plural, plural_is
from datatrove_ckpt.maintenance.read_state import read_run_state
from datatrove_ckpt.maintenance.run_state import RunState
from datatrove_ckpt.maintenance.where import Place
from datatrove_ckpt.preflight.before_run import Checked
from datatrove_ckpt.readers.shard import ShardRecord, SkippedLines
from datatrove_ckpt.runner import InferenceRunner


def closing_line(step: InferenceRunner, command: str, checked: Checked) -> str:
    """The closing line, over all ranks, their retries and all attempts, with what was checked."""
    root = step.checkpoints_root
    state = read_run_state(Place(str(root), root, str(root)))
    counts = _counts(state, root)
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
    folder = step.output_writer.output_folder.resolve_paths("")
    if not counts.read:
        return f"There are no documents in the input, so there is no output in {folder}.{_checked(checked)}"
    work = f"{skipped}{counts.odd_answers}{_attempts(state)}"
    return (
        f"{counts.written} of {plural_is(counts.read, 'document')} in {plural(state.together.files, 'file')} in "
        f"{folder} ({counts.dropped} dropped, {plural(counts.dead, 'dead letter')}), "
        f"for {plural(counts.requests, 'request')} with {counts.prompt_tokens} prompt and "
        f"{plural(counts.completion_tokens, 'completion token')}.{work}{_checked(checked)} "
        f"{_next_step(step, counts, command)}"
    )


def _counts(state: RunState, root: Path) -> DocumentCounts:
    """The documents by outcome, of all ranks and their retries.

    Raises:
        CheckpointCorrupt: a rank is damaged, or the commits contradict each other.
    """
    if damaged := [rank for rank in state.troubled if rank.state == "damaged"]:
        raise CheckpointCorrupt(damaged[0].reason)
    counts = state.together.counts
    if counts.dead < 0 or counts.written + counts.dropped + counts.dead != counts.read:
        raise CheckpointCorrupt(
            f"The commits in {root} contradict each other: {plural(counts.read, 'document')} read, {counts.written} "
            f"written, {counts.dropped} dropped, {plural(counts.dead, 'dead letter')}. Do not use the output before "
            f"you have run: {_verify(root)}"
        )
    return counts


def _attempts(state: RunState) -> str:
    """What all attempts sent, as a sentence with a space before it; empty if every rank had one, without a repetition.

    A history does not hold the last minute of an attempt that was killed.
    """
    totals, ranks = state.together, len(state.ranks) + len(state.retries)
    sent, attempts = totals.work, max(ranks, totals.attempts)
    if not sent.sent or (attempts == ranks and not sent.retries + sent.resent):
        return ""
    at_least, again = "at least " if attempts > ranks else "", sent.retries + sent.resent
    were = "was" if sent.sent == 1 else "were"
    said = (
        f" In {plural(attempts, 'attempt')} of {plural(len(state.ranks), 'task')}, {at_least}"
        f"{plural(sent.sent, 'request')} {were} sent{f', {again} of them again' if again else ''}"
    )
    unused = sent.completion_tokens - totals.counts.completion_tokens
    return f"{said}, and {plural(unused, 'completion token')} paid that no document has." if unused > 0 else f"{said}."


def _checked(checked: Checked) -> str:
    """A sentence with a space before it; empty if nothing could be compared here."""
    parts = []
    if checked.files is not None:
        parts.append(f"{plural(checked.files, 'output file')} by name and size")
    if checked.inputs:
        parts.append(f"{plural(checked.inputs, 'input file')} by size and samples")
    return f" Checked: {' and '.join(parts)}, none is gone or changed." if parts else ""


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
