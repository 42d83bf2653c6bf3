"""Compares the output folder with the commits: missing, changed and foreign files.

The names, sizes and hashes of all committed files are in memory, and so is the folder's listing. Content is streamed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import xxhash

from datatrove_ckpt.checkpoint.commits import OutputFile
from datatrove_ckpt.errors import CheckpointError
from datatrove_ckpt.maintenance.findings import REDO_KINDS, CommittedChunk, Report
from datatrove_ckpt.maintenance.inspect import RankFolder, name_place
from datatrove_ckpt.output.committed import size_problem
from datatrove_ckpt.output.names import STAGING, output_pattern, plain, rank_and_chunk
from datatrove_ckpt.remote_errors import failure_text, file_system_call

_BLOCK = 1 << 20


def check_output(report: Report, full: bool, folder_is_given: bool) -> None:
    """Adds the problems of the output files to the report.

    Args:
        full: also read the files.
        folder_is_given: the user named the output folder, so if it does not exist, its files are missing.
    """
    found = _list(report, folder_is_given)
    if found is None:
        return
    committed = _check_duplicates(report)
    for chunk in report.chunks:
        _check_chunk(report, chunk, found, full)
    uncommitted = _Uncommitted(report)
    for path in sorted(found.keys() - committed):
        uncommitted.check(path)


def _list(report: Report, folder_is_given: bool) -> dict[str, int] | None:
    """The size of every file in the output folder by path; None if the folder cannot be listed."""
    folder = report.folder
    try:
        with file_system_call():
            folder.invalidate_cache()
            listed = folder.find("", detail=True)
            there = bool(listed) or folder.exists("")
    except OSError as error:
        report.add_problem("output", f"{report.output} cannot be listed: {failure_text(error)}")
        return None
    if not there and not folder_is_given and report.number_of_files:
        report.add_problem(
            "output",
            f"the output folder {report.output} does not exist. If it was moved, give its place with --output; if it "
            "is lost, give the same folder with --output, and all its files count as missing.",
            path=report.output,
        )
        return None
    found = {path: info["size"] for path, info in listed.items() if info["type"] != "directory"}
    return {path: size for path, size in found.items() if not _is_ours(report, path)}


def _is_ours(report: Report, path: str) -> bool:
    """Whether a file is ours but no output: a staged file, or a checkpoint inside the output folder."""
    if path.startswith(f"{STAGING}/"):
        return True
    if not report.folder.is_local():
        return False
    return Path(report.folder.resolve_paths(path)).is_relative_to(report.checkpoints.absolute())


def _check_duplicates(report: Report) -> set[str]:
    """The names of all committed files. Adds a problem if two commits name one file: one overwrote the other."""
    claims: dict[str, list[CommittedChunk]] = defaultdict(list)
    for chunk in report.chunks:
        for file in chunk.files:
            claims[plain(file.path)].append(chunk)
    for path, claimants in claims.items():
        if len(claimants) > 1:
            names = " and by ".join(str(chunk) for chunk in claimants)
            message = f"{path} is named by {names}. One overwrote the other: start one of them over."
            report.add_problem("duplicate", message, claimants[0].rank, claimants[0].index, path)
    return set(claims)


def _check_chunk(report: Report, chunk: CommittedChunk, found: dict[str, int], full: bool) -> None:
    intact = True
    for file in chunk.files:
        wrong = _wrong(report.folder, file, found.get(plain(file.path)), full)
        if wrong is not None:
            kind, text = wrong
            advice = f" To redo it: {report.repair_command}, then run again." if kind in REDO_KINDS else ""
            report.add_problem(kind, f"{file.path} {text}.{advice}", chunk.rank, chunk.index, file.path)
            intact = False
    if full and intact:
        _check_documents(report, chunk)


def _wrong(folder: Any, file: OutputFile, size: int | None, full: bool) -> tuple[str, str] | None:
    """The kind and the description of a file's problem; None if it has none."""
    if size != file.size:
        return size_problem(file, size)
    if not full:
        return None
    try:
        with file_system_call():
            actual = _content_hash(folder, file.path)
    except FileNotFoundError:
        return "missing", "is missing"
    except OSError as error:
        return "output", f"cannot be read: {failure_text(error)}"
    if actual != file.xxh128:
        return "altered", f"is altered: the xxh128 of its content is {actual} instead of {file.xxh128}"
    return None


def _content_hash(folder: Any, path: str) -> str:
    content = xxhash.xxh3_128()
    with folder.open(path, "rb") as file:
        while block := file.read(_BLOCK):
            content.update(block)
    return str(content.hexdigest())


def _check_documents(report: Report, chunk: CommittedChunk) -> None:
    numbers = [_count_documents(report.folder, file.path) for file in chunk.files]
    if chunk.documents is None or None in numbers:
        return
    found = sum(number or 0 for number in numbers)
    if found != chunk.documents:
        message = f"its output files hold {found} documents instead of the {chunk.documents} that were committed."
        report.add_problem("documents", f"{message} Please report this.", chunk.rank, chunk.index)


def _count_documents(folder: Any, path: str) -> int | None:
    """The number of documents in a file; None if the file's format is unknown here."""
    try:
        if path.endswith(".parquet"):
            import pyarrow.parquet

            with folder.open(path, "rb") as file:
                return int(pyarrow.parquet.ParquetFile(file).metadata.num_rows)
        if re.search(r"\.jsonl(\.\w+)?$", path):
            with folder.open(path, "rb", compression="infer") as file:
                return sum(int(block.count(b"\n")) for block in iter(lambda: file.read(_BLOCK), b""))
    except (ImportError, ValueError, OSError, EOFError):  # a name that does not tell the format, or a missing codec
        return None
    return None


class _Uncommitted:
    """Tells files that a run will still commit from foreign files."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._states = report.states
        self._doubtful = {(summary.root, summary.rank) for summary in report.summaries if summary.may_lack_commits}
        self._committed = {(*chunk.rank.key, chunk.index) for chunk in report.chunks}
        self._ranks = {rank.key: rank for rank in report.ranks}
        self._patterns = [
            output_pattern(template) for template in sorted({_template(rank) for rank in report.ranks} - {""})
        ]

    def check(self, path: str) -> None:
        if not self._patterns:
            return  # no run.json can be read, so no file can be told from a foreign one
        advice = "This run does not need it; remove it if nothing else needs it."
        for match in (match for pattern in self._patterns if (match := pattern.fullmatch(path))):
            key, chunk_index = rank_and_chunk(match)
            state = self._states.get(key)
            if state == "damaged":
                return  # it may belong to a lost commit; the damage itself is reported
            if state is None:
                place = name_place(*key)
                advice = (
                    f"It is named like a file of {place}, which has no checkpoint here: keep it until that is found."
                )
            elif key in self._doubtful:
                advice = "Keep it: nothing shows how many commits this finished rank had, so it may be of a lost one."
            elif state != "finished" and (*key, chunk_index) not in self._committed:
                message = f"{path} is published but not committed yet."
                self._report.add_unfinished(message, self._ranks[key], chunk_index, path)
                return
        self._report.add_problem("foreign", f"{path} is named by no commit. {advice}", path=path)


def _template(rank: RankFolder) -> str:
    try:
        return str(rank.identity.get("output_filename", ""))
    except CheckpointError:
        return ""
