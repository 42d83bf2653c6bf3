"""What can be found out about one folder before a run begins: by trying it, never by trusting what it says.

Everything is tried in a probe of its own (see measures.py): no rank's folder, lock or database is touched.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.interval import SYNC_TUNING, Seconds
from datatrove_ckpt.checkpoint.layout import CACHE, LOCK
from datatrove_ckpt.checkpoint.request_cache import RequestCache
from datatrove_ckpt.errors import CheckpointError
from datatrove_ckpt.formatting import byte_size, duration
from datatrove_ckpt.output.chunk_output import STAGING
from datatrove_ckpt.preflight.file_systems import MOUNTS, FilesystemTraits, find_mount, nature
from datatrove_ckpt.preflight.probes import (
    REMOTE_SECONDS,
    SMALL_GROUP,
    NotDeleted,
    RemoteFailed,
    existing_part,
    measure_disk,
    probe_folder,
    probe_object,
)

State = Literal["ok", "warning", "problem"]
T = TypeVar("T")

_SLOW_SHARE = 0.1
_ON_ONE_NODE = "Tasks may run on other nodes: if those do not see this folder, choose one that all nodes see."
_LOCK_SECONDS = 30.0
_GRACE_SECONDS = 5.0


@dataclass(frozen=True)
class PreflightCheck:
    """What was found: about which folder, what was tried, how it went, and what to do."""

    state: State
    subject: str
    what: str
    message: str

    def __str__(self) -> str:
        return f"{self.state:<8} {self.subject}, {self.what}: {self.message}"


@dataclass(frozen=True)
class Need:
    """What a folder must hold at once.

    Attributes:
        least: bytes without which no chunk can be finished; None if that cannot be told.
        most: bytes it may come to.
        files: files and folders.
        basis: where the numbers come from, for people.
    """

    least: int | None
    most: int | None
    files: int
    basis: str


def file_system(folder: Path) -> FilesystemTraits:
    """What the folder lies on."""
    mounts = MOUNTS.read_text(errors="replace") if MOUNTS.exists() else ""
    return nature(find_mount(existing_part(folder.absolute()).resolve(), mounts))


# Local folders -------------------------------------------------------------------------------------------------------


def check_checkpoints(
    subject: str, folder: Path, sync_seconds: Seconds, need: Need, mirrored: bool = False, moves: bool = False
) -> list[PreflightCheck]:
    """``checkpoints_local_dir``. ``moves``: tasks may start again on another node."""

    def check() -> list[PreflightCheck]:
        tries = [
            partial(_check_lock, subject),
            partial(_check_sqlite, subject),
            partial(_check_sync, subject, sync_seconds),
        ]
        checks = _try_locally(subject, folder, tries)
        checks += [_check_kind(subject, file_system(folder), mirrored, moves), check_room(subject, folder, need)]
        return checks + _check_ranks(subject, folder)

    return _answered(subject, folder, check)


def check_local_output(
    subject: str, folder: Path, template: str, need: Need, moves: bool = False
) -> list[PreflightCheck]:
    """A local output folder, whose staging folder lies beside the final files. ``moves``: see there."""

    def check() -> list[PreflightCheck]:
        checks = _try_locally(subject, folder, [partial(_check_staging, subject, folder, template)])
        kind = file_system(folder)
        if not kind.lasts:
            checks.append(PreflightCheck("warning", subject, "file system", f"{kind.name}. {' '.join(kind.concerns)}"))
        elif moves and not kind.shared:
            checks.append(PreflightCheck("warning", subject, "file system", f"{kind.name}. {_ON_ONE_NODE}"))
        return [*checks, check_room(subject, folder, need)]

    return _answered(subject, folder, check)


def _answered(subject: str, folder: Path, check: Callable[[], list[PreflightCheck]]) -> list[PreflightCheck]:
    """A network file system whose server is away makes everything wait, locks above all."""
    try:
        return within(REMOTE_SECONDS, check, str(folder))
    except RemoteFailed as error:
        return [PreflightCheck("problem", subject, "reachable", f"{error} Mend the mount, or choose another folder.")]


def _try_locally(subject: str, folder: Path, tries: Sequence[Callable[[Path], PreflightCheck]]) -> list[PreflightCheck]:
    """Whether the folder can be written, and if so what the tries say, which get a probe folder."""
    checks: list[PreflightCheck] = []
    try:
        with probe_folder(folder) as probe:
            checks.append(_check_writable(subject, folder, probe))
            checks += [attempt(probe) for attempt in tries]
    except (CheckpointError, OSError) as error:
        checks.append(PreflightCheck("problem", subject, "writable", f"{folder}: {error}"))
    return checks


def _check_writable(subject: str, folder: Path, probe: Path) -> PreflightCheck:
    files.disk.replace(probe / "written", b"datatrove-ckpt")
    if (probe / "written").read_bytes() != b"datatrove-ckpt":
        return PreflightCheck("problem", subject, "writable", f"{folder} gives back something else than was written.")
    made = "" if folder.is_dir() else f" (it will be made in {probe.parent})"
    return PreflightCheck("ok", subject, "writable", f"{folder}{made}")


def _check_kind(subject: str, kind: FilesystemTraits, mirrored: bool, moves: bool) -> PreflightCheck:
    text = " ".join([f"{kind.name}.", *kind.concerns])
    if kind.unfit:
        return PreflightCheck("problem", subject, "file system", text)
    if not kind.lasts and mirrored:
        return PreflightCheck("ok", subject, "file system", f"{text} The mirror (checkpoints_remote_dir) outlives it.")
    if not kind.lasts:
        text += " Or keep a mirror: set checkpoints_remote_dir."
    elif moves and not mirrored and not kind.shared:
        return PreflightCheck(
            "warning", subject, "file system", f"{text} {_ON_ONE_NODE} Or set checkpoints_remote_dir."
        )
    return PreflightCheck("warning" if kind.concerns else "ok", subject, "file system", text)


def check_room(subject: str, folder: Path, need: Need) -> PreflightCheck:
    """Free bytes and inodes against what is needed. A quota is seen only when it is full, by the probe."""
    status = os.statvfs(existing_part(folder))
    free = status.f_bavail * status.f_frsize
    state: State = "ok"
    text = f"{byte_size(free)} free"
    if status.f_files:  # some file systems count none
        text += f", {status.f_favail} inodes"
    if need.least is None or need.most is None:
        text += f"; what is needed cannot be estimated: {need.basis}."
    else:
        least = f"{byte_size(need.least)} to " if need.least else "up to "
        text += f"; {least}{byte_size(need.most)} needed at once: {need.basis}."
        state = "problem" if free < need.least else "warning" if free < need.most else "ok"
    if status.f_files and status.f_favail < need.files:
        state = "problem"
        text += f" At least {need.files} inodes are needed."
    if state != "ok":
        text += " Free some space, choose another folder, or make records_per_chunk smaller."
    return PreflightCheck(state, subject, "room", text)


def _check_ranks(subject: str, folder: Path) -> list[PreflightCheck]:
    """Folders that an earlier run left and this user cannot write; nothing is said about those of nobody."""
    if not folder.is_dir():
        return []
    ranks = [path for path in folder.glob("[0-9]*") if path.is_dir()]
    refused = [rank for rank in ranks if not os.access(rank, os.R_OK | os.W_OK | os.X_OK)]
    inside = [path for rank in ranks if rank not in refused for path in rank.iterdir()]
    # A run that is on removes files meanwhile: those are not refused.
    refused += [path for path in inside if not os.access(path, os.R_OK | os.W_OK) and path.exists()]
    if not refused:
        return []
    more = f" and {len(refused) - 1} more" if len(refused) > 1 else ""
    text = f"{refused[0]}{more}: of an earlier run, and not writable for this user."
    return [
        PreflightCheck(
            "problem", subject, "earlier run", f"{text} Make them writable, or go on as the user who made them."
        )
    ]


_SECOND_PROCESS = """
import fcntl, json, os, sqlite3, sys
how, path = sys.argv[1:]
try:
    if how == "flock":
        fcntl.flock(os.open(path, os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB)
    else:
        sqlite3.connect(path, timeout=0, isolation_level=None).execute("BEGIN IMMEDIATE")
    print(json.dumps("let in"))
except (OSError, sqlite3.Error) as error:
    print(json.dumps("kept out" if isinstance(error, BlockingIOError) or "locked" in str(error) else str(error)))
"""


def _second_process(how: str, path: Path) -> str:
    """What happens to another process that wants what this one holds: "let in", "kept out", or its error."""
    argv = [sys.executable, "-I", "-c", _SECOND_PROCESS, how, str(path)]
    try:
        ended = subprocess.run(argv, capture_output=True, text=True, timeout=_LOCK_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer within {_LOCK_SECONDS:.0f} s"
    return str(json.loads(ended.stdout)) if ended.returncode == 0 else ended.stderr.strip()[-200:]


def _check_lock(subject: str, probe: Path) -> PreflightCheck:
    lock = files.Lock(probe / LOCK)
    try:
        found = _second_process("flock", lock.path) if lock.works else "no locks"
    finally:
        lock.release()
    if found == "kept out":
        return PreflightCheck("ok", subject, "locks", "a second process is kept out (tried on this machine only).")
    if found == "no locks":
        text = (
            "the file system has none. Two processes for one rank are kept apart only by the fence, after the second "
            "has begun: start no rank twice, or choose a folder with locks."
        )
        return PreflightCheck("warning", subject, "locks", text)
    text = f"a second process was not kept out ({found}). Choose a folder with working locks, or mount it with them."
    return PreflightCheck("problem", subject, "locks", text)


def _check_sqlite(subject: str, probe: Path) -> PreflightCheck:
    try:
        cache = RequestCache(probe / CACHE)
    except CheckpointError as error:
        return PreflightCheck("problem", subject, "SQLite", f"the request cache cannot be opened here: {error}")
    try:
        found = _second_process("sqlite", cache.path)
    finally:
        cache.close()
    if found == "kept out":
        return PreflightCheck(
            "ok", subject, "SQLite", "WAL without shared memory works, and a second process is kept out."
        )
    text = f"a second process was not kept out of the request cache ({found}): start no rank twice."
    return PreflightCheck("warning", subject, "SQLite", text)


def _check_sync(subject: str, sync_seconds: Seconds, probe: Path) -> PreflightCheck:
    sync = measure_disk(probe, SMALL_GROUP, seconds=1.0).sync
    text = f"{byte_size(SMALL_GROUP)} take {sync}"
    if sync_seconds == 0:
        return PreflightCheck("ok", subject, "syncs", f"{text}, after each group of writes (sync_seconds: 0).")
    interval = SYNC_TUNING.interval([sync.median]) if sync_seconds == "auto" else sync_seconds
    share = sync.median / interval
    text += f"; every {duration(interval)} (sync_seconds: {sync_seconds}) that is {100 * share:.2g} % of the time"
    if share < _SLOW_SHARE:
        return PreflightCheck("ok", subject, "syncs", f"{text}.")
    return PreflightCheck("warning", subject, "syncs", f"{text}. Set sync_seconds: auto, or choose a faster disk.")


def _check_staging(subject: str, folder: Path, template: str, probe: Path) -> PreflightCheck:
    """A rename publishes a file; it works within one file system."""
    files.disk.make_dir(probe / "staging")
    files.disk.replace(probe / "staging" / "file", b"staged")
    files.disk.rename(probe / "staging" / "file", probe / "file")
    files.disk.sync_dir(probe)
    places = [folder / STAGING]
    if "/" in template and folder.is_dir():
        places += [path for path in folder.iterdir() if path.is_dir()]
    elsewhere = [path for path in places if path.is_dir() and path.stat().st_dev != probe.stat().st_dev]
    if elsewhere:
        text = f"{elsewhere[0]} lies on another file system than {folder}: files cannot be renamed into their place."
        return PreflightCheck(
            "problem", subject, "staging", f"{text} Name a folder of one file system as output_folder."
        )
    return PreflightCheck("ok", subject, "staging", "a file is renamed into its place, on one file system.")


# Remote folders ------------------------------------------------------------------------------------------------------


def check_remote(subject: str, folder: Any, deletes: bool = False) -> PreflightCheck:
    """A datatrove ``DataFolder`` of any kind: an object is written, its size asked for, and deleted.

    Args:
        deletes: the run deletes objects there, too.
    """
    url = folder.resolve_paths("")
    if commits_each_write(folder):
        return PreflightCheck(
            "ok", subject, "reachable", f"{url} is not tried: each write would be a commit in its history."
        )

    def attempt() -> float:
        with probe_object(folder) as upload:
            return upload(b"datatrove-ckpt")

    try:
        seconds = within(REMOTE_SECONDS, attempt, url)
    except NotDeleted as error:
        if deletes:
            return PreflightCheck("problem", subject, "reachable", f"{error} Old generations are deleted: allow it.")
        return PreflightCheck(
            "warning", subject, "reachable", f"{error} A run deletes nothing there, so it can do without."
        )
    except RemoteFailed as error:
        return PreflightCheck("problem", subject, "reachable", f"{error} Mend the address, the key or its permissions.")
    return PreflightCheck(
        "ok", subject, "reachable", f"{url}: a small object was written in {duration(seconds)}, and deleted."
    )


def commits_each_write(folder: Any) -> bool:
    """A repository of the Hugging Face hub, where each write is a commit for ever."""
    return "hf" in _protocols(folder.fs) and not str(folder.path).removeprefix("hf://").startswith("buckets/")


def _protocols(fs: Any) -> tuple[str, ...]:
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


def within(seconds: float, function: Callable[[], T], place: str) -> T:
    """What the function returns, or raises.

    Raises:
        RemoteFailed: it takes longer. It is left alone then, in a thread that keeps no process alive.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)
        ended.set()

    # An event, because an interrupted join takes the thread for dead.
    ended = threading.Event()
    threading.Thread(target=run, daemon=True).start()
    try:
        ended.wait(seconds)
    except KeyboardInterrupt:
        ended.wait(_GRACE_SECONDS)  # it tidies up after itself
        raise
    if errors:
        raise errors[0]
    if not results:
        raise RemoteFailed(f"{place}: there was no answer within {seconds:.0f} s.")
    return results[0]
