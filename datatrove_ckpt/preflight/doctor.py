"""``datatrove-ckpt doctor``: checks the folders, remotes and server settings of an executor before it runs.

The checks change nothing; ``cli/preflight_commands.py`` prints them.
"""

from __future__ import annotations

import copy
import math
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datatrove.executor import LocalPipelineExecutor
from datatrove.io import get_datafolder
from datatrove.pipeline.readers.base import BaseDiskReader, BaseReader

from datatrove_ckpt.checkpoint.open_checkpoint import MAX_PUBLISHING
from datatrove_ckpt.documents import encode
from datatrove_ckpt.errors import CkptError
from datatrove_ckpt.formatting import byte_size, plural
from datatrove_ckpt.inference.servers.pool import check_servers
from datatrove_ckpt.preflight.checks import (
    Need,
    PreflightCheck,
    check_checkpoints,
    check_local_output,
    check_remote,
    within,
)
from datatrove_ckpt.preflight.probes import REMOTE_SECONDS
from datatrove_ckpt.runner import InferenceRunner

_SAMPLE_DOCUMENTS = 100
_SAMPLE_SECONDS = 2.0
# run.json, commits.jsonl, the database and its log, last_chunk, dead letters, lock, a few journals and staged files.
_FILES_PER_RANK = 20
_BYTES_PER_TOKEN = 4


def examine(executor: Any) -> list[PreflightCheck]:
    """Runs all checks for everything that the executor and its steps name."""
    checks = [check_remote("logging_dir", executor.logging_dir)]
    sample = Sample()
    several = sum(isinstance(step, InferenceRunner) for step in executor.pipeline) > 1
    for index, step in enumerate(executor.pipeline):
        place = f"pipeline[{index}] " if several else ""
        if isinstance(step, BaseReader):
            check, found = check_input(f"{place}input", step, waits=_waits(executor))
            checks.append(check)
            sample = sample if sample.number else found
        if isinstance(step, InferenceRunner):
            moves = not isinstance(executor, LocalPipelineExecutor)
            checks += _check_runner(place, step, sample, _ranks_at_once(executor), moves)
    return checks


def _waits(executor: Any) -> bool:
    """Whether the executor waits for another one, which will create its input."""
    return bool(getattr(executor, "depends", None) or getattr(executor, "depends_job_id", None))


def _ranks_at_once(executor: Any) -> int:
    workers = getattr(executor, "workers", -1)
    return min(executor.world_size, workers) if workers > 0 else int(executor.world_size)


def _check_runner(
    place: str, step: InferenceRunner, sample: Sample, ranks: int, moves: bool = False
) -> list[PreflightCheck]:
    checks = [check_server(f"{place}server", step.config)]
    output = step.output_writer.output_folder
    remote = step.checkpoints_remote_dir
    needs = estimate(
        sample,
        answer_bytes(step),
        step.records_per_chunk,
        step.config.max_concurrent_documents or 1,
        ranks,
        stages_remotely=not output.is_local(),
    )
    if step.checkpoints_local_dir is None:
        text = "none: a run that dies starts over. Set checkpoints_local_dir."
        checks.append(PreflightCheck("warning", f"{place}checkpoints", "folder", text))
    else:
        folder = Path(step.checkpoints_local_dir).absolute()
        subject = f"{place}checkpoints"
        checks += check_checkpoints(subject, folder, step.sync_seconds, needs.checkpoints, remote is not None, moves)
    if output.is_local():
        folder = Path(output.resolve_paths("")).absolute()
        template = step.output_writer.output_filename.template
        checks += check_local_output(f"{place}output", folder, template, needs.output, moves)
    else:
        checks.append(check_remote(f"{place}output", output))
    if remote is not None:
        checks.append(_check_mirror(f"{place}mirror", remote))
    return checks


def _check_mirror(subject: str, remote: Any) -> PreflightCheck:
    try:
        folder = get_datafolder(remote)
    except (ImportError, ValueError, OSError) as error:  # no such protocol, or its library is not installed
        return PreflightCheck("problem", subject, "reachable", f"checkpoints_remote_dir: {remote}: {error}")
    return check_remote(subject, folder, deletes=True)


def check_server(subject: str, config: Any) -> PreflightCheck:
    """Checks that what the server needs is installed and that its key is set. Starts nothing, sends nothing."""
    try:
        check_servers(config)
        if config.server_type == "endpoint":
            text = f"{', '.join(config.endpoint_urls)} is not contacted; its key is set, if it needs one."
        else:
            text = f"everything that {config.server_type} needs is installed here."
    except CkptError as error:
        return PreflightCheck("problem", subject, "ready", str(error))
    return PreflightCheck("ok", subject, "ready", text)


# Input ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """The first documents of the input.

    Attributes:
        number: how many were read.
        mean: their mean size in bytes, as a journal stores them.
        is_all: the input has no others.
    """

    number: int = 0
    mean: float = 0.0
    is_all: bool = False


def check_input(subject: str, reader: Any, waits: bool = False) -> tuple[PreflightCheck, Sample]:
    """Reads the first documents with a copy of the reader."""
    if waits:
        return PreflightCheck("ok", subject, "readable", "is not read: another executor will create it."), Sample()
    if not isinstance(reader, BaseDiskReader):
        return PreflightCheck("ok", subject, "readable", "is not read: only readers of files are tested."), Sample()
    where = reader.data_folder.resolve_paths("")
    try:
        sample = within(REMOTE_SECONDS, lambda: _read_some(copy.deepcopy(reader)), where)
    except Exception as error:  # whatever a reader, an adapter or a file system raises
        text = f"{where}: {type(error).__name__}: {str(error).rstrip('.')}. "
        text += "Correct the path, its permissions or the reader's arguments."
        return PreflightCheck("problem", subject, "readable", text), Sample()
    if not sample.number:
        text = f"{where} holds no documents for this reader. Check data_folder, glob_pattern and text_key."
        return PreflightCheck("problem", subject, "readable", text), sample
    which = "all" if sample.is_all else "the first"
    text = f"{where}: {which} {plural(sample.number, 'document')} read, {byte_size(sample.mean)} on average."
    return PreflightCheck("ok", subject, "readable", text), sample


def _read_some(reader: Any) -> Sample:
    sizes: list[int] = []
    deadline = time.monotonic() + _SAMPLE_SECONDS
    with closing(reader.run(None, rank=0, world_size=1)) as documents:
        for document in documents:
            sizes.append(len(encode(document)))
            if len(sizes) >= _SAMPLE_DOCUMENTS or time.monotonic() > deadline:
                return _sample(sizes, is_all=False)
    return _sample(sizes, is_all=True)


def _sample(sizes: list[int], is_all: bool) -> Sample:
    return Sample(len(sizes), sum(sizes) / len(sizes), is_all) if sizes else Sample()


# Space ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Needs:
    """The space that one runner needs."""

    checkpoints: Need
    output: Need


def answer_bytes(step: InferenceRunner) -> int | None:
    """The most bytes that the answers to one document may have; None without max_tokens.

    A rollout that sends several requests is counted as if it sent one.
    """
    params = (step.config.default_generation_params or {}) | (getattr(step.rollout_fn, "generation_params", None) or {})
    tokens = params.get("max_tokens") or params.get("max_completion_tokens")
    return tokens * _BYTES_PER_TOKEN * step.config.rollouts_per_document if isinstance(tokens, int) else None


def estimate(
    sample: Sample,
    answer: int | None,
    records_per_chunk: int,
    max_concurrent_documents: int,
    ranks: int,
    stages_remotely: bool,
) -> Needs:
    """The space that the checkpoint folder and a local output folder must have at one time.

    At least: one chunk per rank as a journal, without answers; nothing for output, which may be compressed. At most:
    with answers, both in the journal and in the request cache, for as many unfinished chunks as a rank can have (those
    waiting to be published, the one being published, the one being filled, and those with documents in progress), and
    one chunk per rank as uncompressed output.
    """
    inodes = _FILES_PER_RANK * ranks
    if not sample.number:
        unknown = Need(None, None, inodes, "no document could be read")
        return Needs(unknown, unknown)
    records, with_answer = records_per_chunk, sample.mean + (answer or 0)
    chunks = MAX_PUBLISHING + 2 + math.ceil(max_concurrent_documents / records_per_chunk)
    if sample.is_all:
        records, chunks = min(records, sample.number), min(chunks, math.ceil(sample.number / records))
    staged = int(ranks * records * with_answer)
    most = int(ranks * records * chunks * (with_answer + (answer or 0))) + (staged if stages_remotely else 0)
    basis = f"{plural(ranks, 'rank')} at once, chunks of {plural(records, 'document')} of {byte_size(sample.mean)}, "
    basis += "answers not counted (max_tokens is not set)" if answer is None else f"answers up to {byte_size(answer)}"
    here = f"{basis}, up to {plural(chunks, 'unfinished chunk')}"
    here += ", and a chunk each that is staged for its upload" if stages_remotely else ""
    return Needs(
        Need(int(ranks * records * sample.mean), most, inodes, here),
        Need(0, staged, 4 * ranks, f"{basis}, a chunk each; the whole output is more"),
    )
