"""How another number of tasks gets onto the disk: written beside the ranks first, and then carried out.

    1. all that will change is written into the folder ``reshard``: journals, answers, commits, shares
    2. reshard/plan.json is renamed to its name    <- from here on, the run has the new number of tasks
    3. each change is put in place
    4. reshard/plan.json is removed, and then the folder

    crash after    found on disk                    what happens
    1              reshard/ without plan.json       nothing has changed: ranks run as before, ``reshard`` starts anew
    2, 3           reshard/plan.json                no rank starts; the next ``reshard`` carries the plan out first
    4              nothing, or reshard/ alone       nothing to do

Every change of step 3 is safe to repeat: files are renamed into place, and a missing one is in its place already;
answers are deleted before they are put again. ``reshard`` holds the locks of all ranks meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import orjson

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.identity import RESHARDS, new_owner, read_run, stamped
from datatrove_ckpt.checkpoint.layout import (
    CACHE,
    CACHE_LOGS,
    JOB,
    LOCK,
    RESHARD_PLAN,
    RUN,
    SHARD,
    SHARES,
    journal_indices,
    journal_path,
    rank_folder,
    rank_numbers,
    retry_folders,
    retry_number,
)
from datatrove_ckpt.checkpoint.lines import Json, explained, sealed_json
from datatrove_ckpt.checkpoint.request_cache import RequestCache
from datatrove_ckpt.errors import CheckpointCorrupt, CheckpointMismatch

_VERSION = 1


@dataclass
class ReshardPlan:
    """What ``reshard`` is to do, once everything that it needs is in the folder ``reshard``. Ranks are numbers.

    Attributes:
        before, tasks: numbers of tasks.
        number: how many times the input was dealt out anew, with this one.
        moved: files to be renamed into the folders of ranks, such as "00000/chunk_00007.jsonl".
        answers: ranks that get answers of others, with the first ordinal of these.
        retired: unfinished ranks from ``tasks`` on; what they had not committed is other ranks' now.
        started: ranks without run.json that get documents of others, each with a rank whose run.json it takes.
        done: ranks that have nothing left to do. All others below ``tasks`` run again.
        unfinished: output files of retired ranks that no commit names. Their documents are other ranks' now.
    """

    before: int
    tasks: int
    number: int
    moved: list[str] = field(default_factory=list)
    answers: dict[int, int] = field(default_factory=dict)
    retired: list[int] = field(default_factory=list)
    started: dict[int, int] = field(default_factory=dict)
    done: list[int] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)

    def to_json(self) -> bytes:
        return orjson.dumps({"version": _VERSION, **asdict(self)}, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS)

    @classmethod
    def read(cls, root: Path) -> ReshardPlan | None:
        """The plan that is being carried out; None if there is none.

        Raises:
            CheckpointCorrupt: it cannot be read.
        """
        path = root / RESHARD_PLAN
        with explained("read", path):
            if not path.exists():
                return None
            data = path.read_bytes()
        try:
            content = orjson.loads(data)
            if content.pop("version") != _VERSION:
                raise ValueError("it is of another version")
            for name in ("answers", "started"):
                content[name] = {int(rank): int(number) for rank, number in content[name].items()}
            return cls(**content)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointCorrupt(
                f"{path} cannot be read ({error!r}). Restore it from a copy: the number of tasks is being changed, and "
                "the ranks' files are half those of before."
            ) from error


def refuse_half_resharded(root: Path) -> None:
    """Refuses a rank's start while another number of tasks is half carried out.

    Args:
        root: ``checkpoints_local_dir``, or the folder of a retry in it.

    Raises:
        CheckpointMismatch: it names the command that goes on.
    """
    root = root if retry_number(root.name) is None else root.parent
    if (plan := ReshardPlan.read(root)) is not None:
        raise CheckpointMismatch(
            f"`datatrove-ckpt reshard` was interrupted while it changed {root} from {plan.before} to {plan.tasks} "
            f"tasks. Run it again (--tasks {plan.tasks}): it carries out the rest. Nothing is lost."
        )


class Staging:
    """The folder in which the changes are written before any of them is made."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._folder = (root / RESHARD_PLAN).parent
        files.disk.remove_tree(self._folder)
        files.disk.make_dirs(self._folder, files.PRIVATE_FOLDER)

    def file(self, name: str) -> Path:
        """Where a file is staged, such as "00000/chunk_00007.jsonl". Its folder is there."""
        path = self._folder / name
        files.disk.make_dirs(path.parent, files.PRIVATE_FOLDER)
        return path

    def write(self, name: str, data: bytes) -> None:
        files.disk.replace(self.file(name), data)

    def commit(self, plan: ReshardPlan) -> None:
        """From here on, the run has the new number of tasks. What was staged must be synced."""
        files.disk.close(self._folder)
        for path in sorted(self._folder.rglob("*")):
            files.disk.sync(path)
        files.disk.sync_dir(self._folder)
        files.disk.replace(self._root / RESHARD_PLAN, plan.to_json())

    def abandon(self) -> None:
        files.disk.close(self._folder)
        files.disk.remove_tree(self._folder)


def carry_out(
    root: Path, plan: ReshardPlan, forget_marker: Callable[[int], None], remove_output: Callable[[list[str]], None]
) -> None:
    """Makes all changes of a plan. Safe to repeat. The locks of all ranks must be held.

    Args:
        forget_marker: removes datatrove's completion marker of a rank, if there is one.
        remove_output: removes these output files, if they are there.

    Raises:
        StorageFailed, OutputFailed: a disk, or the hub, refused something. The same call goes on.
    """
    staged = (root / RESHARD_PLAN).parent
    if plan.unfinished:
        remove_output(plan.unfinished)
    for name in plan.moved:
        if (staged / name).exists():
            files.disk.make_dirs((root / name).parent, files.PRIVATE_FOLDER)
            files.disk.rename(staged / name, root / name)
            files.disk.sync_dir((root / name).parent)
    for rank, first in plan.answers.items():
        _merge_answers(rank_folder(staged, rank) / CACHE, rank_folder(root, rank) / CACHE, first)
    for rank in plan.retired:
        _forget_unfinished(rank_folder(root, rank))
    for rank, source in plan.started.items():
        _start(rank_folder(root, rank) / RUN, rank_folder(root, source) / RUN)
    for folder in [root, *retry_folders(root)]:
        for rank in rank_numbers(folder):
            number = plan.number if folder == root else 0  # the dead letters that a retry reads are no share
            _change_tasks(rank_folder(folder, rank) / RUN, plan.tasks, number)
    if (staged / SHARES).exists():
        files.disk.rename(staged / SHARES, root / SHARES)
        files.disk.sync_dir(root)
    for rank in sorted({*range(plan.tasks)}.difference(plan.done)):
        files.disk.remove(rank_folder(root, rank) / SHARD)
        forget_marker(rank)
    if (root / JOB).exists():
        _replace(root / JOB, {**read_run(root / JOB), "tasks": plan.tasks})
    files.disk.remove(root / RESHARD_PLAN)
    files.disk.sync_dir(staged)
    files.disk.remove_tree(staged)


def _merge_answers(staged: Path, path: Path, first: int) -> None:
    if not staged.exists():
        return
    with closing(RequestCache(staged)) as found, closing(RequestCache(path)) as cache:
        cache.forget_from(first)
        cache.put(found.answers_since(0, sorted(found.ordinals())))
        cache.sync()


def _forget_unfinished(folder: Path) -> None:
    if not folder.is_dir():
        return
    for index in journal_indices(folder):
        files.disk.remove(journal_path(folder, index))
    for suffix in ("", *CACHE_LOGS):
        files.disk.remove(folder / (CACHE + suffix))
    files.disk.sync_dir(folder)


def _start(path: Path, source: Path) -> None:
    if not path.exists():
        files.disk.make_dirs(path.parent, files.PRIVATE_FOLDER)
        _replace(path, {**read_run(source), "owner": new_owner()})


def _change_tasks(path: Path, tasks: int, number: int) -> None:
    """A process that worked on the rank, unseen on a file system without locks, finds another owner and stops."""
    if not path.exists():
        return
    run = read_run(path)
    reshards = {RESHARDS: number} if number else {}
    if run.get("tasks") == tasks and run.get(RESHARDS, 0) == number:
        return
    owner = run.get("owner", {})
    earlier = {**owner.get("earlier", {}), **({owner["nonce"]: None} if "nonce" in owner else {})}
    taken = new_owner(owner.get("fence", 0) + 1, earlier, owner.get("commits", 0))
    _replace(path, {**run, "tasks": tasks, **reshards, "owner": taken})


def _replace(path: Path, content: Json) -> None:
    """As this version writes it."""
    files.disk.replace(path, sealed_json(stamped(content)))


class RankLocks:
    """The locks of ranks, so that none starts. Folders that are missing are made for it.

    Attributes:
        plan: what is carried out; None: nothing changes.

    Raises:
        CheckpointLocked: a process works on a rank; the message names it.
    """

    def __init__(self, root: Path, ranks: Iterable[int]) -> None:
        self.plan: ReshardPlan | None = None
        self._locks: list[tuple[files.Lock, bool]] = []
        try:
            for rank in ranks:
                folder = rank_folder(root, rank)
                files.disk.make_dirs(folder, files.PRIVATE_FOLDER)
                was_there = (folder / LOCK).exists()
                self._locks.append((files.Lock(folder / LOCK), was_there))
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """A lock file stays where a rank is not finished."""
        plan = self.plan
        for lock, was_there in self._locks:
            folder = lock.path.parent
            rank = int(folder.name)
            done = not was_there if plan is None else rank >= plan.tasks or rank in plan.done
            lock.release(remove=done or not (folder / RUN).exists())
            with suppress(OSError):
                folder.rmdir()
        self._locks = []
