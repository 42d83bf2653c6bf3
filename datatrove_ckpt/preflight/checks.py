"""Checks of one folder before a run: each writes, locks or syncs there, and reports what happened.

All of that happens in a probe folder (see probes.py), so no rank's folder, lock or database is touched.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import wait
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
from datatrove_ckpt.output.names import STAGING
from datatrove_ckpt.output.stoppable import in_thread
from datatrove_ckpt.preflight.file_systems import MOUNTS, FilesystemTraits, find_mount, traits
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
    """The result of one check.

    Attributes:
        subject: what was checked, such as "checkpoints".
        what: which property, such as "locks".
        message: what was found, and what to do about it.
    """

    state: State
    subject: str
    what: str
    message: str

    def __str__(self) -> str:
        return f"{self.state:<8} {self.subject}, {self.what}: {' '.join(self.message.split())}"


@dataclass(frozen=True)
class Need:
    """The space that a folder must have at one time.

    Attributes:
        least: bytes without which no chunk can be finished; None if unknown.
        most: bytes at most.
        files: number of files and folders.
        basis: how the numbers were estimated, as text for people.
    """

    least: int | None
    most: int | None
    files: int
    basis: str


def file_system(folder: Path) -> FilesystemTraits:
    """The file system that the folder is on."""
    mounts = MOUNTS.read_text(errors="replace") if MOUNTS.exists() else ""
    return traits(find_mount(existing_part(folder.absolute()).resolve(), mounts))


# Local folders -------------------------------------------------------------------------------------------------------


def check_checkpoints(
    subject: str, folder: Path, sync_seconds: Seconds, need: Need, mirrored: bool = False, moves: bool = False
) -> list[PreflightCheck]:
    """Checks ``checkpoints_local_dir``. ``moves``: a task may restart on another node."""

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
    """Checks a local output folder; its staging folder is inside it. ``moves``: a task may restart on another node."""

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
    """Runs a check with a time limit: on a network file system without its server every call blocks."""
    try:
        return within(REMOTE_SECONDS, check, str(folder))
    except RemoteFailed as error:
        return [PreflightCheck("problem", subject, "reachable", f"{error} Repair the mount, or choose another folder.")]


def _try_locally(subject: str, folder: Path, tries: Sequence[Callable[[Path], PreflightCheck]]) -> list[PreflightCheck]:
    """Checks that the folder can be written, then runs ``tries``, each with the probe folder."""
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
        return PreflightCheck("problem", subject, "writable", f"{folder} does not return what was written to it.")
    made = "" if folder.is_dir() else f" (will be created in {probe.parent})"
    return PreflightCheck("ok", subject, "writable", f"{folder}{made}")


def _check_kind(subject: str, kind: FilesystemTraits, mirrored: bool, moves: bool) -> PreflightCheck:
    text = " ".join([f"{kind.name}.", *kind.concerns])
    if kind.unsupported:
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
    """Compares free bytes and inodes with the need. A quota is noticed only when it is used up, by the probe."""
    status = os.statvfs(existing_part(folder))
    free = status.f_bavail * status.f_frsize
    state: State = "ok"
    text = f"{byte_size(free)} free"
    if status.f_files:  # some file systems have no inodes to count
        text += f", {status.f_favail} inodes"
    if need.least is None or need.most is None:
        text += f"; the need cannot be estimated: {need.basis}."
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
    """Rank folders of an earlier run that this user cannot write."""
    if not folder.is_dir():
        return []
    ranks = [path for path in folder.glob("[0-9]*") if path.is_dir()]
    refused = [rank for rank in ranks if not os.access(rank, os.R_OK | os.W_OK | os.X_OK)]
    inside = [path for rank in ranks if rank not in refused for path in rank.iterdir()]
    # A running rank removes files meanwhile; those are fine.
    refused += [path for path in inside if not os.access(path, os.R_OK | os.W_OK) and path.exists()]
    if not refused:
        return []
    more = f" and {len(refused) - 1} more" if len(refused) > 1 else ""
    text = f"{refused[0]}{more}: from an earlier run, and this user cannot write there."
    return [
        PreflightCheck(
            "problem", subject, "earlier run", f"{text} Make them writable, or continue as the user who created them."
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
    """Lets another process try to lock what this one holds: "let in", "kept out", or its error."""
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
            "the file system has no locks. Of two processes for one rank, the first notices the second only after that "
            "has started: start no rank twice, or choose a folder with locks."
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
    text += f"; one every {duration(interval)} (sync_seconds: {sync_seconds}) takes {100 * share:.2g} % of the time"
    if share < _SLOW_SHARE:
        return PreflightCheck("ok", subject, "syncs", f"{text}.")
    return PreflightCheck("warning", subject, "syncs", f"{text}. Set sync_seconds: auto, or choose a faster disk.")


def _check_staging(subject: str, folder: Path, template: str, probe: Path) -> PreflightCheck:
    """A file is published by a rename, which works only within one file system."""
    files.disk.make_dir(probe / "staging")
    files.disk.replace(probe / "staging" / "file", b"staged")
    files.disk.rename(probe / "staging" / "file", probe / "file")
    files.disk.sync_dir(probe)
    places = [folder / STAGING]
    if "/" in template and folder.is_dir():
        places += [path for path in folder.iterdir() if path.is_dir()]
    elsewhere = [path for path in places if path.is_dir() and path.stat().st_dev != probe.stat().st_dev]
    if elsewhere:
        text = f"{elsewhere[0]} is on another file system than {folder}: files cannot be renamed into place."
        return PreflightCheck(
            "problem", subject, "staging", f"{text} Choose an output_folder that is on one file system."
        )
    return PreflightCheck("ok", subject, "staging", "files can be renamed into place.")


# Remote folders ------------------------------------------------------------------------------------------------------


def check_remote(subject: str, folder: Any, deletes: bool = False) -> PreflightCheck:
    """Writes an object to a datatrove ``DataFolder`` of any kind, asks for its size, and deletes it.

    Args:
        deletes: the run also deletes objects there.
    """
    url = folder.resolve_paths("")
    if commits_each_write(folder):
        return PreflightCheck(
            "ok", subject, "reachable", f"{url} is not tested: each write would be a commit in its history."
        )

    def attempt() -> float:
        with probe_object(folder) as upload:
            return upload(b"datatrove-ckpt")

    try:
        seconds = within(REMOTE_SECONDS, attempt, url)
    except NotDeleted as error:
        if deletes:
            return PreflightCheck(
                "problem", subject, "reachable", f"{error} The mirror deletes old versions: allow it."
            )
        return PreflightCheck(
            "warning", subject, "reachable", f"{error} A run deletes nothing there, so this is no problem."
        )
    except RemoteFailed as error:
        return PreflightCheck(
            "problem", subject, "reachable", f"{error} Correct the address, the key or its permissions."
        )
    return PreflightCheck(
        "ok", subject, "reachable", f"{url}: a small object was written in {duration(seconds)} and deleted."
    )


def commits_each_write(folder: Any) -> bool:
    """Whether this is a repository on the Hugging Face hub, where each write is a commit."""
    protocol = folder.fs.protocol
    return "hf" in ((protocol,) if isinstance(protocol, str) else protocol) and not str(folder.path).removeprefix(
        "hf://"
    ).startswith("buckets/")


def within(seconds: float, function: Callable[[], T], place: str) -> T:
    """Returns what the function returns, and raises what it raises.

    Raises:
        RemoteFailed: the function took longer. It continues in a daemon thread, which keeps no process alive.
    """
    result = in_thread(function, "datatrove-ckpt check")
    try:
        wait([result], seconds)
    except KeyboardInterrupt:
        wait([result], _GRACE_SECONDS)  # it removes its probe
        raise
    if not result.done():
        raise RemoteFailed(f"{place}: there was no answer within {seconds:.0f} s.")
    return result.result()
