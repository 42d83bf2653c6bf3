"""Compares the files in the output folder with the commits.

Content is streamed; the listing is in memory.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

from datatrove.io import DataFolder

from datatrove_ckpt.checkpoint.commits import OutputFile
from datatrove_ckpt.checkpoint.layout import HOME, OWNER, rank_folder
from datatrove_ckpt.checkpoint.ledger import RankLedger, Want, name_place, read_rank
from datatrove_ckpt.common.retrying import failure_line, file_system_call, http_status
from datatrove_ckpt.errors import OutputFailed, OutputMismatch
from datatrove_ckpt.maintenance.findings import REDO_KINDS, CommittedChunk, Report
from datatrove_ckpt.maintenance.where import looks_like_mirror
from datatrove_ckpt.output.committed import (
    STRAY_ADVICE,
    FoundFiles,
    content_hash,
    file_problem,
    list_files,
    published_names,
)
from datatrove_ckpt.output.formats import format_of_file
from datatrove_ckpt.output.hub_uploads import HubReads
from datatrove_ckpt.output.names import STAGING, output_pattern, plain, rank_and_chunk
from datatrove_ckpt.output.owner import Homes, OutputOwnership
from datatrove_ckpt.output.stoppable import StoppableCalls, storage_advice

_OF_ANOTHER_NAME = (
    "No file of this run has such a name. Move it out of the output folder, or "
    "delete it if nothing else needs it."
)
_STAGED = (
    "a process on its way to publish has left it, unless a task works just now. Remove it, since "
    "readers of the folder may take it for output."
)
_OF_ANOTHER_JOB = (
    "Another job has written it, or one whose checkpoint is lost: run refuses it. Choose another "
    "output folder, bring that checkpoint back, or delete it if nothing else needs it."
)


def check_output(report: Report, full: bool, folder_is_given: bool) -> None:
    """Adds the problems of the output files to the report.

    Args:
        full: also read the files.
        folder_is_given: the user named the output folder, so if it does not exist, its files are
            missing.
    """
    try:
        is_owned(report)
    except OutputMismatch as refusal:
        report.add_problem("owner", str(refusal), path=report.output)
        return
    found = _list(report, folder_is_given)
    if found is None:
        return
    names = {path for path in found.sizes if not _is_ours(report, path)}
    committed = _check_duplicates(report)
    for chunk in report.chunks:
        _check_chunk(report, chunk, found, full)
    uncommitted = _Uncommitted(report)
    for path in sorted(names - committed):
        uncommitted.check(path)


def _list(report: Report, folder_is_given: bool) -> FoundFiles | None:
    committed: dict[str, OutputFile] = {
        plain(file.path): file for chunk in report.chunks for file in chunk.files
    }
    look = partial(list_files, report.folder, committed)
    try:
        with file_system_call():
            if report.hub is not None:
                found = HubReads(report.hub, StoppableCalls()).listed(look, committed.values())
            else:
                found = look()
            is_there = bool(found.sizes) or (report.hub is None and report.folder.exists(""))
    except (OSError, OutputFailed) as failure:
        error = failure.__cause__ or failure
        advice = storage_advice if report.hub is None else report.hub.advice
        report.add_problem(
            "output", f"{report.output} cannot be listed: {failure_line(error)}. {advice(error)}"
        )
        return None
    if not is_there and not folder_is_given and report.sums.numbers.files:
        report.add_problem(
            "output",
            f"the output folder {report.output} does not exist. If it was moved, give its place "
            "with --output; if it is lost, give the same folder with --output, and all its files "
            "count as missing.",
            path=report.output,
        )
        return None
    return found


def is_owned(report: Report) -> bool:
    """Whether the output folder is known to belong to the run.

    Raises OutputMismatch if it belongs to another one.
    """
    # An earlier release's run, or a copy of a mirror.
    if not (report.checkpoints / HOME).exists():
        return False
    homes = Homes(report.checkpoints, None)
    try:
        owned = [
            OutputOwnership(report.folder, template, homes).check() for template in report.templates
        ]
    except OSError:
        return False  # the listing fails, too, and explains why
    return all(owned)


def _is_ours(report: Report, path: str) -> bool:
    if OWNER in path:  # of a bucket's root, which has no place beside it, or of a folder below
        return True
    if not report.folder.is_local():
        return False
    return Path(report.folder.resolve_paths(path)).is_relative_to(report.checkpoints.absolute())


def _check_duplicates(report: Report) -> set[str]:
    claims: dict[str, list[CommittedChunk]] = defaultdict(list)
    for chunk in report.chunks:
        for file in chunk.files:
            claims[plain(file.path)].append(chunk)
    for path, claimants in claims.items():
        if len(claimants) > 1:
            names = " and by ".join(str(chunk) for chunk in claimants)
            message = (
                f"{path} is named by {names}. One overwrote the other: start one of them over."
            )
            report.add_problem("duplicate", message, claimants[0].rank, claimants[0].index, path)
    return set(claims)


def _check_chunk(report: Report, chunk: CommittedChunk, found: FoundFiles, full: bool) -> None:
    is_right = True
    for file in chunk.files:
        wrong = _wrong(report, file, found, full)
        if wrong is None:
            continue
        is_right = False
        kind, text = wrong
        message = f"{file.path} {text}."
        if kind in REDO_KINDS:
            message += f" To redo it: {report.repair_command}, then run again."
        report.add_problem(kind, message, chunk.rank, chunk.index, file.path)
    # On the hub, a footer costs requests, and the hash suffices.
    if full and is_right and report.hub is None:
        _check_documents(report, chunk)


def _wrong(
    report: Report, file: OutputFile, found: FoundFiles, full: bool
) -> tuple[str, str] | None:
    if not found.is_right(file):
        return file_problem(file, found.size(file))
    if not full and plain(file.path) not in found.touched:
        return None
    try:
        with file_system_call():
            actual = content_hash(report.folder, file.path)
    except OSError as error:
        if isinstance(error, FileNotFoundError) or (
            report.hub is not None and http_status(error) == 404
        ):
            return "missing", "is missing"
        return "output", f"cannot be read: {failure_line(error)}"
    if actual != file.xxh128:
        return (
            "altered",
            f"is altered: the xxh128 of its content is {actual} instead of {file.xxh128}",
        )
    return None


def _check_documents(report: Report, chunk: CommittedChunk) -> None:
    found = None
    if chunk.documents is not None:
        with suppress(ImportError, ValueError, OSError, EOFError):
            found = sum(_count_documents(report.folder, file.path) for file in chunk.files)
    if found is None:
        report.uncounted.add(str(chunk.rank.run.get("output_writer")))
    elif found != chunk.documents:
        message = (
            f"its output files hold {found} documents instead of the {chunk.documents} that "
            "were committed."
        )
        report.add_problem("documents", f"{message} Please report this.", chunk.rank, chunk.index)


def _count_documents(folder: DataFolder, path: str) -> int:
    """Raises ValueError if the file's format is unknown."""
    known = format_of_file(path)
    if known is None:
        raise ValueError(path)
    with known.open(folder, path) as file:
        return known.count(file)


class _Uncommitted:
    """Separates files that a run will still commit from foreign files."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._committed = {(*chunk.rank.key, chunk.index) for chunk in report.chunks}
        self._ranks = {rank.key: rank for rank in report.ranks}
        self._look_again = cache(partial(_look_again, report.checkpoints))
        self._published = cache(partial(published_names, report.checkpoints))
        self._patterns = [output_pattern(template) for template in report.templates if template]

    def check(self, path: str) -> None:
        if not self._patterns:
            return  # no run.json can be read
        if path.startswith(f"{STAGING}/"):
            self._report.add_problem("foreign", f"{path}: {_STAGED}", path=path)
            return
        matches = [pattern.fullmatch(path) for pattern in self._patterns]
        advice = f"{STRAY_ADVICE}."
        if not any(matches):
            advice = _OF_ANOTHER_NAME
            if self._report.hub is not None:
                return  # a repository holds a card, and other jobs' files
        for match in filter(None, matches):
            key, chunk_index = rank_and_chunk(match)
            rank = self._ranks.get(key)
            if rank is not None and rank.state == "damaged":
                return  # it may belong to a lost commit
            now, files = self._look_again(key)
            if path in files:
                return  # committed meanwhile
            rank = rank or now
            if rank is None:
                if not key[0] and 0 < self._report.tasks <= key[1]:
                    continue  # it ran with more tasks before
                place = name_place(*key)
                advice = (
                    f"It is named like a file of {place}, which has no checkpoint here: keep "
                    "it until that is found."
                )
            elif rank.state != "finished":
                published = self._published(key[1])
                if published is not None and path not in published:
                    advice = _of_another_job(self._report.checkpoints)
                elif (*key, chunk_index) not in self._committed:
                    message = f"{path} is published but not committed yet."
                    self._report.add_problem("unfinished", message, rank, chunk_index, path)
                    return
        self._report.add_problem("foreign", f"{path} is named by no commit. {advice}", path=path)


def _of_another_job(checkpoints: Path) -> str:
    begun = Homes(checkpoints, None).kept
    if begun is not None and ("://" in begun.home or looks_like_mirror(Path(begun.home))):
        return (
            f"Another node may have continued the task. The run's mirror, {begun.home}, knows: "
            "verify that, and keep the file until then."
        )
    return _OF_ANOTHER_JOB


def _look_again(checkpoints: Path, key: tuple[str, int]) -> tuple[RankLedger | None, set[str]]:
    folder = rank_folder(checkpoints / key[0], key[1])
    if not folder.exists():
        return None, set()
    now = read_rank(*key, folder, Want.COMMITS)
    return now, {file.path for commit in now.commits.values() for file in commit.files}
