"""``datatrove-ckpt migrate``: takes over a run of datatrove's own runner, and says what becomes of each document.

Exit codes: 0 taken over, or with --dry-run could be; 1 it cannot be; 2 a mistake in the file or on the command line.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from datatrove_ckpt.cli.execution import explain
from datatrove_ckpt.cli.printing import print_json, say
from datatrove_ckpt.cli.yaml_config import make_executor
from datatrove_ckpt.formatting import plural, safe_repr, safe_text
from datatrove_ckpt.preflight.migrated_rank import LACKS, Chunk, Rank
from datatrove_ckpt.preflight.migration import Findings, Migration
from datatrove_ckpt.preflight.run_plan import RunPlan
from datatrove_ckpt.process.task_errors import log_disabled

_SHOWN = 5


def migrate(arguments: argparse.Namespace) -> int:
    """Prints what is done, or would be. Returns the exit code."""
    executor = make_executor(arguments.config, arguments.overrides)
    migration = Migration(
        executor,
        Path(arguments.folder).expanduser(),
        arguments.logging_dir,
        arguments.lacking_are_dropped,
        arguments.any_text,
        arguments.dry_run,
    )
    try:
        with log_disabled("datatrove", "datatrove_ckpt"):
            findings = migration.run()
    except OSError as error:
        raise explain(error, RunPlan(executor)) from None
    if arguments.json:
        print_json({"dry_run": arguments.dry_run, **findings.to_json()})
    else:
        say("\n".join([*_lines(findings), *_closing(findings, arguments)]))
    return 0


def _lines(findings: Findings) -> Iterator[str]:
    for rank in findings.ranks:
        if rank.done:
            yield f"rank {rank.rank}: taken over before, or started here"
        else:
            yield from _rank_lines(rank)
        if rank.aside:
            yield f"  moved aside: {plural(len(rank.aside), 'output file')}: {_some(rank.aside)}"
    yield from (f"warning: {safe_text(warning)}" for warning in findings.warnings)


def _rank_lines(rank: Rank) -> Iterator[str]:
    finished = [chunk for chunk in rank.chunks if chunk.finished]
    written, dropped = (sum(getattr(chunk.counts, name) for chunk in finished) for name in ("written", "dropped"))
    if finished:
        yield (
            f"rank {rank.rank}: {plural(len(finished), 'finished chunk')} with {plural(written + dropped, 'document')} "
            f"({written} written, {dropped} dropped) {'stays as it is' if len(finished) == 1 else 'stay as they are'}"
        )
    else:
        yield f"rank {rank.rank}: no finished chunk"
    for chunk in rank.chunks:
        if not chunk.finished and (chunk.kept or chunk.problems or chunk.redone):
            yield from _chunk_lines(chunk)


def _chunk_lines(chunk: Chunk) -> Iterator[str]:
    new = len(chunk.left) - len(chunk.redone)
    yield (
        f"  chunk {chunk.index}: {chunk.kept} of {plural(chunk.counts.read, 'document')} kept, {new} not finished, "
        f"{len(chunk.redone)} processed again"
    )
    yield from (f"    {safe_text(problem)}" for problem in chunk.problems)
    yield from (f"    again: document {one.ordinal} {safe_repr(one.id)}: {one.why}" for one in chunk.redone)


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(safe_text, names[:_SHOWN])) + (
        f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    )


def _closing(findings: Findings, arguments: argparse.Namespace) -> Iterator[str]:
    new = [rank for rank in findings.ranks if not rank.done]
    chunks = [chunk for rank in new for chunk in rank.chunks]
    again = [left for chunk in chunks for left in chunk.redone]
    if new:
        yield (
            f"{plural(len(new), 'rank')}: {plural(sum(chunk.kept for chunk in chunks), 'document')} kept, "
            f"{plural(len(again), 'document')} processed again{' for the reasons above' if again else ''}"
        )
        yield "Requests of documents that datatrove's run had not finished are sent again."
    else:
        yield "Every rank was taken over before."
    if any(left.why == LACKS for left in again):
        yield "If your rollout drops documents (it returns None), --lacking-are-dropped counts them as dropped."
    command = shlex.join(["datatrove-ckpt", "run", arguments.config, *arguments.overrides])
    yield "Nothing was changed (--dry-run)." if arguments.dry_run else f"To continue: {command}"
