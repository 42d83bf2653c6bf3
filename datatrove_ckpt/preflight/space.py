"""How much space a run needs: at one time for checkpoints and output, and for the whole output in the end."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datatrove_ckpt.checkpoint.open_checkpoint import MAX_PUBLISHING
from datatrove_ckpt.formatting import byte_size, plural
from datatrove_ckpt.output.formats import FORMATS
from datatrove_ckpt.preflight.checks import Need, PreflightCheck, State
from datatrove_ckpt.preflight.input_checks import Sample
from datatrove_ckpt.preflight.probes import existing_part
from datatrove_ckpt.preflight.shares import GROWTH
from datatrove_ckpt.runner import InferenceRunner

# run.json, commits.jsonl, the database and its log, last_chunk, dead letters, lock, a few journals and staged files.
_FILES_PER_RANK = 20
_BYTES_PER_TOKEN = 4
_COMPRESSED = (".gz", ".zst", *(one.suffix for one in FORMATS if one.is_compressed))


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


def check_space(
    subject: str, folder: Path, step: InferenceRunner, sample: Sample, at_most: int | None, documents_kept: bool
) -> PreflightCheck:
    """Compares the free space with an estimate of the whole output, less what an earlier run has written.

    The least is the documents of the input without answers, the most has answers of ``max_tokens`` each.

    Args:
        at_most: documents that the reader's ``limit`` allows; None: all.
        documents_kept: each document of the input is in the output, as far as can be told.
    """
    number = min(sample.documents, at_most) if at_most is not None else sample.documents
    answer, smaller = answer_bytes(step), GROWTH if _is_compressed(step.output_writer) else 1
    there = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else 0
    least = max(0, int(number * sample.mean / smaller) - there) if documents_kept else 0
    most = max(0, int(number * (sample.mean + (answer or 0)) / smaller) - there)
    status = os.statvfs(existing_part(folder))
    free = status.f_bavail * status.f_frsize
    state: State = "problem" if free < least else "warning" if free < most else "ok"
    about = "" if sample.is_all else "about "
    text = f"{byte_size(free)} free; the whole output is {byte_size(least)} to {byte_size(most)} more: "
    text += f"{about}{plural(number, 'document')} of {byte_size(sample.mean)}, "
    text += "answers not counted (max_tokens is not set)" if answer is None else f"answers up to {byte_size(answer)}"
    if sample.compressed and not sample.is_all:
        text += f", compressed input counted {GROWTH} times"
    if smaller > 1:
        text += f", compressed output by 1/{smaller}"
    advice = "" if state == "ok" else " Free some space, or choose another output_folder."
    return PreflightCheck(state, subject, "space", f"{text}.{advice}")


def _is_compressed(writer: Any) -> bool:
    return writer.output_mg.compression not in (None, "infer") or writer.output_filename.template.endswith(_COMPRESSED)
