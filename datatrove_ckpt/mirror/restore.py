"""What a rank does before it opens its checkpoint, when that has a mirror: find out whether the mirror knows more.

    this node has         the mirror has             what happens
    nothing               nothing                    the rank starts
    nothing               generations                the newest whole one is restored; none is whole: refused
    a folder              nothing, or what the       the folder is used: a local disk knows all that its mirror does
                          folder's owners made
    a folder              more: another node went    the newest whole one is restored; the folder is set aside
                          on with this run           as 00000.replaced-1
    a folder              another run's, or another  refused: neither continues the other
                          first start's
    nothing               cannot be reached          refused: starting from nothing costs money
    a folder              cannot be reached          the folder is used, with a warning
    either                no place: its bucket does  refused: the setting names no place, and without a mirror a node
                          not exist                  that is lost costs all that it did

Who made what is told by the owners' nonces that ``run.json`` and the generations name. Choosing the further one never
makes two of a run: what the other knew beyond it is asked again, and chunks that it had committed are written again,
whole, in place of the files that are there.

The folder is built beside its place and renamed, so a crash leaves none or all of it. What is restored is an owner of
its own, who knows the generations that were there, damaged ones too: they are not tried again.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import orjson
from loguru import logger

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.identity import read_run
from datatrove_ckpt.checkpoint.layout import CACHE, LOCK, RUN, rank_folder, retry_number
from datatrove_ckpt.checkpoint.request_cache import RequestCache
from datatrove_ckpt.errors import CheckpointCorrupt, CheckpointMismatch, StorageFailed
from datatrove_ckpt.formatting import error_text
from datatrove_ckpt.mirror.manifests import Damaged, Manifest, Part, Version, Versions, covers, decode_answers
from datatrove_ckpt.mirror.object_store import Store
from datatrove_ckpt.remote_errors import io_errors


def restore_rank(url: str, root: Path, rank: int, retries: bool) -> None:
    """Restores what this node lacks of a rank, see ``restore``.

    Args:
        url: ``checkpoints_remote_dir``. ``root``: ``checkpoints_local_dir``.
        retries: also the rank's passes over dead letters.
    """
    folder = rank_folder(root, rank).name
    restore(f"{url}/{folder}", root / folder)
    if retries:
        try:
            names = Store(url).names()
        except io_errors() as error:
            raise _unreadable(url, error) from error
        for name in names:
            if retry_number(name) is not None:
                restore(f"{url}/{name}/{folder}", root / name / folder)


def restore(url: str, folder: Path) -> None:
    """Puts a rank's folder in place from its mirror, if that holds what the folder does not.

    Args:
        url: of the rank's folder on the remote.

    Raises:
        StorageFailed: there is no folder, and the mirror cannot be read.
        CheckpointCorrupt: no generation is whole.
        CheckpointMismatch: folder and mirror have nothing to do with each other.
        CheckpointLocked: a process works on the folder.
        ConfigError: the bucket does not exist.
    """
    owner = _owner(folder)
    generations = Versions(url)
    try:
        names = generations.names()
        lost = owner is None and not names and bool(generations.objects())
    except io_errors() as error:
        if owner is None:
            raise _unreadable(url, error) from error
        logger.warning(f"Could not look at the mirror {url} ({error_text(error)}); going on with {folder} as it is.")
        return
    if lost:
        raise _refused(url, "There is none, but there are objects.")
    if not names:
        logger.info(f"The mirror {url} holds no checkpoint yet.")
        return
    if owner is not None and covers(owner, names[-1]):
        return
    try:
        _bring_back(generations, names, folder, owner)
    except io_errors() as error:
        raise _unreadable(url, error) from error


def _unreadable(url: str, error: Exception) -> StorageFailed:
    return StorageFailed(
        f"Could not read the mirror {url}: {error_text(error)}. Correct that (network, credentials) and run the same "
        "command again; or leave out checkpoints_remote_dir, to start without what it holds."
    )


def _owner(folder: Path) -> dict[str, Any] | None:
    """None: there is no checkpoint."""
    path = folder / RUN
    return read_run(path).get("owner", {"nonce": ""}) if path.exists() else None


def _bring_back(generations: Versions, names: list[Version], folder: Path, owner: dict[str, Any] | None) -> None:
    if owner is not None:
        _refuse_unrelated(generations, names, folder, owner)
    files.disk.make_dirs(folder.parent)
    with ExitStack() as stack:
        guard = files.Lock(folder.with_name(f"{folder.name}.restoring.lock"))
        stack.callback(guard.release, remove=True)
        staging = folder.with_name(f"{folder.name}.restoring")
        if (built := _build(generations, names, staging)) is None:
            return
        used, manifest = built
        aside = _set_aside(folder, stack)
        files.disk.rename(staging, folder)
        files.disk.sync_dir(folder.parent)
    logger.info(f"Restored {folder} from generation {used.number} at {generations.url}, made at {manifest.when}.")
    if owner is not None:
        logger.warning(
            f"Another node has gone on with this rank since {folder} was written here (generation {used.number} at "
            f"{generations.url}). The old folder is kept as {aside}; remove it when you like."
        )


def _refuse_unrelated(generations: Versions, names: list[Version], folder: Path, owner: dict[str, Any]) -> None:
    ours = {owner["nonce"], *owner.get("earlier", ())}
    theirs = {name.nonce for name in names}
    for name in names:
        manifest = generations.read(name)
        theirs |= set(manifest.run["owner"]["earlier"]) if manifest else set()
    if not ours & theirs:
        raise CheckpointMismatch(
            f"{folder} and its mirror {generations.url} were begun separately: neither goes on where the other ends. "
            "Remove the folder to go on from the mirror, or remove the mirror to go on from the folder."
        )


def _build(generations: Versions, names: list[Version], staging: Path) -> tuple[Version, Manifest] | None:
    """The newest whole generation, in the staging folder. None: nothing was ever mirrored.

    Raises:
        CheckpointCorrupt: no generation is whole.
    """
    problems = []
    for name in reversed(names):
        try:
            manifest = generations.read(name)
            if manifest is None:
                raise Damaged("its manifest is damaged, or of another version")
            _fetch(generations, manifest, names, staging)
        except Damaged as damage:
            problems.append(f"generation {name.number} ({name.file}): {damage}")
            continue
        if problems:
            logger.warning(
                f"Of the mirror {generations.url}, generation {name.number} of {manifest.when} is used, because newer "
                f"ones are not whole: {'; '.join(problems)}. What came after it is asked again."
            )
        return name, manifest
    if not generations.objects():
        # A first generation is a claim, and holds nothing else. Its writer was killed over it.
        logger.warning(f"{problems[0]}. Nothing else was mirrored to {generations.url} yet: starting anew.")
        for name in names:
            generations.remove(name)
        return None
    raise _refused(generations.url, "\n  ".join(problems))


def _refused(url: str, problems: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        f"No generation at {url} is whole:\n  {problems}\nBring the objects back if you can (a bucket may keep old "
        f"versions), and run the same command again. To start this rank over, and pay for it again, remove {url}."
    )


def _fetch(generations: Versions, manifest: Manifest, names: list[Version], staging: Path) -> None:
    files.disk.remove_tree(staging)
    files.disk.make_dir(staging)
    for file, parts in manifest.files.items():
        _write(staging / file, (generations.fetch(part) for part in parts))
    if not manifest.finished:
        _fill_cache(generations, manifest.answers, staging / CACHE)
    run = {**manifest.run, "owner": _new_owner(manifest.run["owner"], names)}
    _write(staging / RUN, [orjson.dumps(run, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)])
    files.disk.sync_dir(staging)


def _write(path: Path, blocks: Iterable[bytes]) -> None:
    fd = files.disk.create(path)
    try:
        for block in blocks:
            files.disk.write(fd, block, path)
    finally:
        os.close(fd)
    files.disk.sync(path)


def _fill_cache(generations: Versions, answers: list[Part], path: Path) -> None:
    """An unfinished rank has a request cache, also an empty one."""
    cache = RequestCache(path)
    try:
        for part in answers:
            cache.put(decode_answers(generations.fetch(part)))
    finally:
        cache.close()  # which writes SQLite's log into the database
    files.disk.sync(path)


def _new_owner(owner: dict[str, Any], names: list[Version]) -> dict[str, Any]:
    """Descends from all that is on the mirror. What is damaged there is no reason to look at it again."""
    earlier = dict(owner["earlier"])
    for name in names:
        if earlier.get(name.nonce, 0) is not None:
            earlier[name.nonce] = name.number
    return {
        **owner,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "nonce": secrets.token_hex(8),
        "earlier": earlier,
    }


def _set_aside(folder: Path, stack: ExitStack) -> Path | None:
    """Moves away what is in the folder's place, unless a process works there."""
    if not folder.exists():
        return None
    stack.callback(files.Lock(folder / LOCK).release)
    number = 1
    while (aside := folder.with_name(f"{folder.name}.replaced-{number}")).exists():
        number += 1
    files.disk.rename(folder, aside)
    return aside
