"""Starts a new run beside one whose prompt or model is changed on purpose, with what is still valid.

    kept                                    because
    fingerprints of documents, their        a document at the end of each chunk, and of each journal, shows whether the
    number where it is known                new run reads the same input
    the commits of hub datasets             a branch may have moved since
    cached answers                          one is used if the final payload of a request (model, prompt, parameters)
                                            is equal; the server's settings must be the same

Nothing else: no commit, no journal, no dead letter, no file of the output. Permanent errors are not kept, because what
a server refused may be what was changed. A commit deletes its answers, unless the user has set ``keep_answers``.

The new folder is built beside its place and renamed, so a crash leaves nothing or all of it. The other run is only
read: its request caches are copied under the locks of their ranks.
"""

from __future__ import annotations

import os
import shutil
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import orjson

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.commits import Commit
from datatrove_ckpt.checkpoint.completeness import Expected
from datatrove_ckpt.checkpoint.dealt_out import ranks_with_documents, refuse_unfitting
from datatrove_ckpt.checkpoint.disk_errors import explained
from datatrove_ckpt.checkpoint.forks import FORKED, KEPT_SETTINGS, Forked
from datatrove_ckpt.checkpoint.identity import new_owner, read_run
from datatrove_ckpt.checkpoint.job import name_tasks
from datatrove_ckpt.checkpoint.kept_answers import read_answers
from datatrove_ckpt.checkpoint.layout import (
    CACHE,
    CACHE_LOGS,
    KEPT_ANSWERS,
    LOCK,
    RUN,
    SHARES,
    rank_folder,
    rank_numbers,
)
from datatrove_ckpt.checkpoint.request_cache import Answer, AnswerKey, CachedRequest, RequestCache
from datatrove_ckpt.checkpoint.resharding import refuse_half_resharded, unstarted_ranks
from datatrove_ckpt.checkpoint.sealed import sealed_json
from datatrove_ckpt.checkpoint.versions import RESHARDS, stamped
from datatrove_ckpt.errors import CheckpointCorrupt, ConfigError
from datatrove_ckpt.maintenance.inspect import RankFolder, find_ranks, name_place, summarise

_REVISIONS = "dataset_*.json"
"""Commits of hub datasets that the ranks of a job read, in ``checkpoints_local_dir`` (see ``readers/revisions.py``)."""
_BLOCK = 1 << 20
_ROWS_AT_ONCE = 1000


@dataclass
class KeptAnswers:
    """Sums over cached answers. ``committed``: how many of the documents are committed in the other run."""

    documents: int = 0
    committed: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass
class Fork:
    """What was kept. ``positions``: number of documents by which another input is noticed."""

    ranks: int = 0
    documents: dict[int, int] = field(default_factory=dict)
    """How many documents the input of a rank has, where that is known."""
    positions: int = 0
    answers: KeptAnswers = field(default_factory=KeptAnswers)
    unusable: Counter[str] = field(default_factory=Counter)
    """Why answers of ranks cannot be used, with their number."""


@contextmanager
def built(
    source: Path, said: str, target: Path, why_unusable: Callable[[RankFolder], str] | None
) -> Iterator[tuple[Fork, Path]]:
    """Builds the checkpoint of the new run in a folder beside ``target``, which is removed at the end.

    Args:
        source: the other run's checkpoint folder.
        said: its name for people.
        target: ``checkpoints_local_dir`` of the new run.
        why_unusable: tells why a rank's answers cannot be used, see ``Source``; None: no answers are wanted.

    Raises:
        ConfigError: ``target`` holds something, or the other run has ranks that no task reads any more.
        CheckpointLocked: a process works on a rank of the other run, or makes the same fork.
        CheckpointCorrupt: a rank of the other run is damaged.
        CheckpointMismatch: ``reshard`` was interrupted there.
        StorageFailed: the disk refused something.
    """
    target = target.absolute()
    check_target(source, target)
    check_source(source)
    files.disk.make_dirs(target.parent)
    with ExitStack() as stack:
        guard = files.Lock(target.with_name(f"{target.name}.forking.lock"))
        stack.callback(guard.release, remove=True)
        folder = target.with_name(f"{target.name}.forking")
        files.disk.remove_tree(folder)  # of a fork that was killed
        stack.callback(files.disk.remove_tree, folder)
        files.disk.make_dir(folder)
        fork = Fork()
        for rank in find_ranks(source):
            if not rank.root and rank.identity:
                why = None if why_unusable is None else why_unusable(rank)
                fork.unusable.update([why] if why else [])
                _fork_rank(rank, said, rank_folder(folder, rank.number), why == "", fork)
        for path in sorted([*source.glob(_REVISIONS), *source.glob(SHARES)]):
            _copy(path, folder / path.name)
        files.disk.sync_dir(folder)
        yield fork, folder


def put_in_place(folder: Path, target: Path) -> None:
    """Makes what was built the checkpoint of the new run. The only effect that anybody else sees."""
    target = target.absolute()
    files.disk.rename(folder, target)
    files.disk.sync_dir(target.parent)


def check_mirror(url: str) -> None:
    """
    Raises:
        ConfigError: the mirror of the new run holds ranks already, or its bucket does not exist.
        StorageFailed: it cannot be read.
    """
    from datatrove_ckpt.mirror.reading import holds_ranks  # fsspec is slow to import

    if holds_ranks(url):
        raise ConfigError(
            f"checkpoints_remote_dir: {url} holds a checkpoint already, and a fork starts in a new one. Choose another "
            "URL; or remove it, if a fork that was interrupted has made it."
        )


def upload(folder: Path, url: str) -> None:
    """Uploads what was built: the tasks of the new run may start on other nodes.

    Raises:
        StorageFailed: a rank could not be uploaded.
    """
    from datatrove_ckpt.mirror.changing import upload_rank
    from datatrove_ckpt.mirror.job import upload_shares

    upload_shares(url, folder)  # first: a rank that finds none reads what datatrove deals out
    for number in rank_numbers(folder):
        rank = rank_folder(folder, number)
        upload_rank(f"{url}/{rank.name}", rank)


def check_target(source: Path, target: Path) -> None:
    """
    Raises:
        ConfigError: the new folder holds something, or one folder is inside the other one.
    """
    one, two = source.resolve(), target.resolve()
    if one == two or one.is_relative_to(two) or two.is_relative_to(one):
        raise ConfigError(f"{target}: is, or holds, or is inside {source}. Fork into a folder of its own.")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target}: exists already, and a fork starts in a new folder. Choose another one.")


def is_made(target: Path, said: str) -> bool:
    """Whether ``target`` is a fork of the run ``said``, and nobody has worked on it: the same command was killed late.

    Raises:
        CheckpointCorrupt: a ``run.json`` in it is damaged.
    """
    ranks = rank_numbers(target) if target.is_dir() else []
    if not ranks or unstarted_ranks(target) != ranks:
        return False
    forked = Forked.of(read_run(rank_folder(target, ranks[0]) / RUN))
    return forked is not None and forked.source == said


def check_source(source: Path) -> None:
    """
    Raises:
        CheckpointMismatch: ``reshard`` was interrupted there, or its ``shares.json`` and a rank do not fit each other.
        ConfigError: it has ranks that no task reads any more.
    """
    refuse_half_resharded(source)
    refuse_unfitting(source)
    if retired := ranks_with_documents(source):
        raise ConfigError(
            f"{source}: reshard has left {name_tasks(sorted(retired))} with documents that no task would read again, "
            "so the new run would lack them. Deal the other run out to as many tasks as it had before (datatrove-ckpt "
            f"reshard ... --tasks {max(retired) + 1}), then fork it; or start a new run, which is no fork."
        )


def _fork_rank(rank: RankFolder, said: str, folder: Path, keep_answers: bool, fork: Fork) -> None:
    summary, commits = summarise(rank)
    if summary.error is not None:
        place = name_place(rank.root, rank.number)
        raise CheckpointCorrupt(f"{place}: {summary.error} Nothing was forked: repair that first, or fork a copy.")
    before = Forked.of(rank.identity) or Forked("")  # of the run that the other one was forked from
    fingerprints = {**before.fingerprints, **_fingerprints(rank, commits.values())}
    documents = Expected.read(rank.folder).documents
    documents = before.documents if documents is None else documents
    if documents is not None:
        fork.documents[rank.number] = documents
    forked = Forked(said, documents, fingerprints)
    files.disk.make_dir(folder)
    with _caches_of(rank):
        if keep_answers:
            _copy_cache(rank.folder, folder)
    committed = [range(commit.first_ordinal, commit.next_ordinal) for commit in commits.values()]
    _keep_answers(folder, rank.folder / KEPT_ANSWERS if keep_answers else None, committed, fork.answers)
    settings = KEPT_SETTINGS if keep_answers else ("identity_version", "tasks")
    fields = {name: rank.identity[name] for name in (*settings, RESHARDS) if name in rank.identity}
    content = {**stamped(fields), FORKED: forked.to_json(), "owner": new_owner()}
    files.disk.replace(folder / RUN, sealed_json(content))
    fork.ranks += 1
    fork.positions += len(fingerprints)


def _fingerprints(rank: RankFolder, commits: Iterable[Commit]) -> dict[int, str]:
    found = {commit.next_ordinal - 1: commit.last_input for commit in commits if commit.counts.read}
    for chunk_index in rank.journals():
        known, _ = rank.documents_in_journal(chunk_index)
        if known:
            found[max(known)] = known[max(known)]
    return {ordinal: text for ordinal, text in sorted(found.items()) if text}


# answers -------------------------------------------------------------------------------------------------------------


@contextmanager
def _caches_of(rank: RankFolder) -> Iterator[None]:
    """Nobody writes to the rank's request cache inside the block. A finished rank has none, and stays finished.

    Raises:
        CheckpointLocked: a process works on the rank.
    """
    if not (rank.folder / CACHE).exists() and not (rank.folder / LOCK).exists():
        yield
        return
    there = (rank.folder / LOCK).exists()
    lock = files.Lock(rank.folder / LOCK)
    try:
        yield
    finally:
        lock.release(remove=not there)


def _copy_cache(source: Path, folder: Path) -> None:
    """Copies the database with its logs: opening it in its place would change it."""
    for name in (CACHE, *(CACHE + suffix for suffix in CACHE_LOGS)):
        if (source / name).exists():
            _copy(source / name, folder / name)


def _copy(source: Path, target: Path) -> None:
    with explained("read", source), source.open("rb") as file:
        fd = files.disk.create(target)
        try:
            while block := file.read(_BLOCK):
                files.disk.write(fd, block, target)
        finally:
            os.close(fd)
    files.disk.sync(target)


def _keep_answers(folder: Path, kept: Path | None, committed: list[range], sums: KeptAnswers) -> None:
    """Makes the request cache, even if it is empty: a rank that is not finished always has one. Counts its answers.

    Args:
        kept: the file with the answers of committed documents; None: leave them out.
        committed: the ordinals of each commit of the other run.
    """
    path, done = folder / CACHE, sorted(committed, key=lambda ordinals: ordinals.start)
    starts = [ordinals.start for ordinals in done]
    cache = RequestCache(path)
    try:
        cache.forget_errors()
        answers = read_answers(kept) if kept is not None else iter(())
        while group := list(islice(answers, _ROWS_AT_ONCE)):
            cache.put(
                CachedRequest(0, ordinal, doc_id, AnswerKey(*key), Answer(result, None))
                for ordinal, doc_id, key, result in group
            )
        for ordinal in sorted(cache.ordinals()):
            found = [answer.result for answer in cache.answers(ordinal).values() if answer.result is not None]
            sums.documents += bool(found)
            before = bisect_right(starts, ordinal)
            sums.committed += bool(found) and before > 0 and ordinal in done[before - 1]
            for result in found:
                _count(result, sums)
    finally:
        cache.close()  # moves SQLite's log into the database
    for aside in folder.glob(f"{CACHE}.damaged-*"):
        shutil.rmtree(aside) if aside.is_dir() else aside.unlink()  # the other run still has it
    files.disk.sync(path)


def _count(result: bytes, sums: KeptAnswers) -> None:
    usage = orjson.loads(result).get("usage") or {}
    sums.requests += 1
    sums.prompt_tokens += usage.get("prompt_tokens") or 0
    sums.completion_tokens += usage.get("completion_tokens") or 0
