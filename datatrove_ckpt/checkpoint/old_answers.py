"""Reuses the answers of an old run (``answers_from``), or of ``run --sample``, for equal requests.

The new run may have another prompt or rollout, and reads the old run's input. An answer is used if
document ordinal, rank, index of the rollout and final payload (model, prompt, parameters) are
equal. Permanent errors are not used, because the change may correct them. A commit deletes its
answers, unless the old run had ``keep_answers``, as samples have.

Each start copies the answers to a temporary file, so no crash leaves a state, and the old run is
only read. A document that needs an answer moves its old answers to the rank's own request cache
(``RankFiles.take_answers``). Copying all answers there was rejected: those of documents beyond a
shorter input would look as if the input had shrunk, and a mirror would upload them.
"""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

import orjson
from loguru import logger

from datatrove_ckpt.checkpoint import layout
from datatrove_ckpt.checkpoint.checksummed_lines import Json, explained
from datatrove_ckpt.checkpoint.compare import compare, mismatch_error
from datatrove_ckpt.checkpoint.identity import RunIdentity, affects_answers, read_run
from datatrove_ckpt.checkpoint.lock import Lock, lock_holder
from datatrove_ckpt.checkpoint.request_cache import CachedRequest, RequestCache, read_answers
from datatrove_ckpt.common.formatting import plural
from datatrove_ckpt.errors import CkptError, ConfigError


def open_old_answers(root: Path, rank: int, identity: RunIdentity) -> RequestCache | None:
    """Returns a copy of an old run's answers for this rank; None if it has no usable answers.

    Args:
        root: the old run's ``checkpoints_local_dir``, or its run folder.

    Raises:
        ConfigError, CheckpointMismatch: ``root`` holds no checkpoint, or no usable answers.
        CheckpointLocked: a process works on this rank of the old run.
        CheckpointCorrupt, StorageFailed: the old rank cannot be read.
    """
    if (root / "checkpoints").is_dir():
        root /= "checkpoints"
    if not root.is_dir() or not layout.rank_numbers(root):
        raise ConfigError(
            f"answers_from: {root} holds no checkpoint. Name the folder of a run that has begun."
        )
    folder = layout.rank_folder(root, rank)
    if not (folder / layout.RUN).exists():
        logger.warning(f"answers_from: {folder} has no run.json, so it has no answers.")
        return None
    kept = read_run(folder / layout.RUN)
    _refuse_other_settings(root, kept, identity)
    # It is not known with which of two values an answer was received.
    mixed = [name for name in _accepted(kept) if affects_answers(name)]
    if mixed:
        logger.warning(
            f"answers_from: no answer in {folder} is used: {', '.join(mixed)} changed in the "
            "middle of that run."
        )
        return None
    cache = _copy_locked(folder)
    number = cache.count()
    logger.info(
        f"answers_from: {folder} has {plural(number, 'answer')}. Requests that are equal are not "
        "sent."
    )
    if not number:
        logger.warning(
            "answers_from: of committed documents, there are answers only if that run had "
            "keep_answers."
        )
    return cache


def _refuse_other_settings(root: Path, kept: Json, identity: RunIdentity) -> None:
    binding = {"tasks"}
    # Otherwise some answers may come from the new model.
    if "models" not in kept and "model" not in _accepted(kept):
        binding.add("model")
    changes = [
        change
        for change in compare(kept, identity)
        if change.field in binding or affects_answers(change.field)
    ]
    if changes:
        raise mismatch_error(
            f"answers_from: the answers in {root} were",
            changes,
            "Go back to the old values, or leave answers_from out: then every request is sent.",
        )


def _accepted(kept: Json) -> list[str]:
    return sorted({str(change.get("field")) for change in kept.get("accepted_changes", [])})


def with_samples(
    root: Path, rank: int, servers: str, old: RequestCache | None
) -> RequestCache | None:
    """Adds what samples of this run were answered for documents of this rank; the newest is taken.

    A sample has ranks of its own, and all their documents in ``sampled.json``. One that still runs,
    that cannot be read, or that other servers answered is left out.

    Args:
        root: ``checkpoints_local_dir``.
        servers: see ``servers_digest``.
        old: the cache to add to; None: none yet.
    """
    rows: list[CachedRequest] = []
    for folder in layout.sample_folders(root):
        try:
            rows += _sampled(folder, rank, servers)
        except (CkptError, OSError, LookupError, ValueError) as error:
            logger.warning(f"The answers of the sample in {folder} are not used: {error}")
    if rows and old is None:
        with _temporary_folder() as place:
            old = RequestCache(Path(place, layout.CACHE))
    if old is not None:
        old.put(rows)
    return old


def _sampled(folder: Path, rank: int, servers: str) -> Iterator[CachedRequest]:
    sampled = orjson.loads((folder / layout.SAMPLED).read_bytes())
    if sampled["servers"] != servers:
        return
    for number, places in enumerate(sampled["documents"]):
        own = {index: ordinal for index, (of, ordinal) in enumerate(places) if of == rank}
        place = layout.rank_folder(folder, number)
        # Its files do not change any more. A lock would keep the other ranks away.
        if own and place.is_dir() and lock_holder(place / layout.LOCK) is None:
            cache = _copy(place)
            for row in cache.answers_since(0, own):
                yield row._replace(ordinal=own[row.ordinal])
            cache.close()


def _copy_locked(folder: Path) -> RequestCache:
    lock = folder / layout.LOCK
    was_there = lock.exists()
    with ExitStack() as stack:
        # A finished rank has neither, and stays finished.
        if was_there or (folder / layout.CACHE).exists():
            stack.callback(Lock(lock).release, remove=not was_there)
        return _copy(folder)


def _copy(folder: Path) -> RequestCache:
    with _temporary_folder() as place:
        for name in layout.CACHE_FILES:  # opening it in its place would change it
            if (folder / name).exists():
                with explained("copy", folder / name):
                    shutil.copy(folder / name, place)
        cache = RequestCache(Path(place, layout.CACHE))
        cache.forget_errors()
        answers = read_answers(folder / layout.KEPT_ANSWERS)
        while group := list(islice(answers, 1000)):
            cache.put(group)
        return cache


def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """The files of a cache lose their names when its block ends, and vanish when the connection
    closes.
    """
    return tempfile.TemporaryDirectory(prefix="datatrove-ckpt-")
