"""The output folder against the commits: what is missing, what is another, what is nobody's.

Every committed file's name, size and hash is in memory once, and so is the listing of the folder; content is streamed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from string import Template
from typing import Any

import xxhash

from datatrove_ckpt.checkpoint.commits import OutputFile
from datatrove_ckpt.errors import CheckpointCorrupt
from datatrove_ckpt.formatting import error_text
from datatrove_ckpt.maintenance.findings import CONDEMNING, CommittedChunk, Report
from datatrove_ckpt.maintenance.inspect import RankFolder
from datatrove_ckpt.output.chunk_output import STAGING
from datatrove_ckpt.remote_errors import io_errors

_BLOCK = 1 << 20
_NUMBERS = {"rank": r"\d{5,}", "chunk_index": r"(?:retry\d+_)?\d{5,}"}


def check_output(report: Report, full: bool, folder_is_given: bool) -> None:
    """Adds to the report what is wrong with the files of its chunks.

    Args:
        full: read the files, too.
        folder_is_given: the user named the output folder, so its absence means that the files are gone.
    """
    found = _list(report, folder_is_given)
    if found is None:
        return
    claimed = _check_claims(report)
    for chunk in report.chunks:
        _check_chunk(report, chunk, found, full)
    unclaimed = _Unclaimed(report)
    for path in sorted(found.keys() - claimed):
        unclaimed.check(path)


def _list(report: Report, folder_is_given: bool) -> dict[str, int] | None:
    """The size of every file of the output folder, or None if it cannot be told."""
    folder = report.folder
    try:
        folder.invalidate_cache()
        listed = folder.find("", detail=True)
        there = bool(listed) or folder.exists("")
    except io_errors() as error:
        report.add_problem("output", f"{report.output} cannot be listed: {error_text(error)}")
        return None
    if not there and not folder_is_given and report.number_of_files:
        report.add_problem(
            "output",
            f"{report.output}, where the output was written to, is not there. If it was moved, say where to with "
            "--output; if it is lost, name it with --output all the same, and every file of it is missing.",
            path=report.output,
        )
        return None
    found = {path: info["size"] for path, info in listed.items() if info["type"] != "directory"}
    return {path: size for path, size in found.items() if not _is_ours(report, path)}


def _is_ours(report: Report, path: str) -> bool:
    """Not output: staged files, and a checkpoint that lies inside the output folder."""
    if path.startswith(f"{STAGING}/"):
        return True
    if not report.folder.is_local():
        return False
    return Path(report.folder.resolve_paths(path)).is_relative_to(report.checkpoints.absolute())


def _check_claims(report: Report) -> set[str]:
    """The names of all committed files. Two commits that name one file overwrote each other."""
    claims: dict[str, list[CommittedChunk]] = defaultdict(list)
    for chunk in report.chunks:
        for file in chunk.files:
            claims[file.path].append(chunk)
    for path, claimants in claims.items():
        if len(claimants) > 1:
            names = " and by ".join(str(chunk) for chunk in claimants)
            message = f"{path} is claimed by {names}. One overwrote the other: start one of them over."
            report.add_problem("duplicate", message, claimants[0].rank, claimants[0].index, path)
    return set(claims)


def _check_chunk(report: Report, chunk: CommittedChunk, found: dict[str, int], full: bool) -> None:
    sound = True
    for file in chunk.files:
        wrong = _wrong(report.folder, file, found.get(file.path), full)
        if wrong is not None:
            kind, text = wrong
            advice = f" To make it again: {report.repair_command}, then run again." if kind in CONDEMNING else ""
            report.add_problem(kind, f"{file.path} {text}.{advice}", chunk.rank, chunk.index, file.path)
            sound = False
    if full and sound:
        _check_documents(report, chunk)


def _wrong(folder: Any, file: OutputFile, size: int | None, full: bool) -> tuple[str, str] | None:
    """Kind and text of what is wrong with a file."""
    if size is None:
        return "missing", "is missing"
    if size != file.size:
        kind = "truncated" if size < file.size else "grown"
        return kind, f"is {kind}: it has {size} bytes instead of {file.size}"
    if not full:
        return None
    try:
        actual = _content_hash(folder, file.path)
    except FileNotFoundError:
        return "missing", "is missing"
    except io_errors() as error:
        return "output", f"cannot be read: {error_text(error)}"
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
        message = f"its output files hold {found} documents, though {chunk.documents} were committed."
        report.add_problem("documents", f"{message} Please report this.", chunk.rank, chunk.index)


def _count_documents(folder: Any, path: str) -> int | None:
    """How many documents a file holds; None if that cannot be told from here."""
    try:
        if path.endswith(".parquet"):
            import pyarrow.parquet

            with folder.open(path, "rb") as file:
                return int(pyarrow.parquet.ParquetFile(file).metadata.num_rows)
        if re.search(r"\.jsonl(\.\w+)?$", path):
            with folder.open(path, "rb", compression="infer") as file:
                return sum(int(block.count(b"\n")) for block in iter(lambda: file.read(_BLOCK), b""))
    except (ImportError, ValueError, OSError, EOFError):  # a name that does not say what it holds, a codec not there
        return None
    return None


class _Unclaimed:
    """Tells files that a run has yet to commit from files that are nobody's."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._states = report.states
        self._committed = {(*chunk.rank.key, chunk.index) for chunk in report.chunks}
        self._ranks = {rank.key: rank for rank in report.ranks}
        self._patterns = [
            output_pattern(template) for template in sorted({_template(rank) for rank in report.ranks} - {""})
        ]

    def check(self, path: str) -> None:
        for match in (match for pattern in self._patterns if (match := pattern.fullmatch(path))):
            key, chunk_index = _writer(match.groupdict())
            state = self._states.get(key)
            if state == "damaged":
                return  # whose it is cannot be told any more; the damage itself is reported
            if state in ("running", "unfinished") and (*key, chunk_index) not in self._committed:
                message = f"{path} is published, but not committed yet."
                self._report.add_unfinished(message, self._ranks[key], chunk_index, path)
                return
        message = f"{path} is covered by no commit. This run needs it for nothing; remove it if nobody else does."
        self._report.add_problem("foreign", message, path=path)


def _template(rank: RankFolder) -> str:
    try:
        return str(rank.identity.get("output_filename", ""))
    except CheckpointCorrupt:
        return ""


def _writer(names: dict[str, str]) -> tuple[tuple[str, int], int]:
    """Key of the rank, and index of the chunk, that a file's name stands for."""
    retry, _, index = names["chunk_index"].rpartition("_")
    root = f"retry-{int(retry.removeprefix('retry')):05d}" if retry else ""
    return (root, int(names.get("rank") or 0)), int(index)


def output_pattern(template: str) -> re.Pattern[str]:
    """What matches the names that a writer's ``output_filename`` gives. A retry's chunks are called retry1_00000."""
    folder, slash, name = template.rpartition("/")
    seen: set[str] = set()
    # A writer with max_file_size numbers its files in front of their names.
    return re.compile(rf"{_expression(folder + slash, seen)}(?:\d{{3,}}_)?{_expression(name, seen)}")


def _expression(template: str, seen: set[str]) -> str:
    parts, end = [], 0
    for match in Template.pattern.finditer(template):
        parts.append(re.escape(template[end : match.start()]))
        parts.append(_field(match["named"] or match["braced"], seen))
        end = match.end()
    return "".join([*parts, re.escape(template[end:])])


def _field(name: str | None, seen: set[str]) -> str:
    if name is None:
        return re.escape("$")
    if name not in _NUMBERS:
        return ".*"
    if name in seen:
        return f"(?P={name})"
    seen.add(name)
    return f"(?P<{name}>{_NUMBERS[name]})"
