"""Reads all ranks of a run into one ``RunState``. Changes nothing, and holds no lock."""

from __future__ import annotations

import shlex
import time
from contextlib import suppress
from pathlib import Path

from datatrove_ckpt.checkpoint import layout
from datatrove_ckpt.checkpoint.identity import removed_ranks, settings_in
from datatrove_ckpt.checkpoint.ledger import (
    RankLedger,
    Want,
    check_readable,
    find_ranks,
    read_rank,
)
from datatrove_ckpt.checkpoint.limits import noted_limits
from datatrove_ckpt.checkpoint.lines import Json
from datatrove_ckpt.common.formatting import without_flag
from datatrove_ckpt.config.paths import COMMAND_FILE
from datatrove_ckpt.errors import CheckpointLocked, CkptError
from datatrove_ckpt.run_folder.run_state import RunState, add_up, find_left, find_slow, rank_state
from datatrove_ckpt.run_folder.where import Place

# Limit for all ranks together: large files of many ranks are estimated.
_BYTES = 1 << 24
_MOST_BYTES = 1 << 23
_WANTED = Want.HISTORY | Want.JOURNALS | Want.LETTERS
_NOT_FOR_ALL = (layout.CACHE, layout.RETRY_INPUT)


def wanted_files(name: str, size: int) -> bool:
    return name not in _NOT_FOR_ALL and size <= _MOST_BYTES


def _command_in(logs: Path) -> str:
    """Returns the command that started a run; if its run folder was moved or copied since, with the
    folder of now.
    """
    command, _, started_in = Path(logs, COMMAND_FILE).read_text().partition("\n")
    if not started_in or (Path(started_in).exists() and logs.samefile(started_in)):
        return command
    elsewhere = without_flag(shlex.split(command), "--run-folder")
    return shlex.join([*elsewhere, "--run-folder", str(logs.parent)])


def read_run_state(place: Place, now: float | None = None) -> RunState:
    """Reads the ranks of a place.

    Raises ConfigError if there is none, or this user may not read one.
    """
    found = find_ranks(place.folder)
    if now is None:
        now = time.time()
    state = RunState(place.what, place.is_copy, now)
    state.logs = place.logging_dir
    state.limits = noted_limits(place.folder)
    if place.config:
        state.command = shlex.join(["datatrove-ckpt", "run", *place.given])
        state.tasks = place.tasks
    elif place.logging_dir:
        # Redaction may have hidden a quote of the command.
        with suppress(OSError, ValueError):
            state.command = _command_in(Path(place.logging_dir))
    run: Json = {}
    for folder in found:
        wanted = _WANTED
        if not run:
            wanted |= Want.SETTINGS
        ledger = read_rank(folder, wanted, _BYTES // len(found))
        check_readable(place.folder, ledger)
        copied_at = None
        if place.mirror is not None:
            copied = place.mirror.ranks.get(str(ledger.key))
            # None: a refresh failed halfway.
            copied_at = 0.0 if copied is None else copied.when
        rank = rank_state(ledger, now, copied_at)
        if ledger.root:
            state.retries.append(rank)
        else:
            state.ranks.append(rank)
            run = run or ledger.run
    if run:
        state.identity = {"format": run["format"], **settings_in(run)}
        state.tasks = int(state.identity.get("tasks") or state.tasks)
    numbers = {rank.rank for rank in state.ranks}
    state.missing = [rank for rank in range(state.tasks) if rank not in numbers]
    state.gone = removed_ranks(place.folder, state.missing)
    state.foreign = [rank.rank for rank in state.ranks if 0 < state.tasks <= rank.rank]
    state.ranks = [rank for rank in state.ranks if rank.rank not in state.foreign]
    find_slow(state.ranks)
    find_left(state.ranks + state.retries)
    state.totals = add_up(state.ranks, state.read_at, state.tasks)
    state.retried = add_up(state.retries, state.read_at)
    words = [rank.last_word for rank in state.ranks + state.retries if rank.last_word is not None]
    state.newest = max(words, default=None)
    for sample in layout.sample_folders(place.folder):
        for folder in layout.rank_folders(sample):
            state.sampled += read_rank(folder, Want.HISTORY).numbers()
    with suppress(OSError, CkptError):  # claims are hints
        _read_claims(state, place)
    return state


def _read_claims(state: RunState, place: Place) -> None:
    folder = place.logging_dir
    if folder is None and not place.is_copy:
        folder = str(place.folder.parent / "logs")
    if folder is None or ("://" not in folder and not Path(folder, "claims").is_dir()):
        return
    from datatrove_ckpt.claims.claims import (
        claimants,
        given_up,
        open_store,  # fsspec is slow to import
    )

    store = open_store(f"{folder.rstrip('/')}/claims")
    finished = {rank.rank for rank in state.ranks if rank.state == "finished"}
    for worker in claimants(store):
        left = [rank for rank in worker.ranks if rank not in finished]
        if left or worker.is_alive:
            state.workers.append(worker._replace(ranks=left))
    state.given_up = given_up(store)


def check_idle(place: Place, ranks: list[RankLedger]) -> None:
    """Raises CheckpointLocked if a process works on the ranks, as far as the mirror shows."""
    state = read_run_state(place)
    running = {
        (rank.root, rank.rank): rank.process
        for rank in state.ranks + state.retries
        if rank.state == "running"
    }
    for rank in ranks:
        if rank.key in running:
            raise CheckpointLocked(
                f"{rank.place}: {running[rank.key]} works on this task, or was killed less than 20 "
                f"minutes ago, as its mirror {place.what} shows. Wait for it to end, or stop it, "
                "and run the same command again."
            )
