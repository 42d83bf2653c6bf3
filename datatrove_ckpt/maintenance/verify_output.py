"""Compares the output folder with the commits: missing, changed and foreign files.

The names, sizes and hashes of all committed files are in memory, and so is the folder's listing. Content is streamed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import orjson
import xxhash

from datatrove_ckpt.checkpoint.commits import OutputFile
from datatrove_ckpt.checkpoint.layout import NOTHING_PUBLISHED, OTHERS_FILES, rank_folder
from datatrove_ckpt.errors import CheckpointError, OutputFailed
from datatrove_ckpt.maintenance.findings import REDO_KINDS, CommittedChunk, Report
from datatrove_ckpt.maintenance.inspect import RankFolder, name_place, summarise
from datatrove_ckpt.output.formats import format_of_file
from datatrove_ckpt.output.hub import HubFolder
from datatrove_ckpt.output.hub_commits import HubUploads, looks_for
from datatrove_ckpt.output.listing import FoundFiles, file_problem, stray_advice
from datatrove_ckpt.output.names import STAGING, output_pattern, plain, rank_and_chunk
from datatrove_ckpt.output.stoppable import StoppableCalls
from datatrove_ckpt.retrying import failure_line, file_system_call, http_status

_BLOCK = 1 << 20
_OF_ANOTHER_NAME = (
    "No file of this run has such a name. Move it out of the output folder, or delete it if nothing else needs it."
)
_OF_ANOTHER_JOB = (
    "Another job has written it, or one whose checkpoint is lost: run refuses it. Choose another output_folder, bring "
    "that checkpoint back, or delete it if nothing else needs it."
)


def check_output(report: Report, full: bool, folder_is_given: bool) -> None:
    """Adds the problems of the output files to the report.

    Args:
        full: also read the files.
        folder_is_given: the user named the output folder, so if it does not exist, its files are missing.
    """
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
    """Every file in the output folder; None if the folder cannot be listed."""
    folder = report.folder
    try:
        with file_system_call():
            if report.hub is not None:
                found = _list_hub(report)
                there = bool(found.sizes)
            else:
                folder.invalidate_cache()
                listed = folder.find("", detail=True)
                found = FoundFiles({path: one["size"] for path, one in listed.items() if one["type"] != "directory"})
                there = bool(found.sizes) or folder.exists("")
    except (OSError, OutputFailed) as failure:
        error = failure.__cause__ or failure if isinstance(failure, OutputFailed) else failure
        report.add_problem("output", f"{report.output} cannot be listed: {failure_line(error)}. {_list_advice(error)}")
        return None
    if not there and not folder_is_given and report.number_of_files:
        report.add_problem(
            "output",
            f"the output folder {report.output} does not exist. If it was moved, give its place with --output; if it "
            "is lost, give the same folder with --output, and all its files count as missing.",
            path=report.output,
        )
        return None
    return found


def _list_advice(error: BaseException) -> str:
    if http_status(error) == 404:
        return "The repository may be gone, or have another name: restore it, or give the output's place with --output."
    if http_status(error) in (401, 403):
        return "Check the credentials and what they allow; for the hub, set HF_TOKEN or run hf auth login."
    return "Check the network and the server, and run the same command again."


def _list_hub(report: Report) -> FoundFiles:
    """As ``_list``. A folder on the hub exists with its first file, and may be listed as it was a moment ago.

    Raises:
        OutputFailed: it cannot be listed, or the hub has not answered for five minutes.
    """
    hub = cast(HubFolder, report.hub)
    found = FoundFiles({})
    uploads = HubUploads(hub, StoppableCalls())
    found.show(uploads.looked("cannot be listed", hub.files))
    lost = [file for chunk in report.chunks for file in chunk.files if not found.is_right(file)]
    found.show(uploads.look_again(lost, looks_for({chunk.rank.folder for chunk in report.chunks})))
    return found


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


def _check_chunk(report: Report, chunk: CommittedChunk, found: FoundFiles, full: bool) -> None:
    intact = True
    for file in chunk.files:
        wrong = _wrong(report, file, found, full)
        if wrong is not None:
            kind, text = wrong
            advice = report.redo_advice if kind in REDO_KINDS else ""
            report.add_problem(kind, f"{file.path} {text}.{advice}", chunk.rank, chunk.index, file.path)
            intact = False
    # On the hub, a footer costs some requests of the limit; that the content is the committed one says as much.
    if full and intact and report.hub is None:
        _check_documents(report, chunk)


def _wrong(report: Report, file: OutputFile, found: FoundFiles, full: bool) -> tuple[str, str] | None:
    """The kind and the description of a file's problem; None if it has none."""
    if not found.is_right(file):
        return file_problem(file, found.size(file))
    if not full:
        return None
    try:
        with file_system_call():
            actual = _content_hash(report, file.path)
    except FileNotFoundError:
        return "missing", "is missing"
    except OSError as error:
        if report.hub is not None and http_status(error) == 404:
            return "missing", "is missing"
        return "output", f"cannot be read: {failure_line(error)}"
    if actual != file.xxh128:
        return "altered", f"is altered: the xxh128 of its content is {actual} instead of {file.xxh128}"
    return None


def _content_hash(report: Report, path: str) -> str:
    content = xxhash.xxh3_128()
    for block in _blocks(report, path):
        content.update(block)
    return str(content.hexdigest())


def _blocks(report: Report, path: str) -> Iterator[bytes]:
    if report.hub is not None and not report.hub.is_bucket:
        yield from report.hub.blocks(path, _BLOCK)
        return
    with report.folder.open(path, "rb") as file:
        while block := file.read(_BLOCK):
            yield block


def _check_documents(report: Report, chunk: CommittedChunk) -> None:
    countable = chunk.documents is not None
    numbers = [_count_documents(report.folder, file.path) for file in chunk.files] if countable else [None]
    if None in numbers:
        report.uncounted.add(str(chunk.rank.identity.get("output_writer")))
        return
    found = sum(number or 0 for number in numbers)
    if found != chunk.documents:
        message = f"its output files hold {found} documents instead of the {chunk.documents} that were committed."
        report.add_problem("documents", f"{message} Please report this.", chunk.rank, chunk.index)


def _count_documents(folder: Any, path: str) -> int | None:
    """The number of documents in a file; None if the file's format is unknown here."""
    try:
        if (known := format_of_file(path)) is not None:
            with folder.open(path, "rb", compression=None if known.is_compressed else "infer") as file:
                return known.count(file)
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
        self._later: dict[tuple[str, int], tuple[str, set[str]]] = {}
        self._tasks = report.tasks
        self._patterns = [
            output_pattern(template) for template in sorted({_template(rank) for rank in report.ranks} - {""})
        ]

    def check(self, path: str) -> None:
        if not self._patterns:
            return  # no run.json can be read, so no file can be told from a foreign one
        matches = [match for pattern in self._patterns if (match := pattern.fullmatch(path))]
        advice = f"{stray_advice(1)}." if matches else _OF_ANOTHER_NAME
        if not matches and self._report.hub is not None:
            return  # a repository holds other things, too: a card, other jobs' files
        for match in matches:
            key, chunk_index = rank_and_chunk(match)
            state = self._states.get(key)
            if state == "damaged":
                return  # it may belong to a lost commit; the damage itself is reported
            now, files = self._look_again(key)
            if path in files:
                return  # committed meanwhile
            state = state or now
            if not state:
                if not key[0] and 0 < self._tasks <= key[1]:
                    continue  # the job has fewer ranks, as far as their checkpoints tell: it ran with more tasks before
                place = name_place(*key)
                advice = (
                    f"It is named like a file of {place}, which has no checkpoint here: keep it until that is found."
                )
            elif key in self._doubtful:
                advice = "Keep it: nothing shows how many commits this finished rank had, so it may be of a lost one."
            elif state != "finished" and _is_of_another_job(self._ranks[key], path):
                advice = _OF_ANOTHER_JOB
            elif state != "finished" and (*key, chunk_index) not in self._committed:
                message = f"{path} is published but not committed yet."
                self._report.add_unfinished(message, self._ranks[key], chunk_index, path)
                return
        self._report.add_problem("foreign", f"{path} is named by no commit. {advice}", path=path)

    def _look_again(self, key: tuple[str, int]) -> tuple[str, set[str]]:
        """The state of a rank, and the files that it has committed: it may have gone on while others were looked at."""
        root, number = key
        rank = self._ranks.setdefault(key, RankFolder(*key, rank_folder(self._report.checkpoints / root, number)))
        if key not in self._later and rank.folder.exists():
            summary, commits = summarise(rank)
            self._later[key] = summary.state, {file.path for commit in commits.values() for file in commit.files}
        return self._later.get(key, ("", set()))


def _is_of_another_job(rank: RankFolder, path: str) -> bool:
    """Whether the rank has published nothing yet, or has found this file in its way, and ended."""
    if (rank.folder / NOTHING_PUBLISHED).exists():
        return True
    with suppress(OSError, ValueError):  # there is none, or it has just been removed
        return path in orjson.loads((rank.folder / OTHERS_FILES).read_bytes())
    return False


def _template(rank: RankFolder) -> str:
    try:
        return str(rank.identity.get("output_filename", ""))
    except CheckpointError:
        return ""
