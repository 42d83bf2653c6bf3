"""Compares the output files with the commits of all ranks. Only reads, and works during a run.

docs/cli.md has the kinds of problems. Commits are read before the output folder is listed, so a
chunk that a run finishes in between never counts as missing.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from posixpath import dirname

import orjson
from datatrove.io import DataFolder, get_datafolder

from datatrove_ckpt import errors
from datatrove_ckpt.checkpoint import identity, layout, run_limits
from datatrove_ckpt.checkpoint.checksummed_lines import Json, size_of
from datatrove_ckpt.checkpoint.commits import CommitsDamaged, OutputFile
from datatrove_ckpt.checkpoint.job_file import (
    RankBinding,
    compare_runs,
    name_tasks,
    recorded_output,
    removed_ranks,
)
from datatrove_ckpt.checkpoint.rank_summary import (
    CHECKED,
    Include,
    JobTotals,
    RankSummary,
    describe_chunk,
    misplaced,
    read_rank,
    read_ranks,
)
from datatrove_ckpt.common import retrying
from datatrove_ckpt.common.formatting import plural, repair_command
from datatrove_ckpt.generation.recorded_documents import RecordedDocuments, read_recorded
from datatrove_ckpt.output.arrow_types import Schema
from datatrove_ckpt.output.chunk_writing import read_schema, schema_mismatches
from datatrove_ckpt.output.file_names import STAGING, output_pattern, plain, rank_and_chunk
from datatrove_ckpt.output.formats import format_of_file, is_known
from datatrove_ckpt.output.hub import HubFolder
from datatrove_ckpt.output.interruptible_calls import InterruptibleCalls
from datatrove_ckpt.output.output_folder import (
    STRAY_ADVICE,
    OutputListing,
    OutputOwnership,
    RunOrigin,
    content_hash,
    file_problem,
    list_files,
    listed,
    published_names,
)
from datatrove_ckpt.process.gc_tuning import gc_paused
from datatrove_ckpt.readers.compressed import refuse_partial_files
from datatrove_ckpt.readers.shard_record import ShardRecord
from datatrove_ckpt.run_folder.run_location import RunLocation

REDO_KINDS = frozenset({"missing", "truncated", "grown", "altered"})
"""The kinds of problems after which ``repair`` lets a chunk be processed again."""


@dataclass(slots=True)
class Problem:
    """One problem; with the kind "unfinished" it is work that is not done yet."""

    kind: str
    message: str
    root: str = ""
    rank: int | None = None
    chunk_index: int | None = None
    path: str | None = None

    def __str__(self) -> str:
        place = describe_chunk(self.root, self.rank, self.chunk_index)
        if place:
            return f"{place}: {self.message}"
        return self.message


@dataclass(slots=True)
class CommittedChunk:
    """A chunk with a commit.

    Attributes:
        rows: the number of rows, usually documents, in its files; None: unknown.
    """

    rank: RankSummary
    index: int
    files: list[OutputFile]
    rows: int | None

    def __str__(self) -> str:
        return describe_chunk(*self.rank.key, self.index)


@dataclass
class VerifyReport:
    """The result of ``verify``.

    Attributes:
        ranks: the ranks, without their commits, which ``chunks`` has.
        uncounted: the writers whose rows cannot be counted.
    """

    location: RunLocation
    full: bool
    ranks: list[RankSummary] = field(default_factory=list)
    sums: JobTotals = field(default_factory=JobTotals)
    chunks: list[CommittedChunk] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    unfinished: list[Problem] = field(default_factory=list)
    uncounted: set[str] = field(default_factory=set)

    def add(self, problems: Iterable[Problem]) -> None:
        for problem in problems:
            if problem.kind == "unfinished":
                self.unfinished.append(problem)
            else:
                self.problems.append(problem)

    @property
    def checkpoints(self) -> Path:
        return self.location.folder

    @cached_property
    def output(self) -> str:
        return find_output(self.location)

    @cached_property
    def folder(self) -> DataFolder:
        return get_datafolder(self.output)

    @property
    def goal(self) -> errors.LimitReached | None:
        until = run_limits.recorded_limits(self.checkpoints).until
        return run_limits.Limits(until).reached(run_limits.RunTotals(self.sums.counts.written))

    @property
    def recorded(self) -> str:
        return recorded_output(self.checkpoints) or self.output

    @cached_property
    def job(self) -> Json:
        path = self.checkpoints / layout.JOB
        with suppress(errors.CheckpointError):
            if path.exists():
                return identity.read_run(path)
        return {}

    @property
    def templates(self) -> list[str]:
        return sorted(
            {
                str(rank.run["output_filename"])
                for rank in self.ranks
                if "output_filename" in rank.run
            }
        )

    @cached_property
    def hub(self) -> HubFolder | None:
        return HubFolder.of(self.folder)

    @property
    def tasks(self) -> int:
        tasks = [rank.run.get("tasks") or 0 for rank in self.ranks if not rank.root]
        return max(tasks, default=0)


# Ranks --------------------------------------------------------------------------------------------


@gc_paused()
def verify(location: RunLocation, full: bool = False) -> VerifyReport:
    report = VerifyReport(location, full)
    # The checkpoints alone may be named of a run folder.
    readers = _readers(location.logging_dir or str(location.folder.parent / "logs"))
    for rank in read_ranks(location.folder, CHECKED):
        report.ranks.append(rank)
        report.sums.add_rank(rank)
        report.add(_check_rank(report, rank))
        report.add(_check_input(rank, readers))
        rank.commits = {}
    report.add(_check_settings(report))
    report.add(_check_ranks(report))
    report.add(_check_recorded(report))
    report.add(check_output(report))
    if full:
        report.add(check_columns(report))
    return report


def find_output(location: RunLocation) -> str:
    """Returns the output folder of a run, as the user or its checkpoint names it.

    A copied or renamed run folder has its own output: the recorded folder may be another run's.

    Raises:
        ConfigError: nothing names it; or it is gone, and the checkpoint names another run's.
    """
    checkpoints = location.folder
    argument = location.given[0]
    recorded = recorded_output(checkpoints)
    named = location.named_output
    if named is None and (location.config or recorded is None):
        named = location.output
    if named is not None:
        return str(get_datafolder(named).resolve_paths(""))
    if recorded is not None:
        sibling = checkpoints.absolute().with_name("output")
        other = other_run(checkpoints, recorded)
        is_moved = other or (
            _is_in_run_folder(checkpoints, recorded) and not Path(recorded).is_dir()
        )
        if is_moved and sibling.is_dir():
            return str(sibling)
        if other:
            raise errors.ConfigError(
                f"the output of {argument} is gone ({recorded} belongs to {other}). Bring it "
                "back, or use --output."
            )
        return recorded
    for rank in read_ranks(checkpoints, Include.SETTINGS):
        if rank.damage is not None:
            raise rank.damage
    raise errors.ConfigError(f"{argument}: no run.json names the output folder. Use --output.")


def other_run(checkpoints: Path, recorded: str) -> Path | None:
    """Returns the run folder whose output is recorded here, if ours was copied or renamed."""
    there = Path(recorded).with_name("checkpoints")
    is_other = (
        _is_in_run_folder(checkpoints, recorded)
        and there.is_dir()
        and not there.samefile(checkpoints)
    )
    if is_other and any(there.glob(f"[0-9]*/{layout.RUN}")):
        return there.parent
    return None


def _is_in_run_folder(checkpoints: Path, recorded: str) -> bool:
    return (checkpoints.name, Path(recorded).name) == (
        "checkpoints",
        "output",
    ) and "://" not in recorded


def _check_rank(report: VerifyReport, rank: RankSummary) -> Iterator[Problem]:
    if rank.damage is not None:
        kind = "commits" if isinstance(rank.damage, CommitsDamaged) else "corrupt"
        yield Problem(kind, str(rank.damage), *rank.key)
        return
    for kind, fault, index in misplaced(rank.commits):
        if kind == "gap":
            if rank.state != "finished":
                continue
            kind = "lost"
        message = (
            f"{fault}. Restore commits.jsonl from a copy, or start this task over: remove "
            f"{rank.folder} and its output."
        )
        yield Problem(kind, message, *rank.key, index)
    is_countable = is_known(str(rank.run.get("output_writer")))
    letters = rank.dead_letters_file
    start = 0
    for commit in rank.commits.values():
        rows = None
        if is_countable:  # ``explode`` may have changed in the middle of the run
            rows = sum(file.rows for file in commit.files) or commit.counts.written
        report.chunks.append(CommittedChunk(rank, commit.chunk_index, commit.files, rows))
        # Dead letters of a commit lie between recorded sizes.
        count = rank.count_dead_letters(start, commit.dead_letters_size)
        start = commit.dead_letters_size
        if count != commit.counts.dead:
            message = (
                f"{letters} holds {plural(count, 'dead letter')} of this chunk instead of "
                f"{commit.counts.dead}. Restore it from a copy."
            )
            yield Problem("dead_letters", message, *rank.key, commit.chunk_index, str(letters))
    size = size_of(letters)
    if size < start:
        message = f"{letters} has {size} bytes instead of {start}. Restore it from a copy."
        yield Problem("dead_letters", message, *rank.key, path=str(letters))
    if rank.state == "finished":
        return
    journals = rank.open_journals
    last = max([*rank.commits, *journals], default=-1)
    missing = [index for index in range(last + 1) if index not in rank.commits]
    for index in missing:
        text = "is not started, although later chunks are."
        if index in journals:
            held = plural(journals[index].read, "document")
            text = f"is not finished; its journal holds {held}."
        yield Problem("unfinished", text, *rank.key, index)
    if not missing:
        text = "is not finished: the run is active, ended early, or must be run again."
        yield Problem("unfinished", text, *rank.key)


def _check_recorded(report: VerifyReport) -> Iterator[Problem]:
    recorded = RecordedDocuments(report.checkpoints)
    for name in recorded.names():
        path = recorded.folder / name
        try:
            read_recorded(path)
        except (OSError, TypeError, ValueError) as error:
            message = f"{path} holds no recorded document ({error}). Remove it."
            yield Problem("corrupt", message, path=str(path))


def _check_settings(report: VerifyReport) -> Iterator[Problem]:
    """A retry has settings of its own."""
    ranks = {rank.number: rank for rank in report.ranks if not rank.root and rank.settings}
    usual = next((rank.settings for rank in ranks.values()), {})
    if report.job:
        usual = identity.settings_in(report.job)
    differing = {number: rank.run for number, rank in ranks.items() if rank.settings != usual}
    done = RankBinding(holds_work=True, is_finished=True, is_live=False)
    comparison = compare_runs(
        differing, lambda rank: done, report.job, identity.RunIdentity(usual), only_tasks=False
    )
    for number, changes in comparison.by_rank.items():
        rank = ranks[number]
        differences = "; ".join(line for change in changes for line in change.lines)
        message = f"has other settings than the run: {differences}."
        yield Problem("identity", message, *rank.key, path=str(rank.folder / layout.RUN))


def _check_ranks(report: VerifyReport) -> Iterator[Problem]:
    # A retry has only ranks with dead letters, so its ranks do not count.
    ranks = {rank.number for rank in report.ranks if not rank.root}
    missing = [rank for rank in range(report.tasks) if rank not in ranks]
    removed = removed_ranks(report.checkpoints, missing)
    tasks = plural(report.tasks, "task")
    not_started = [rank for rank in missing if rank not in removed]
    if not_started:
        started = f"{len(not_started)} of {tasks}: {name_tasks(not_started)}."
        yield Problem("unfinished", f"not started: {started}")
    for rank in removed:
        folder = str(layout.rank_folder(report.checkpoints, rank))
        message = (
            f"{folder} is missing. Bring it back; or, to pay again, move the output files of "
            f"task {rank} away, delete completions/{rank:05d} in logging_dir, then run."
        )
        yield Problem("rank", message, rank=rank, path=folder)
    for rank in sorted(ranks):
        if 0 < report.tasks <= rank:
            folder = str(layout.rank_folder(report.checkpoints, rank))
            message = f"is one too many: the run has {tasks}."
            yield Problem("rank", message, rank=rank, path=folder)


# Input files --------------------------------------------------------------------------------------


def _readers(logging_dir: str | None) -> list[Json]:
    """Returns the readers' attributes from the file that datatrove's executor writes, if it is
    there.
    """
    with suppress(OSError, LookupError, TypeError, ValueError):
        pipeline = orjson.loads(get_datafolder(logging_dir).cat("executor.json"))["pipeline"]
        return [step for step in pipeline if "path_columns" in step]
    return []


def _check_input(rank: RankSummary, readers: list[Json]) -> Iterator[Problem]:
    """Finds files of which an earlier release read only the beginning."""
    if rank.root or rank.damage is not None:
        return
    read: dict[tuple[int, str], Json] = {}
    for commit in rank.commits.values():
        if state := commit.position:
            read[state["number"], state["file"]["name"]] = state["options"]
    record = ShardRecord.read(rank.folder / layout.SHARD) or ShardRecord()
    for number, recorded in enumerate(record.readers):
        read |= {(number, file.name): recorded.options for file in recorded.files}
    for (number, name), options in read.items():
        if number < len(readers):
            reader = readers[number]
            # A URL has lost its protocol there, and is not found.
            folder = reader["data_folder"].split("path='")[1].rsplit("', fs=")[0]
            try:
                refuse_partial_files(folder, [name], reader.get("compression", "infer"), options)
            except errors.CheckpointMismatch as error:
                yield Problem("input", str(error), *rank.key)
                return


# Output files -------------------------------------------------------------------------------------


def check_output(report: VerifyReport) -> Iterator[Problem]:
    claims: dict[str, list[CommittedChunk]] = defaultdict(list)
    committed = {}
    for chunk in report.chunks:
        for file in chunk.files:
            claims[plain(file.path)].append(chunk)
            committed[plain(file.path)] = file
    try:
        is_owned(report)
        read_listing = partial(list_files, report.folder, committed)
        calls = InterruptibleCalls(report.output, report.hub)
        policy = None
        if report.hub is None:  # the hub may limit requests, and then asks to wait
            policy = retrying.HUB_PROBE
        listing = listed(calls, read_listing, committed.values(), policy)
        is_there = not committed or listing.sizes or report.hub is not None
        # The files of a folder that the user names are missing.
        is_named = report.location.named_output is not None
        if not (is_there or is_named or report.folder.exists("")):
            raise errors.OutputFailed(
                f"the output folder {report.output} does not exist. Give its place with "
                "--output; if it is lost, this folder again."
            )
    except (errors.OutputMismatch, errors.OutputFailed) as refusal:
        kind = "owner" if isinstance(refusal, errors.OutputMismatch) else "output"
        yield Problem(kind, str(refusal), path=report.output)
        return
    names = {path for path in listing.sizes if not _is_ours(report, path)}
    for path, claimants in claims.items():
        if len(claimants) > 1:
            message = (
                f"{path} is named by {' and by '.join(map(str, claimants))}. One overwrote the "
                "other: start one of them over."
            )
            yield Problem("duplicate", message, *claimants[0].rank.key, claimants[0].index, path)
    for chunk in report.chunks:
        yield from _check_chunk(report, chunk, listing)
    yield from _check_uncommitted(report, sorted(names - committed.keys()))


def is_owned(report: VerifyReport) -> bool:
    """Whether the output folder is known to belong to the run.

    Raises OutputMismatch if it belongs to another run.
    """
    # An earlier release's run, or a copy of a mirror.
    if not (report.checkpoints / layout.HOME).exists():
        return False
    origin = RunOrigin(report.checkpoints, None)
    try:
        owners = [
            OutputOwnership(report.folder, template, origin).check()
            for template in report.templates
        ]
    except OSError:
        return False  # the listing also fails, and explains why
    return all(owner is not None and origin.owns(owner) for owner in owners)


def _is_ours(report: VerifyReport, path: str) -> bool:
    # The owner of a bucket's root, which has no place beside it, or of a folder below.
    if layout.OWNER in path:
        return True
    if not report.folder.is_local():
        return False
    return Path(report.folder.resolve_paths(path)).is_relative_to(report.checkpoints.absolute())


def _check_chunk(
    report: VerifyReport, chunk: CommittedChunk, listing: OutputListing
) -> Iterator[Problem]:
    is_right = True
    for file in chunk.files:
        kind, text = _wrong(report, file, listing)
        if not kind:
            continue
        is_right = False
        message = f"{file.path} {text}."
        if kind in REDO_KINDS:
            command = repair_command(*report.location.given, output=report.location.named_output)
            if report.full:
                command += " --full"
            message += f" To redo it: {command}, then run again."
        yield Problem(kind, message, *chunk.rank.key, chunk.index, file.path)
    # On the hub, a footer costs requests, and the hash suffices.
    if not report.full or not is_right or report.hub is not None:
        return
    counted = None
    if chunk.rows is not None:
        with suppress(ImportError, ValueError, OSError, EOFError):
            rows = 0
            for file in chunk.files:
                file_format = format_of_file(file.path)
                if file_format is None:
                    raise ValueError(file.path)
                with file_format.open(report.folder, file.path) as opened:
                    rows += file_format.count(opened)
            counted = rows
    if counted is None:
        report.uncounted.add(str(chunk.rank.run.get("output_writer")))
    elif counted != chunk.rows:
        message = (
            f"its output files hold {counted} documents or rows instead of the {chunk.rows} that "
            "were committed."
        )
        yield Problem("documents", f"{message} Please report this.", *chunk.rank.key, chunk.index)


def _wrong(report: VerifyReport, file: OutputFile, listing: OutputListing) -> tuple[str, str]:
    if not listing.is_right(file):
        return file_problem(file, listing.size(file))
    if not report.full and plain(file.path) not in listing.touched:
        return "", ""
    try:
        with retrying.file_system_call():
            actual = content_hash(report.folder, file.path)
    except OSError as error:
        if isinstance(error, FileNotFoundError) or (
            report.hub is not None and retrying.http_status(error) == 404
        ):
            return "missing", "is missing"
        return "output", f"cannot be read: {retrying.failure_line(error)}"
    if actual == file.xxh128:
        return "", ""
    return (
        "altered",
        f"is altered: its xxh128 is {actual} instead of {file.xxh128}",
    )


def _check_uncommitted(report: VerifyReport, paths: Iterable[str]) -> Iterator[Problem]:
    patterns = [output_pattern(template) for template in report.templates if template]
    if not patterns:
        return
    committed = {(*chunk.rank.key, chunk.index) for chunk in report.chunks}
    ranks = {rank.key: rank for rank in report.ranks}
    look_again = cache(partial(_look_again, report.checkpoints))
    published_by = cache(partial(published_names, report.checkpoints))
    for path in paths:
        if path.startswith(f"{STAGING}/"):
            message = f"{path} was never published. Remove it, unless a task works now."
            yield Problem("foreign", message, path=path)
            continue
        matches = [*filter(None, (pattern.fullmatch(path) for pattern in patterns))]
        advice = f"{STRAY_ADVICE}."
        if not matches:
            if report.hub is not None:
                continue  # a repository holds a card, and other jobs' files
            advice = "No file of this run has such a name. Move it away."
        for match in matches:
            key, chunk_index = rank_and_chunk(match)
            rank = ranks.get(key)
            if rank is not None and rank.state == "damaged":
                break  # it may belong to a lost commit
            current, files = look_again(key)
            if path in files:
                break  # committed meanwhile
            rank = rank or current
            if rank is None:
                if not key.retry and 0 < report.tasks <= key.rank:
                    continue  # it ran with more tasks before
                advice = (
                    f"It may be of {describe_chunk(*key)}, which has no checkpoint here: keep it "
                    "until that is found."
                )
            elif rank.state != "finished":
                published = published_by(key.rank)
                if published is not None and path not in published:
                    advice = (
                        "Another run or node has written it. If the run has a mirror, verify "
                        "that; else bring the lost checkpoint back, or move the file away."
                    )
                elif (*key, chunk_index) not in committed:
                    message = f"{path} is published but not committed yet."
                    yield Problem("unfinished", message, *rank.key, chunk_index, path)
                    break
        else:
            yield Problem("foreign", f"{path} is named by no commit. {advice}", path=path)


def _look_again(checkpoints: Path, key: layout.RankAddress) -> tuple[RankSummary | None, set[str]]:
    folder = checkpoints / str(key)
    if not folder.exists():
        return None, set()
    rank = read_rank(folder, Include.COMMITS)
    return rank, {file.path for commit in rank.commits.values() for file in commit.files}


# Columns ------------------------------------------------------------------------------------------


def check_columns(report: VerifyReport) -> Iterator[Problem]:
    broken = {problem.path for problem in report.problems}
    files = {
        file.path: chunk
        for chunk in report.chunks
        for file in chunk.files
        if file.path.endswith(".parquet") and file.path not in broken
    }
    firsts: dict[str, tuple[str, Schema]] = {}
    for path, chunk in sorted(files.items()):
        schema = read_schema(report.folder, path)
        if schema is None:
            continue
        first, expected = firsts.setdefault(dirname(path), (path, schema))
        for mismatch in schema_mismatches(expected, schema):
            message = (
                f"{path} does not load after {first}, or as text: column {mismatch.column!r} is "
                f"{mismatch.later} there, and {mismatch.first} in the first. Give the loader or "
                "ParquetWriter a schema."
            )
            yield Problem("columns", message, *chunk.rank.key, chunk.index, path)
