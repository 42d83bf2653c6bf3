"""Reuses the answers of an old run (``answers_from``), or of ``run --sample``, for equal requests.

An answer is used if document ordinal, rank, index of the rollout and final payload (model, prompt,
parameters) are equal. Permanent errors are not used, because the change may correct them. A commit
deletes its answers, unless the old run had ``keep_answers``, as samples have.

Each start copies the answers to a temporary file, so no crash leaves a state, and the old run is
only read. A document that needs an answer moves its old answers to the rank's own request cache
(``RankFiles.take_answers``). Copying all answers there was rejected: answers of documents beyond a
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

    Raises:
        ConfigError, CheckpointMismatch: ``root`` holds no checkpoint, or no usable answers.
        CheckpointLocked: a process works on this rank of the old run.
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
    run = read_run(folder / layout.RUN)
    _refuse_other_settings(root, run, identity)
    # It is not known with which of two values an answer was received.
    mixed = [name for name in _accepted(run) if affects_answers(name)]
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
            "answers_from: committed documents have answers only if that run had keep_answers."
        )
    return cache


def _refuse_other_settings(root: Path, run: Json, identity: RunIdentity) -> None:
    binding = {"tasks"}
    # Otherwise some answers may come from the new model.
    if "models" not in run and "model" not in _accepted(run):
        binding.add("model")
    changes = [
        change
        for change in compare(run, identity)
        if change.field in binding or affects_answers(change.field)
    ]
    if changes:
        raise mismatch_error(
            f"answers_from: the answers in {root} were",
            changes,
            "Go back to the old values, or leave answers_from out.",
        )


def _accepted(run: Json) -> list[str]:
    return sorted({str(change.get("field")) for change in run.get("accepted_changes", [])})


def with_samples(
    root: Path, rank: int, servers: str, old: RequestCache | None
) -> RequestCache | None:
    """Adds the answers that samples of this run have for documents of this rank. The newest wins.

    A sample has ranks of its own; ``sampled.json`` lists their documents. A sample is skipped if it
    still runs, cannot be read, or was answered by other servers.

    Args:
        old: the cache to add to; None: make a cache if there are answers.
    """
    rows: list[CachedRequest] = []
    for folder in layout.sample_folders(root):
        try:
            rows += _sampled(folder, rank, servers)
        except (CkptError, OSError, LookupError, ValueError) as error:
            logger.warning(f"The answers of the sample in {folder} are not used: {error}")
    if rows and old is None:
        with _temporary_folder() as folder_name:
            old = RequestCache(Path(folder_name, layout.CACHE))
    if old is not None:
        old.put(rows)
    return old


def _sampled(folder: Path, rank: int, servers: str) -> Iterator[CachedRequest]:
    sampled = orjson.loads((folder / layout.SAMPLED).read_bytes())
    if sampled["servers"] != servers:
        return
    for number, documents in enumerate(sampled["documents"]):
        ordinals = {index: ordinal for index, (of, ordinal) in enumerate(documents) if of == rank}
        rank_folder = layout.rank_folder(folder, number)
        # Its files do not change any more. Taking the lock would exclude the other ranks.
        if ordinals and rank_folder.is_dir() and lock_holder(rank_folder / layout.LOCK) is None:
            cache = _copy(rank_folder)
            for row in cache.answers_since(0, ordinals):
                yield row._replace(ordinal=ordinals[row.ordinal])
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
    with _temporary_folder() as copy:
        for name in layout.CACHE_FILES:  # opening it in its place would change it
            if (folder / name).exists():
                with explained("copy", folder / name):
                    shutil.copy(folder / name, copy)
        cache = RequestCache(Path(copy, layout.CACHE))
        answers = read_answers(folder / layout.KEPT_ANSWERS)
        while group := list(islice(answers, 1000)):
            cache.put(group)
        cache.forget_errors()
        cache.forget_pieces()
        return cache


def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    # The files of a cache lose their names when the block ends, and vanish when the connection
    # closes.
    return tempfile.TemporaryDirectory(prefix="datatrove-ckpt-")
