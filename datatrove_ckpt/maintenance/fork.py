"""Starts a new run beside one whose prompt or model is changed on purpose, with what is still valid.

    kept                                    because
    fingerprints of documents, their        a document at the end of each chunk, and of each journal, shows whether the
    number where it is known                new run reads the same input
    the commits of hub datasets             a branch may have moved since
    cached answers                          one is used if the final payload of a request (model, prompt, parameters)
                                            is equal; the server's settings must be the same

Nothing else: no commit, no journal, no dead letter, no file of the output. Permanent errors are not kept, because what
a server refused may be what was changed. A commit deletes its answers, unless the user has set ``keep_answers``.

The new folder is built beside its place and renamed, so a crash leaves nothing or all of it. While the fork's lock is
there and the folder is not, no rank starts; the same command begins again. The other run is only read: its request
caches are copied under the locks of their ranks.
"""

from __future__ import annotations

import shutil
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path

import orjson

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.identity import (
    FORKED,
    OF_INPUT,
    RESHARDS,
    Forked,
    RunIdentity,
    compare,
    decides,
    fork_lock,
    is_unstarted,
    new_owner,
    read_run,
    same_value,
    stamped,
)
from datatrove_ckpt.checkpoint.job import JobLedger, name_tasks
from datatrove_ckpt.checkpoint.layout import (
    CACHE,
    CACHE_LOGS,
    JOB,
    KEPT_ANSWERS,
    LOCK,
    RUN,
    SHARES,
    rank_folder,
)
from datatrove_ckpt.checkpoint.ledger import CHECKED, RankLedger, read_ranks
from datatrove_ckpt.checkpoint.lines import Json, explained, sealed_json
from datatrove_ckpt.checkpoint.request_cache import Answer, AnswerKey, CachedRequest, RequestCache, read_answers
from datatrove_ckpt.errors import CheckpointCorrupt, ConfigError

_REVISIONS = "dataset_*.json"
"""Commits of hub datasets that the ranks of a job read, in ``checkpoints_local_dir`` (see ``readers/revisions.py``)."""
_BLOCK = 1 << 20
_ROWS_AT_ONCE = 1000


@dataclass
class Fork:
    """What was kept.

    Attributes:
        positions: number of documents by which another input is noticed.
        documents: that have cached answers.
        committed: of these, those that are committed in the other run.
        requests, prompt_tokens, completion_tokens: of cached answers.
        unusable: why answers of ranks cannot be used, with their number.
    """

    ranks: int = 0
    positions: int = 0
    documents: int = 0
    committed: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    unusable: Counter[str] = field(default_factory=Counter)


@contextmanager
def built(
    source: Path, said: str, target: Path, why_unusable: Callable[[RankLedger], str] | None
) -> Iterator[tuple[Fork, Path]]:
    """Builds the checkpoint of the new run in a folder beside ``target``, which is removed at the end.

    ``check_source`` and ``check_target`` come first.

    Args:
        source: the other run's checkpoint folder.
        said: its name for people.
        target: ``checkpoints_local_dir`` of the new run.
        why_unusable: tells why a rank's answers cannot be used, see ``Source``; None: no answers are wanted.

    Raises:
        CheckpointLocked: a process works on a rank of the other run, or makes the same fork.
        CheckpointCorrupt: a rank of the other run is damaged.
        StorageFailed: the disk refused something.
    """
    target = target.absolute()
    files.disk.make_dirs(target.parent)
    with ExitStack() as stack:
        guard = files.Lock(fork_lock(target))
        stack.callback(guard.release, remove=True)
        folder = target.with_name(f"{target.name}.forking")
        files.disk.remove_tree(folder)  # of a fork that was killed
        stack.callback(files.disk.remove_tree, folder)
        files.disk.make_dir(folder)
        fork = Fork()
        for rank in read_ranks(source, CHECKED):
            if rank.damage is not None and not rank.root:
                problem = f"{rank.place}: {rank.damage} Nothing was forked: repair that first, or fork a copy."
                raise CheckpointCorrupt(problem)
            if rank.run and not rank.root:
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
    from datatrove_ckpt.mirror.reading import holds_ranks

    if holds_ranks(url):
        raise ConfigError(
            f"checkpoints_remote_dir: {url} holds a checkpoint already, and a fork starts in a new one. Choose another "
            "URL; or remove it, if a fork that was interrupted has made it."
        )


def upload(folder: Path, url: str) -> None:
    """Uploads what was built: the tasks of the new run may start on other nodes. Errors: see ``upload_ranks``."""
    from datatrove_ckpt.mirror.changing import upload_ranks

    upload_ranks(url, folder)


def check_target(source: Path, target: Path) -> None:
    """
    Raises:
        ConfigError: the new folder holds something, or one folder is inside the other one.
    """
    one, two = source.resolve(), target.resolve()
    if one == two or one.is_relative_to(two) or two.is_relative_to(one):
        raise ConfigError(f"{target}: is, or holds, or is inside {source}. Fork into a folder of its own.")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(
            f"{target}: exists already, and a fork starts in a new folder. Choose another one, or start the run there."
        )


def check_source(source: Path) -> None:
    """
    Raises:
        CheckpointMismatch: ``reshard`` was interrupted there, or its ``shares.json`` and a rank do not fit each other.
        ConfigError: it has ranks that no task reads any more.
    """
    job = JobLedger.read(source)
    job.check(job.newer(), job.older())
    retired = [rank for rank, share in job.shares.retired.items() if share or rank_folder(source, rank).exists()]
    if retired:  # no task reads their documents again
        raise ConfigError(
            f"{source}: reshard has left {name_tasks(sorted(retired))} with documents that no task would read again, "
            "so the new run would lack them. Deal the other run out to as many tasks as it had before (datatrove-ckpt "
            f"reshard ... --tasks {max(retired) + 1}), then fork it; or start a new run, which is no fork."
        )


def _fork_rank(rank: RankLedger, said: str, folder: Path, keep_answers: bool, fork: Fork) -> None:
    before = Forked.of(rank.run) or Forked("")  # of the run that the other one was forked from
    found = {commit.next_ordinal - 1: commit.last_input for commit in rank.commits.values() if commit.counts.read}
    found |= rank.ends
    fingerprints = before.fingerprints | {ordinal: text for ordinal, text in sorted(found.items()) if text}
    documents = rank.expected.documents if rank.expected is not None else None
    documents = before.documents if documents is None else documents
    forked = Forked(said, documents, fingerprints)
    files.disk.make_dir(folder)
    lock = rank.folder / LOCK
    with ExitStack() as stack:
        was_there = lock.exists()
        if was_there or (rank.folder / CACHE).exists():  # a finished rank has none, and stays finished
            stack.callback(files.Lock(lock).release, remove=not was_there)
        if keep_answers:
            for name in (CACHE, *(CACHE + suffix for suffix in CACHE_LOGS)):  # opening it in its place would change it
                if (rank.folder / name).exists():
                    _copy(rank.folder / name, folder / name)
    committed = [range(commit.first_ordinal, commit.next_ordinal) for commit in rank.commits.values()]
    _keep_answers(folder, rank.folder / KEPT_ANSWERS if keep_answers else None, committed, fork)
    names = [*OF_INPUT, *filter(decides, rank.run if keep_answers else ()), RESHARDS]
    fields = {name: rank.run[name] for name in names if name in rank.run}
    content = {**stamped(fields), FORKED: forked.to_json(), "owner": new_owner()}
    files.disk.replace(folder / RUN, sealed_json(content))
    fork.ranks += 1
    fork.positions += len(fingerprints)


# answers -------------------------------------------------------------------------------------------------------------


def _copy(source: Path, target: Path) -> None:
    with explained("read", source), source.open("rb") as file:
        files.disk.write_new(target, iter(partial(file.read, _BLOCK), b""))


def _keep_answers(folder: Path, kept: Path | None, committed: list[range], sums: Fork) -> None:
    """Makes the request cache, even if it is empty: a rank that is not finished always has one. Counts its answers.

    Args:
        kept: the file with the answers of committed documents; None: leave them out.
        committed: the ordinals of each commit of the other run.
    """
    path, done = folder / CACHE, sorted(committed, key=lambda ordinals: ordinals.start)
    starts = [ordinals.start for ordinals in done]
    with closing(RequestCache(path)) as cache:  # its end moves SQLite's log into the database
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
                usage = orjson.loads(result).get("usage") or {}
                sums.requests += 1
                sums.prompt_tokens += usage.get("prompt_tokens") or 0
                sums.completion_tokens += usage.get("completion_tokens") or 0
    for aside in folder.glob(f"{CACHE}.damaged-*"):
        shutil.rmtree(aside) if aside.is_dir() else aside.unlink()  # the other run still has it
    files.disk.sync(path)


# the other run --------------------------------------------------------------------------------------------------------

# The run that is forked: what it is now, and of which ranks the new run may use the answers.
#
# A rank's answers are usable if they were all received with the settings that the new run has. ``run.json`` of the rank
# shows that: the settings of now, and the fields whose change the user accepted in the middle. No answer says with
# which of two values it was received, so a rank with such a change keeps none. ``reshard`` moves answers to other
# ranks, so after one a change of any rank counts for all of them.


_MODEL = "model"
"""A part of each final payload: an answer of another model is never used, and answers of two models never mixed up."""


@dataclass(frozen=True)
class Source:
    """The other run.

    Attributes:
        settings: ``job.json``, or ``run.json`` of a rank that has started; of one that has not, if there is no other.
        job: ``job.json``; empty if there is none, as in a copy of a mirror.
        ranks: those that have a ``run.json``, without retries.
        is_dealt_out: ``reshard`` has dealt out its input.
    """

    settings: Json
    job: Json
    ranks: list[RankLedger]
    is_dealt_out: bool

    @classmethod
    def read(cls, checkpoints: Path, ranks: list[RankLedger]) -> Source:
        """
        Raises:
            CheckpointCorrupt: ``job.json``, or ``run.json`` of a rank, cannot be read.
        """
        ranks = [rank for rank in ranks if not rank.root]
        for rank in ranks:
            if rank.damage is not None and not rank.run:
                raise rank.damage
        ranks = [rank for rank in ranks if rank.run]
        job = read_run(checkpoints / JOB) if (checkpoints / JOB).exists() else {}
        started = (rank.run for rank in ranks if not is_unstarted(rank.run))
        first = ranks[0].run if ranks else {}
        return cls(job or next(started, first), job, ranks, (checkpoints / SHARES).exists())

    @property
    def is_unstarted(self) -> bool:
        """Whether it is a fork itself, and no rank of it has started."""
        return is_unstarted(self.settings)

    @property
    def outputs(self) -> set[tuple[str, str]]:
        """Folders and names of its output files, as all its ranks have them. See ``real_place``."""
        runs = [self.job, *(rank.run for rank in self.ranks)]
        found = {(str(run["output_folder"]), str(run.get("output_filename"))) for run in runs if "output_folder" in run}
        return {(real_place(folder), name) for folder, name in found}

    def why_unusable(self, new: RunIdentity | None) -> Callable[[RankLedger], str]:
        """Tells of a rank why the new run cannot use its answers: "model_kwargs changed", for example; or "".

        Args:
            new: the new run; None: not known. Then the ranks must agree with the settings of now.
        """
        everywhere = _changed_midway(self.job, *(rank.run for rank in self.ranks)) if self.is_dealt_out else []

        def why(rank: RankLedger) -> str:
            names = self._differing(rank.run, new)
            if names:
                return f"{', '.join(names)} changed"
            mixed = dict.fromkeys([*_changed_midway(rank.run), *everywhere])
            return f"{', '.join(mixed)} changed in the middle of this run" if mixed else ""

        return why

    def _differing(self, kept: Json, new: RunIdentity | None) -> list[str]:
        if new is None:
            both = [name for name in kept if decides(name) and name in self.settings]
            return [name for name in both if not same_value(name, kept[name], self.settings[name])]
        had_others = any(change.get("field") == _MODEL for change in kept.get("accepted_changes", []))
        is_only = "models" not in kept and not had_others
        fields = [change.field for change in compare(kept, new)]
        return [name for name in fields if decides(name) or (is_only and name == _MODEL)]


def real_place(folder: str) -> str:
    """A name that tells whether two folders are one: the absolute path without links, or the URL."""
    return folder.rstrip("/") if "://" in folder else str(Path(folder).expanduser().resolve())


def _changed_midway(*runs: Json) -> list[str]:
    """The fields that decide about answers and that the user has changed in the middle."""
    changed = {str(change.get("field")) for run in runs for change in run.get("accepted_changes", [])}
    return sorted(filter(decides, changed))
