"""Compares the output files with the commits of all ranks. Only reads, and works during a run.

The kinds of problems:

    missing, truncated, grown   an output file does not exist, or is smaller or larger than its commit says
    altered                     its content differs: on the hub by the listed hash, elsewhere by xxh128 (files with the
                                committed size and stamp are read with ``full`` only)
    columns                     (full) a Parquet file does not load with the first one of its folder, or as text
    documents                   (full) the files of a chunk hold more or fewer documents than were committed
    duplicate                   several commits name one file
    foreign                     no commit names a file in the output folder
    lost                        no commit covers these documents, though the rank is finished or later chunks follow
    overlap                     two commits cover these documents
    dead_letters                dead_letters.jsonl holds more or fewer letters than the commits counted
    commits                     commits are lost or damaged; what else the rank has is not checked
    corrupt                     another file of the checkpoint is damaged
    identity, rank              ranks were run with different settings; a rank is missing, or there is one too many
    owner                       the output folder belongs to another run; it is not looked at
    output                      the output folder, or a file in it, cannot be read

``repair`` redoes the chunks with problems of the first two lines, and rebuilds ``commits``.

Commits are read before the output folder is listed, so a chunk that a run finishes in between never counts as missing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from posixpath import dirname

from datatrove.io import DataFolder, get_datafolder

from datatrove_ckpt.checkpoint.commits import CommitsDamaged, OutputFile
from datatrove_ckpt.checkpoint.identity import RunIdentity, comparable, compare, read_run
from datatrove_ckpt.checkpoint.job import name_tasks, recorded_output, removed_ranks
from datatrove_ckpt.checkpoint.layout import HOME, JOB, RUN, rank_folder
from datatrove_ckpt.checkpoint.ledger import CHECKED, JobSums, RankLedger, Want, name_place, read_rank, read_ranks
from datatrove_ckpt.checkpoint.lines import Json
from datatrove_ckpt.doors import repair_command
from datatrove_ckpt.errors import CheckpointError, ConfigError, OutputFailed, OutputMismatch
from datatrove_ckpt.formatting import number_range, plural
from datatrove_ckpt.output.arrow_types import Misfit, Schema, misfits, read_schema
from datatrove_ckpt.output.committed import (
    FoundFiles,
    content_hash,
    file_problem,
    local_stamp,
    published_names,
    remote_stamp,
    stray_advice,
)
from datatrove_ckpt.output.formats import format_of_file, is_known
from datatrove_ckpt.output.hub import HubFolder
from datatrove_ckpt.output.hub_commits import HubReads, looks_for
from datatrove_ckpt.output.names import STAGING, output_pattern, plain, rank_and_chunk
from datatrove_ckpt.output.owner import Homes, Ownership
from datatrove_ckpt.output.stoppable import StoppableCalls
from datatrove_ckpt.retrying import failure_line, file_system_call, http_status


def verify(
    checkpoints: Path,
    output: str | None = None,
    full: bool = False,
    given: Sequence[str] = (),
    planned: str | None = None,
    configured: str | None = None,
) -> Report:
    """Verifies all ranks.

    Args:
        output: the output folder, if it is not where ``job.json`` says.
        full: also read every output file.
        given: how the user named the checkpoint, for commands to type; empty: as ``checkpoints``.
        planned: where the output of a run will be that has not started, if WHAT tells it.
        configured: the output folder that the YAML file of the run names.

    Raises:
        ConfigError: ``checkpoints`` contains no checkpoint, or no run.json says where the output is.
    """
    command = f"{repair_command(*(given or [str(checkpoints)]), output=output)}{' --full' if full else ''}"
    report = Report(checkpoints, command)
    for rank in read_ranks(checkpoints, CHECKED):
        report.ranks.append(rank)
        report.sums.add(rank)
        _check_rank(report, rank)
        rank.commits = {}  # there may be millions
    what = given[0] if given else checkpoints
    report.output = output or find_output(checkpoints, report.ranks, planned, what, configured)
    report.folder = get_datafolder(report.output)
    _check_settings(report)
    _check_ranks(report)
    check_output(report, full, folder_is_given=output is not None)
    if full:
        check_columns(report)
    return report


def find_output(
    checkpoints: Path, ranks: list[RankLedger], planned: str | None, what: object, configured: str | None = None
) -> str:
    """The output folder of a run, as its checkpoint names it. The arguments are those of ``verify``.

    In a run folder that was copied or renamed it is the one there, because what it names may be another run's by now.

    Raises:
        ConfigError: none of them names it, or it is gone, and what they name is another run's.
    """
    if configured is not None:
        return str(get_datafolder(configured).resolve_paths(""))
    runs = [rank.run for rank in ranks if rank.run]
    recorded = recorded_output(checkpoints, runs)
    if recorded is not None:
        now, other = checkpoints.absolute().with_name("output"), other_run(checkpoints, recorded)
        is_moved = other or (_is_in_run_folder(checkpoints, recorded) and not Path(recorded).is_dir())
        if is_moved and now.is_dir():
            return str(now)
        if other:
            raise ConfigError(
                f"the output of {what} is gone: {recorded} belongs to {other}. Bring it back, or name it with --output."
            )
        return recorded
    if planned is not None:
        return str(get_datafolder(planned).resolve_paths(""))
    for rank in ranks:
        if rank.damage is not None:  # of a newer version, perhaps
            raise rank.damage
    raise ConfigError(f"{what}: no run.json says where the output is. Name it with --output.")


def other_run(checkpoints: Path, recorded: str) -> Path | None:
    """The run folder whose output ``run.json`` names, if it is another run's: this one was copied or renamed."""
    there = Path(recorded).with_name("checkpoints")
    is_other = _is_in_run_folder(checkpoints, recorded) and there.is_dir() and not there.samefile(checkpoints)
    return there.parent if is_other and any(there.glob(f"[0-9]*/{RUN}")) else None


def _is_in_run_folder(checkpoints: Path, recorded: str) -> bool:
    return (checkpoints.name, Path(recorded).name) == ("checkpoints", "output") and "://" not in recorded


# one rank ------------------------------------------------------------------------------------------------------------


def _check_rank(report: Report, rank: RankLedger) -> None:
    if rank.damage is not None:
        kind = "commits" if isinstance(rank.damage, CommitsDamaged) else "corrupt"
        report.add_problem(kind, str(rank.damage), rank)
        return
    countable = is_known(str(rank.run.get("output_writer")))
    for commit in rank.commits.values():
        documents = commit.counts.written if countable else None
        report.chunks.append(CommittedChunk(rank, commit.chunk_index, commit.files, documents))
    _check_ordinals(report, rank)
    _check_dead_letters(report, rank)
    _list_unfinished(report, rank)


def _check_ordinals(report: Report, rank: RankLedger) -> None:
    """Checks that the commits together cover every document once."""
    start_over = f"Restore commits.jsonl from a copy, or start this rank over: remove {rank.folder} and its output."
    chunk_index = ordinal = 0
    for _, commit in sorted(rank.commits.items()):
        gap = f"no commit covers documents {number_range(ordinal, commit.first_ordinal)}"
        if commit.first_ordinal < ordinal:
            twice = number_range(commit.first_ordinal, min(ordinal, commit.next_ordinal))
            message = f"an earlier commit also covers documents {twice}. {start_over}"
            report.add_problem("overlap", message, rank, commit.chunk_index)
        elif commit.chunk_index == chunk_index and commit.first_ordinal > ordinal:
            report.add_problem("lost", f"{gap}. {start_over}", rank)
        elif commit.chunk_index > chunk_index and rank.state == "finished":
            advice = f"To process them: {report.repair_command}, then run again."
            message = f"{gap} (chunks {number_range(chunk_index, commit.chunk_index)}). {advice}"
            report.add_problem("lost", message, rank, chunk_index)
        chunk_index, ordinal = commit.chunk_index + 1, commit.next_ordinal


def _check_dead_letters(report: Report, rank: RankLedger) -> None:
    """Checks the number of dead letters of each commit: they lie between the sizes that two commits record."""
    path, start = rank.dead_letters_file, 0
    for commit in rank.commits.values():
        found = rank.count_dead_letters(start, commit.dead_letters_size)
        start = commit.dead_letters_size
        if found != commit.counts.dead:
            message = f"{path} holds {plural(found, 'dead letter')} of this chunk instead of {commit.counts.dead}."
            message += " Restore it from a copy; the output is not affected."
            report.add_problem("dead_letters", message, rank, commit.chunk_index, path)
    size = path.stat().st_size if path.exists() else 0
    if size < start:
        message = f"{path} has {size} bytes instead of the {start} that commits name. Restore it from a copy."
        report.add_problem("dead_letters", message, rank, path=path)
    if size > start and rank.state == "finished":
        message = f"{path} has {size - start} bytes after the last dead letter that a commit covers."
        report.add_problem("dead_letters", message, rank, path=path)


def _list_unfinished(report: Report, rank: RankLedger) -> None:
    if rank.state == "finished":
        return
    before, journals = len(report.unfinished), rank.open_journals
    last = max([*rank.commits, *journals], default=-1)
    for index in range(last):
        if index not in rank.commits and index not in journals:
            report.add_problem("unfinished", "is not started, although later chunks are.", rank, index)
    for index, counts in journals.items():
        held = plural(counts.read, "document")
        report.add_problem("unfinished", f"is not finished; its journal holds {held}.", rank, index)
    if len(report.unfinished) == before:
        report.add_problem("unfinished", "is not finished: the run is active, or must be run again.", rank)


# all ranks -----------------------------------------------------------------------------------------------------------


def _check_settings(report: Report) -> None:
    """Checks that all ranks of the run have one identity. The most frequent one counts as right."""
    roots: dict[str, list[RankLedger]] = defaultdict(list)
    for rank in report.ranks:
        if rank.settings:
            roots[rank.root].append(rank)
    for ranks in roots.values():
        variants: dict[bytes, list[RankLedger]] = defaultdict(list)
        for rank in ranks:
            variants[comparable("", rank.settings)].append(rank)
        usual, *others = sorted(variants.values(), key=len, reverse=True)
        for rank in (rank for variant in others for rank in variant):
            known = defaultdict[str, set[bytes]](set)
            for change in accepted_changes(rank, usual[0]):
                name = str(change.get("field"))
                known[name] |= {comparable(name, change.get("old")), comparable(name, change.get("new"))}
            changes = compare(usual[0].run, RunIdentity(rank.settings))
            values = ((one.field, {comparable(one.field, value) for value in (one.old, one.new)}) for one in changes)
            if all(known[name] >= both for name, both in values):
                continue
            differences = "; ".join(f"{one.field}: {one.shown_old} -> {one.shown_new}" for one in changes)
            message = f"was run with settings that differ from rank {usual[0].number}: {differences}."
            report.add_problem("identity", message, rank, path=rank.folder / RUN)


def accepted_changes(*ranks: RankLedger) -> list[Json]:
    """The changes that the user has accepted for these ranks of a job, or for the whole job."""
    found = [change for rank in ranks if rank.run for change in rank.run.get("accepted_changes", [])]
    job = ranks[0].folder.parent / JOB
    with suppress(CheckpointError):
        found += read_run(job).get("accepted_changes", []) if job.exists() else []
    return found


def _check_ranks(report: Report) -> None:
    # A retry has only the ranks with dead letters, so its ranks do not count.
    ranks = {rank.number for rank in report.ranks if not rank.root}
    missing = [rank for rank in range(report.tasks) if rank not in ranks]
    removed = removed_ranks(report.checkpoints, missing)
    report.not_started = [rank for rank in missing if rank not in removed]
    tasks = plural(report.tasks, "task")
    if report.not_started:
        number = len(report.not_started)
        have = "has" if number == 1 else "have"
        report.add_problem("unfinished", f"{number} of {tasks} {have} not started ({name_tasks(report.not_started)}).")
    for rank in removed:
        folder = str(rank_folder(report.checkpoints, rank))
        message = (
            f"{folder} is missing: its checkpoint was removed. Bring it back. If it is gone for good, have its "
            f"documents processed, and paid, again: move the output files of task {rank} elsewhere, delete "
            f"completions/{rank:05d} in logging_dir, then run."
        )
        report.problems.append(Problem("rank", message, rank=rank, path=folder))
    for rank in sorted(ranks):
        if 0 < report.tasks <= rank:
            folder = str(rank_folder(report.checkpoints, rank))
            report.problems.append(Problem("rank", f"is one too many: the run has {tasks}.", rank=rank, path=folder))


# verify columns -------------------------------------------------------------------------------------------------------

# Whether the Parquet files of a run load as one dataset: no rank can see the columns of another one while it runs.
# Loaders take the columns of the first file of a folder, by name, and convert those of the others.


def check_columns(report: Report) -> None:
    """Adds a problem for each column by which files of one folder do not load together, or not as what they are."""
    broken = {problem.path for problem in report.problems}
    files = {file.path: chunk for chunk in report.chunks for file in chunk.files if file.path.endswith(".parquet")}
    firsts: dict[str, tuple[str, Schema]] = {}
    found: dict[tuple[str, str], list[tuple[CommittedChunk, str, Misfit]]] = defaultdict(list)
    for path, chunk in sorted(files.items()):
        if path in broken or (schema := read_schema(report.folder, path)) is None:
            continue
        first, expected = firsts.setdefault(dirname(path), (path, schema))
        for why in misfits(expected, schema):
            found[first, why.column].append((chunk, path, why))
    for (first, column), misfitting in found.items():
        chunk, path, why = misfitting[0]
        more = f" So {plural(len(misfitting) - 1, 'more file')}." if len(misfitting) > 1 else ""
        message = (
            f"{path} does not load after {first}, or as text: column {column!r} is {why.later} there, and {why.first} "
            f"in the first file, whose types loaders take.{more} Give the loader a schema, or start over with one for "
            "ParquetWriter."
        )
        report.add_problem("columns", message, chunk.rank, chunk.index, path)


# findings -------------------------------------------------------------------------------------------------------------

REDO_KINDS = frozenset({"missing", "truncated", "grown", "altered"})
"""The kinds of problems after which ``repair`` lets a chunk be processed again."""


@dataclass(slots=True)
class Problem:
    """One problem, or, in ``Report.unfinished``, work that is not done yet. The message says what to do."""

    kind: str
    message: str
    root: str = ""
    rank: int | None = None
    chunk_index: int | None = None
    path: str | None = None

    def __str__(self) -> str:
        place = name_place(self.root, self.rank, self.chunk_index)
        return f"{place}: {self.message}" if place else self.message


@dataclass(slots=True)
class CommittedChunk:
    """A committed chunk: its output files, and the number of documents in them (None: unknown)."""

    rank: RankLedger
    index: int
    files: list[OutputFile]
    documents: int | None

    def __str__(self) -> str:
        return name_place(self.rank.root, self.rank.number, self.index)


@dataclass
class Report:
    """What ``verify`` found.

    Attributes:
        repair_command: the command that repairs the chunks to redo.
        output: the output folder's name.
        folder: the same as datatrove's ``DataFolder``.
        ranks: without their commits, which ``chunks`` has.
        sums: over the ranks.
        not_started: ranks that are not there, and of which nothing shows that they ever were.
        uncounted: the writers whose rows cannot be counted.
    """

    checkpoints: Path
    repair_command: str
    output: str = ""
    folder: DataFolder = field(init=False)
    ranks: list[RankLedger] = field(default_factory=list)
    sums: JobSums = field(default_factory=JobSums)
    chunks: list[CommittedChunk] = field(default_factory=list)
    not_started: list[int] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    unfinished: list[Problem] = field(default_factory=list)
    uncounted: set[str] = field(default_factory=set)

    def add_problem(
        self,
        kind: str,
        message: str,
        rank: RankLedger | None = None,
        chunk_index: int | None = None,
        path: object = None,
    ) -> None:
        root, number = rank.key if rank else ("", None)
        found = Problem(kind, message, root, number, chunk_index, None if path is None else str(path))
        (self.unfinished if kind == "unfinished" else self.problems).append(found)

    @property
    def redo_advice(self) -> str:
        """The last sentence about a file that `repair` makes again."""
        return f" To redo it: {self.repair_command}, then run again."

    @cached_property
    def hub(self) -> HubFolder | None:
        """The output folder on the hub; None if it is elsewhere."""
        return HubFolder.of(self.folder)

    @property
    def tasks(self) -> int:
        """The number of tasks of the run; 0 if no run.json tells."""
        return max((rank.run.get("tasks") or 0 for rank in self.ranks if not rank.root), default=0)


# output files ---------------------------------------------------------------------------------------------------------

# The names, sizes and hashes of all committed files are in memory, and so is the folder's listing. Content is streamed.


_OF_ANOTHER_NAME = (
    "No file of this run has such a name. Move it out of the output folder, or delete it if nothing else needs it."
)
_STAGED = (
    "a process on its way to publish has left it, unless a task works just now. Remove it, since readers of the folder "
    "may take it for output."
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
    """Every file in the output folder; None if the folder cannot be listed."""
    folder = report.folder
    committed = {plain(file.path): file for chunk in report.chunks for file in chunk.files}
    try:
        with file_system_call():
            if report.hub is not None:
                # A folder there exists with its first file, and may be listed as it was a moment ago.
                found, reads = FoundFiles({}), HubReads(report.hub, StoppableCalls())
                found.show(reads.looked("cannot be listed", report.hub.files))
                for path, listed in found.hub_files.items():
                    found.note(path, listed.size, listed.stamp, committed.get(path))
                files = (file for chunk in report.chunks for file in chunk.files)
                reads.look_again(found, files, looks_for({chunk.rank.folder for chunk in report.chunks}))
                there = bool(found.sizes)
            else:
                folder.invalidate_cache()
                found = FoundFiles()
                for path, info in folder.find("", detail=True).items():
                    if info["type"] != "directory":
                        found.note(path, info["size"], _stamp(folder, path, info), committed.get(path))
                there = bool(found.sizes) or folder.exists("")
    except (OSError, OutputFailed) as failure:
        error = failure.__cause__ or failure if isinstance(failure, OutputFailed) else failure
        report.add_problem("output", f"{report.output} cannot be listed: {failure_line(error)}. {_list_advice(error)}")
        return None
    if not there and not folder_is_given and report.sums.numbers.files:
        report.add_problem(
            "output",
            f"the output folder {report.output} does not exist. If it was moved, give its place with --output; if it "
            "is lost, give the same folder with --output, and all its files count as missing.",
            path=report.output,
        )
        return None
    return found


def _stamp(folder: DataFolder, path: str, info: Json) -> int:
    """The stamp of a file in a listing. Of a file on a disk, a listing of fsspec has no exact time."""
    if not folder.is_local():
        return remote_stamp(info)
    with suppress(OSError):  # removed since it was listed, which shows later
        return local_stamp(Path(folder.resolve_paths(path)).stat())
    return 0


def is_owned(report: Report) -> bool:
    """Whether the output folder is known to belong to the run.

    Raises:
        OutputMismatch: it belongs to another run.
    """
    if not (report.checkpoints / HOME).exists():  # a run of an earlier release, or a copy of a mirror
        return False
    templates = {str(rank.run["output_filename"]) for rank in report.ranks if "output_filename" in rank.run}
    homes = Homes(report.checkpoints, None)
    try:
        owned = [Ownership(report.folder, template, homes).check() for template in sorted(templates)]
    except OSError:
        return False  # the listing fails, too, and explains why
    return all(owned)


def _list_advice(error: BaseException) -> str:
    if http_status(error) == 404:
        return "The repository may be gone, or have another name: restore it, or give the output's place with --output."
    if http_status(error) in (401, 403):
        return "Check the credentials and what they allow; for the hub, set HF_TOKEN or run hf auth login."
    return "Check the network and the server, and run the same command again."


def _is_ours(report: Report, path: str) -> bool:
    """Whether a file is ours but no output: a staged file, or a checkpoint inside the output folder."""
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
    wrong = [(file.path, *why) for file in chunk.files if (why := _wrong(report, file, found, full)) is not None]
    for path, kind, text in wrong:
        advice = report.redo_advice if kind in REDO_KINDS else ""
        report.add_problem(kind, f"{path} {text}.{advice}", chunk.rank, chunk.index, path)
    # On the hub, a footer costs some requests of the limit; that the content is the committed one says as much.
    if full and not wrong and report.hub is None:
        _check_documents(report, chunk)


def _wrong(report: Report, file: OutputFile, found: FoundFiles, full: bool) -> tuple[str, str] | None:
    """The kind and the description of a file's problem; None if it has none."""
    if not found.is_right(file):
        return file_problem(file, found.size(file))
    if not full and plain(file.path) not in found.touched:
        return None
    try:
        with file_system_call():
            actual = content_hash(report.folder, file.path)
    except OSError as error:
        if isinstance(error, FileNotFoundError) or (report.hub is not None and http_status(error) == 404):
            return "missing", "is missing"
        return "output", f"cannot be read: {failure_line(error)}"
    if actual != file.xxh128:
        return "altered", f"is altered: the xxh128 of its content is {actual} instead of {file.xxh128}"
    return None


def _check_documents(report: Report, chunk: CommittedChunk) -> None:
    numbers = [_count_documents(report.folder, file.path) for file in chunk.files if chunk.documents is not None]
    if chunk.documents is None or None in numbers:
        report.uncounted.add(str(chunk.rank.run.get("output_writer")))
        return
    found = sum(number or 0 for number in numbers)
    if found != chunk.documents:
        message = f"its output files hold {found} documents instead of the {chunk.documents} that were committed."
        report.add_problem("documents", f"{message} Please report this.", chunk.rank, chunk.index)


def _count_documents(folder: DataFolder, path: str) -> int | None:
    """The number of documents in a file; None if the file's format is unknown here."""
    with suppress(ImportError, ValueError, OSError, EOFError):  # a name that does not tell the format, or no codec
        if (known := format_of_file(path)) is not None:
            with folder.open(path, "rb", compression=None if known.is_compressed else "infer") as file:
                return known.count(file)
    return None


class _Uncommitted:
    """Tells files that a run will still commit from foreign files."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._committed = {(*chunk.rank.key, chunk.index) for chunk in report.chunks}
        self._ranks = {rank.key: rank for rank in report.ranks}
        self._later: dict[tuple[str, int], tuple[RankLedger | None, set[str]]] = {}
        self._published: dict[int, set[str] | None] = {}
        self._tasks = report.tasks
        templates = {str(rank.run["output_filename"]) for rank in report.ranks if "output_filename" in rank.run}
        self._patterns = [output_pattern(template) for template in sorted(templates - {""})]

    def check(self, path: str) -> None:
        if not self._patterns:
            return  # no run.json can be read, so no file can be told from a foreign one
        if path.startswith(f"{STAGING}/"):
            self._report.add_problem("foreign", f"{path}: {_STAGED}", path=path)
            return
        matches = [match for pattern in self._patterns if (match := pattern.fullmatch(path))]
        advice = f"{stray_advice(1)}." if matches else _OF_ANOTHER_NAME
        if not matches and self._report.hub is not None:
            return  # a repository holds other things, too: a card, other jobs' files
        for match in matches:
            key, chunk_index = rank_and_chunk(match)
            rank = self._ranks.get(key)
            if rank is not None and rank.state == "damaged":
                return  # it may belong to a lost commit; the damage itself is reported
            now, files = self._look_again(key)
            if path in files:
                return  # committed meanwhile
            rank = rank or now
            if rank is None:
                if not key[0] and 0 < self._tasks <= key[1]:
                    continue  # the job has fewer ranks, as far as their checkpoints tell: it ran with more tasks before
                place = name_place(*key)
                advice = (
                    f"It is named like a file of {place}, which has no checkpoint here: keep it until that is found."
                )
            elif rank.state != "finished" and not self._may_be_published(key[1], path):
                advice = _OF_ANOTHER_JOB
            elif rank.state != "finished" and (*key, chunk_index) not in self._committed:
                message = f"{path} is published but not committed yet."
                self._report.add_problem("unfinished", message, rank, chunk_index, path)
                return
        self._report.add_problem("foreign", f"{path} is named by no commit. {advice}", path=path)

    def _may_be_published(self, number: int, path: str) -> bool:
        if number not in self._published:
            self._published[number] = published_names(self._report.checkpoints, number)
        known = self._published[number]
        return known is None or path in known

    def _look_again(self, key: tuple[str, int]) -> tuple[RankLedger | None, set[str]]:
        """A rank as it is now, if it is there, and the files that it has committed: it may have gone on meanwhile."""
        if key not in self._later:
            folder = rank_folder(self._report.checkpoints / key[0], key[1])
            now = read_rank(*key, folder, Want.COMMITS) if folder.exists() else None
            commits = now.commits.values() if now is not None else ()
            self._later[key] = now, {file.path for commit in commits for file in commit.files}
        return self._later[key]
