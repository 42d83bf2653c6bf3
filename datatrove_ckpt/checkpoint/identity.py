"""One run, one identity, one owner: ``run.json``.

The identity is a flat dict of JSON values. If another release describes the user's code
differently, the code is not compared before the next start. ``run.json`` is replaced atomically, so
a crash leaves either description, and both are accepted. Secrets are compared as hashes, because
earlier releases wrote some of them in plain text.

The owner is the process that started last. Each start takes the next fencing number, and a process
that finds another owner in the file stops before its next write. The fence serves where locks
(``files.Lock``) fail: on file systems without locks, and in clusters that restart a lost node's job
while the old process still runs. Between a check and the write that follows, both processes may
write for microseconds; both write whole, valid lines.

An owner lists the nonces of earlier owners whose work this folder holds: all of it (null), or up to
a version of the mirror (see ``mirror/restore.py``). It also keeps the number of commits that it
found, so that the next owner notices lost commits.

``job.json`` is the identity that all ranks of a job share. The ranks' ``run.json`` files are the
truth. ``job.json`` records that they were compared, so that a starting rank reads one file instead
of a thousand. A rank that finds no matching ``job.json`` takes ``job.lock``, compares itself with
all other ranks, replaces ``job.json``, and holds the lock until its ``run.json`` is written. After
a crash in between, the next rank that differs compares again. A rank is compared if it holds work,
or if the process that wrote its ``run.json`` still has its lock.
"""

from __future__ import annotations

import datetime
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import orjson
import xxhash
from loguru import logger

from datatrove_ckpt import __version__
from datatrove_ckpt.checkpoint import files, layout
from datatrove_ckpt.checkpoint.checksummed_lines import (
    RESTORE,
    Json,
    explained,
    is_count,
    read_sealed,
    sealed_json,
)
from datatrove_ckpt.checkpoint.lock import Lock, lock_holder
from datatrove_ckpt.checkpoint.request_cache import has_answers
from datatrove_ckpt.common import redaction
from datatrove_ckpt.common.formatting import number_range, plural
from datatrove_ckpt.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointLocked,
    CheckpointMismatch,
    Fenced,
    StorageFailed,
    VersionMismatch,
)
from datatrove_ckpt.errors.setting_names import setting_name

_USERS_FIELDS = (
    "imports",
    "uses",
    "rollout_fn",
    "shared_context",
    "output_writer",
    "default_generation_params",
    "model_kwargs",
)
"""The fields, and beginnings of dotted fields, whose names and values the user has chosen."""
ENDPOINT_MODELS = "endpoint_models"
"""The field with the names of the model at endpoints, except its name in the config."""
_ANSWERING = ("canned_answers", "model_kwargs", "models", "use_chat", ENDPOINT_MODELS)


NOT_ANSWERING = frozenset(
    """
    cache_salt metadata priority prompt_cache_key prompt_cache_retention safety_identifier
    service_tier store user
    """.split()  # noqa: SIM905
)
"""Parameters of requests that change the price, the wait and the records of a provider, but not the
answer. The identity and the keys of answers omit them.
"""


def without_model(name: str) -> str:
    """Returns a field without the name of its model: ``judge.model_kwargs`` is ``model_kwargs``."""
    head, _, inner = name.partition(".")
    if head in _USERS_FIELDS:
        return name
    return inner or name


def affects_answers(name: str) -> bool:
    """Whether an identity field affects answers without being part of the payload."""
    return without_model(name) in _ANSWERING


@dataclass(frozen=True)
class RunIdentity:
    fields: Json
    """Plain JSON values. ``identity_version`` is the version of this description."""
    notes: dict[str, str] = field(default_factory=dict)
    """A note for the error if a field differs, by the name of the field."""
    accepted: list[Json] = field(default_factory=list)
    """Changes that the run accepts at its start: ``records`` of results that it takes over."""

    @cached_property
    def kept(self) -> Json:
        return as_kept(self.fields)

    @property
    def digest(self) -> str:
        return str(xxhash.xxh3_64_hexdigest(comparable("", self.kept)))


def fields_without_secrets(fields: Json) -> Json:
    found = redaction.environment_secrets(redaction.is_surely_secret).values()
    clean = {**fields}
    for name, value in fields.items():
        is_users = without_model(name).partition(".")[0] in _USERS_FIELDS
        if is_users and not name.endswith(" code"):
            clean[name] = redaction.without_secrets(name, value, found)
    return clean


def run_without_secrets(content: Json) -> Json:
    """Returns the content of ``run.json`` with hashes instead of secrets."""
    clean = fields_without_secrets(content)
    if accepted := content.get("accepted_changes"):
        clean["accepted_changes"] = [{**change} for change in accepted]
        for change in clean["accepted_changes"]:
            field = str(change.get("field"))
            for key in change.keys() & {"old", "new"}:
                change[key] = fields_without_secrets({field: change[key]})[field]
    return clean


def as_kept(fields: Json) -> Json:
    """Returns fields as they are after a round trip through JSON, without secrets."""
    kept: Json = orjson.loads(orjson.dumps(stamped(fields)))
    return fields_without_secrets(kept)


# ``format`` in ``run.json`` and ``job.json`` is the version of everything in a rank's folder. It
# grows with each release that an earlier one could misread. Each start writes the newest format.
#
#     1   0.1.0
#     2   history.jsonl, job.json, shard.json; times, work and hashes of the hub in commits, and
#         checksums of answers
#     3   a checksum in front of run.json, job.json and shard.json
#     4   results without a wrapper in journals (``documents.encode_finished``)

FORMAT = 4
"""The format that this version writes."""
FORMATS = range(4, FORMAT + 1)
"""The formats that this version reads. Other files of a folder may have lines of older formats."""
FORMAT_KEY = "format"
WRITTEN_BY = "written_by"
"""The key for the version of the package that wrote ``run.json`` or ``job.json``.

0.1.0 did not write it.
"""
NO_SETTINGS = frozenset({FORMAT_KEY, WRITTEN_BY, "owner", "accepted_changes", "forked"})
"""The keys of ``run.json`` and ``job.json`` that are no part of the identity.

Earlier builds of 0.2.0 wrote ``forked``.
"""


def stamped(fields: Json) -> Json:
    """Returns an identity preceded by this release's format and version."""
    rest = {name: value for name, value in fields.items() if name not in (FORMAT_KEY, WRITTEN_BY)}
    return {FORMAT_KEY: FORMAT, WRITTEN_BY: __version__, **rest}


def settings_in(content: Json) -> Json:
    return {name: value for name, value in content.items() if name not in NO_SETTINGS}


def check_format(
    where: object, content: object, known: range = FORMATS, written_by: object = None
) -> None:
    """Checks that this version can continue what another version wrote. A missing format passes.

    Args:
        where: the file, for the message.
        known: the known formats of such files.
        written_by: the version that wrote the file, if ``content`` does not name it.

    Raises:
        VersionMismatch: the format is newer, or too old.
    """
    if not isinstance(content, dict):
        return
    number = content.get(FORMAT_KEY)
    if type(number) is not int or number in known:
        return
    writer = content.get(WRITTEN_BY, written_by)
    who = "another datatrove-ckpt"
    get = "the version that wrote it"
    if isinstance(writer, str) and writer != __version__:
        who = f"datatrove-ckpt {writer}"
        get = f"{who} or newer"
    if 0 < number < known.start:
        get = "datatrove-ckpt 0.2.0, which finishes such runs"
    raise VersionMismatch(
        f"{where} was written by {who} (format {number}). This is datatrove-ckpt {__version__}, "
        f"which reads format {number_range(known.start, known.stop)}. Nothing was changed. "
        f"Install {get}, and run the same command again; or start a new run in other folders."
    )


_MAX_BYTES = 64 * 2**20
"""The limit of ``run.json``, which holds names, numbers and a few values of the user."""
_IDENTITY_VERSION = "identity_version"
OUTPUT_FOLDER = "output_folder"
"""The key for the output folder of the last start. It is no part of the identity, because files may
be moved, but tasks that run at the same time must agree about it.
"""
# Reshards: an earlier build changed the number of tasks, so that ranks read parts of files.
_LAYOUT = frozenset({"records_per_chunk", "tasks", "reshards", OUTPUT_FOLDER})


class Change(NamedTuple):
    """A field in which two runs differ.

    Attributes:
        lines: the parts of the field that differ, each with both values.
    """

    field: str
    old: object
    new: object
    lines: list[str]
    note: str | None

    @property
    def is_layout(self) -> bool:
        """Whether the folder's content depends on the field, so that accept_changes refuses it."""
        return self.field in _LAYOUT


def new_owner(fence: int, earlier: dict[str, int | None], commits: int) -> Json:
    """Returns the record of this process as the owner in ``run.json``, with a new nonce.

    ``fence``: 0 if no process has worked on the rank.
    """
    return {
        "fence": fence,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "nonce": secrets.token_hex(8),
        "earlier": earlier,
        "commits": commits,
    }


class Fence:
    """Checks that this process still owns a rank. Thread-safe."""

    def __init__(self, path: Path, owner: Json) -> None:
        self._path = path
        self.owner = owner
        self.number: int = owner["fence"]
        """The number of the attempt: how many processes have owned the rank, including this one."""
        self.lost = False
        """Whether a check found another owner."""
        self._seen = (0, 0)

    def check(self, thorough: bool = False) -> None:
        """Checks that this process is still the owner.

        Args:
            thorough: read the file. Otherwise only compare its attributes, which takes a
                microsecond.

        Raises:
            Fenced: another process has started since.
        """
        # A network file system may cache attributes for seconds; opening a file refreshes them.
        with explained("look at", self._path):
            status = self._path.stat()
        stamp = status.st_ino, status.st_mtime_ns
        if not thorough and stamp == self._seen:
            return
        owner = run_with_secrets(self._path).get("owner", {})
        if owner != self.owner:
            self.lost = True
            raise Fenced(
                f"Another process has taken over {self._path.parent}: {owner.get('host')} pid "
                f"{owner.get('pid')}, start number {owner.get('fence')}; this one, number "
                f"{self.owner['fence']}, writes nothing more. What it saved before is kept."
            )
        # Not the attributes of now: a new owner may have come after the file was read.
        self._seen = stamp

    def explain(self, error: BaseException) -> BaseException:
        """Returns ``Fenced`` if a new owner may have caused ``error`` by removing staged files."""
        if isinstance(error, StorageFailed):
            try:
                self.check(thorough=True)
            except Fenced as fenced:
                return fenced
            except StorageFailed:
                pass
        return error


class RunClaim:
    """Checks a run's identity against a rank's folder; ``take`` makes this process the owner.

    Args:
        accept_changes: record a different identity, with the time, instead of refusing it. A folder
            without any work takes any identity.

    Raises:
        CheckpointMismatch: the checkpoint belongs to another run; the message names each field with
            both values.
        CheckpointCorrupt: ``run.json`` cannot be read.
    """

    def __init__(self, folder: Path, identity: RunIdentity, accept_changes: bool = False) -> None:
        self._path = folder / layout.RUN
        self._fields = identity.kept
        self._accepted: list[Json] = []
        self.before: Json = {}
        """The content of ``run.json``; empty if no process has owned the rank."""
        if self._path.exists():
            self.before = old = read_run(self._path)
            changes = compare(old, identity)
            if not describe_alike(old, identity.fields):
                logger.warning(
                    f"{self._path}: another version of datatrove-ckpt described the code of this "
                    "run in another way, so the code is not compared this time. From now on it is."
                )
            self._accepted += old.get("accepted_changes", [])
            if changes and holds_work(folder):
                if not accept_changes or any(change.is_layout for change in changes):
                    raise refusal(f"The checkpoint {folder} was", changes)
                self._accepted += records(changes)
        else:
            layout.refuse_missing_run_json(folder)
        self._accepted += new_records(self._accepted, identity)

    def take(self, commits: int | None = None) -> Fence:
        """Writes ``run.json``, which an earlier owner notices before its next write.

        Args:
            commits: the number of commits that the rank has now; None: the number in ``run.json``.
        """
        before = self.before.get("owner", {})
        if commits is None:
            commits = before.get("commits", 0)
        earlier = before.get("earlier", {})
        if "nonce" in before:
            earlier = {**earlier, before["nonce"]: None}
        owner = new_owner(before.get("fence", 0) + 1, earlier, commits)
        kept = {**self._fields, "owner": owner}
        if self._accepted:
            kept["accepted_changes"] = self._accepted
        files.disk.replace(self._path, sealed_json(kept))
        return Fence(self._path, owner)


def read_run(path: Path) -> Json:
    """Returns the content of ``run.json`` or ``job.json``, with hashes instead of secrets.

    Raises:
        CheckpointCorrupt: the file holds no run.
        StorageFailed: it cannot be read.
    """
    return run_without_secrets(run_with_secrets(path))


def run_with_secrets(path: Path | str) -> Json:
    """Returns ``run.json`` or ``job.json`` as it is: earlier releases may have written secrets."""
    with explained("read", path), open(path, "rb") as file:  # noqa: PTH123 (speed)
        data = file.read(_MAX_BYTES + 1)
    return parse_run(path, data)


def parse_run(path: Path | str, data: bytes) -> Json:
    """Returns the content of ``run.json`` or ``job.json`` from its bytes.

    Raises:
        CheckpointCorrupt: they hold no run. The message names ``path``.
        VersionMismatch: a newer version of this program wrote it, or one before 0.2.0.
    """
    try:
        if len(data) > _MAX_BYTES:
            raise ValueError(f"it has more than {_MAX_BYTES} bytes")
        content = read_sealed(data, FORMATS)
        check_format(path, content)  # first, because a newer format may differ in the rest
        return check_run(content)
    except ValueError as error:
        advice = f"{RESTORE}start this task over: move its folder away."
        if str(path).endswith(layout.JOB):
            advice = "Remove it: the next start makes it again from the tasks' run.json."
        raise CheckpointCorrupt(path, f" does not hold a run ({error}). {advice}") from error


def check_run(content: Json) -> Json:
    """Returns the content of a ``run.json`` whose checksum is right.

    Raises:
        ValueError: it is not the content of a ``run.json``.
    """
    if not is_count(content.get("format")):
        raise ValueError("it has no format")
    if not isinstance(content.get("owner", {}), dict):
        raise ValueError("its owner is damaged")
    return content


def compare(kept: Json, identity: RunIdentity, with_output: bool = False) -> list[Change]:
    """Returns the fields in which a run differs from the content of a ``run.json`` or ``job.json``.

    Args:
        with_output: compare ``output_folder``, too.
    """
    old = settings_in(kept)
    new = settings_in(identity.kept)
    if not describe_alike(old, new):
        old = without_code(old)
        new = without_code(new)
    changes = []
    for name in dict.fromkeys([*old, *new]):
        lines = differences(name, old.get(name, _NOT_SET), new.get(name, _NOT_SET))
        if lines and (with_output or name != OUTPUT_FOLDER):
            note = identity.notes.get(name)
            changes.append(Change(name, old.get(name), new.get(name), lines, note))
    return changes


def differences(name: str, old: object, new: object) -> list[str]:
    """Returns the parts in which two values of a setting differ, as lines with both values."""
    is_set = old is not _NOT_SET and new is not _NOT_SET
    if is_set and same_value(name, old, new):
        return []
    lines = []
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            lines += differences(f"{name}.{key}", old.get(key, _NOT_SET), new.get(key, _NOT_SET))
    return lines or [f"{setting_name(name)}: {_display(old)} -> {_display(new)}"]


def describe_alike(old: Json, new: Json) -> bool:
    """Whether both code descriptions have the same version, and so can be compared."""
    return bool(old.get(_IDENTITY_VERSION) == new.get(_IDENTITY_VERSION))


def without_code(fields: Json) -> Json:
    of_code = r"identity_version$|(rollout_fn|shared_context|imports|uses)\b|output_writer\."
    return {name: value for name, value in fields.items() if not re.match(of_code, name)}


def changes_text(what: str, changes: Sequence[Change]) -> str:
    """Returns the beginning of an error: each field that differs, with both values."""
    lines = [line for change in changes for line in change.lines]
    lines += [f"({change.note})" for change in changes if change.note]
    return "\n  ".join([f"{what} made by another run:", *dict.fromkeys(lines)]) + "\n"


def refusal(
    what: str, changes: Sequence[Change], advice: str = "", may_mix: bool = True
) -> CheckpointMismatch:
    """Returns the error for changes that were not accepted.

    Args:
        advice: a sentence before the advice to return to the old settings.
        may_mix: whether to advise accept_changes.
    """
    text = f"{changes_text(what, changes)}{advice}"
    old = changes[0].old
    if [change.field for change in changes] == ["tasks"] and isinstance(old, int):
        return CheckpointMismatch(
            f"{text}Go on with {plural(old, 'task')} (tasks: {old}).",
            changes=[{"tasks": old}],
            starts_over="with old results",
        )
    text += "Go on with the old settings"
    if not may_mix or any(change.is_layout for change in changes):
        return CheckpointMismatch(f"{text}.", starts_over="anew")
    return CheckpointMismatch(
        f"{text}, or set accept_changes to mix the two: what is done stays as it is.",
        changes=[{"accept_changes": True}],
        starts_over="anew",
    )


def records(changes: Iterable[Change]) -> list[Json]:
    when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return [
        {"when": when, "field": change.field, "old": change.old, "new": change.new}
        for change in changes
    ]


def new_records(accepted: Sequence[Json], identity: RunIdentity) -> list[Json]:
    """Returns the changes that a run accepts at its start and that are not recorded yet."""
    known = [change | {"when": ""} for change in accepted]
    return [change for change in identity.accepted if change | {"when": ""} not in known]


def mixed_settings(changes: Iterable[Json]) -> list[tuple[str, str, str]]:
    """Returns each accepted change once, as field, old and new value (JSON, cut off). Omits changes
    of the output folder.
    """
    found = [
        (
            str(change.get("field")),
            _display(change.get("old", _NOT_SET)),
            _display(change.get("new", _NOT_SET)),
        )
        for change in changes
        if change.get("field") != OUTPUT_FOLDER
    ]
    return [*dict.fromkeys(found)]


def _display(value: object) -> str:
    if value is _NOT_SET:
        return "(not set)"
    text = orjson.dumps(value).decode()
    if len(text) <= 300:
        return text
    return f"{text[:300]}... ({len(text)} characters)"


# Values of a setting are compared as JSON, with three rules. The order of keys does not matter,
# except in a JSON schema and inside of a parameter of requests: engines answer in the order of a
# schema's properties, and requests keep it. True is not 1, because a request says ``true``; 1 is
# 1.0. Hashes of secrets that were made with two keys of a mirror, or one without, cannot be
# compared, and count as the same.

_NOT_SET = object()
_HASH = re.compile(rb'"hash (scrypt|keyed-[0-9a-f]{8})-[0-9a-f]{32}"')  # see redaction.hashed


def comparable(name: str, value: object) -> bytes:
    return orjson.dumps(_comparable(name, value))


def same_value(name: str, old: object, new: object) -> bool:
    """Whether two values of this setting are the same."""
    old = comparable(name, old)
    new = comparable(name, new)
    before, after = ({found[1] for found in _HASH.finditer(value)} for value in (old, new))
    if before and after and before != after:
        old, new = (_HASH.sub(b"", value) for value in (old, new))
    return bool(old == new)


def _comparable(name: str, value: object) -> object:
    if isinstance(value, dict):
        left_out: Collection[str] = ()
        if name.endswith(("generation_params", "extra_body")):
            # "(order)" is that of the keys: see ``user_code.description.plain``.
            left_out = {*NOT_ANSWERING, "(order)"}
        # Parts of a request that hold a schema. A user's setting may have any name with "schema".
        is_ordered = re.search(r"response_format|structured_outputs|schema|params\.", name)
        keys = value if is_ordered else sorted(value)
        return {
            key: _comparable(f"{name}.{key}", value[key]) for key in keys if key not in left_out
        }
    if isinstance(value, list):
        return [_comparable(name, item) for item in value]
    if value is None and name.endswith("generation_params"):
        return {}
    if value == "float 0x0.0p+0":  # identities write 0.0 so, to separate it from -0.0
        return 0
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value


def holds_work(folder: Path) -> bool:
    """Whether a rank's folder holds a commit, a line of a journal, a batch or a cached answer."""
    found = layout.RankListing(folder)
    journals = map(layout.journal_name, found.journals)
    is_written = found.size(layout.COMMITS, layout.BATCHES, *journals) > 0
    return is_written or has_answers(folder / layout.CACHE)


@dataclass
class JobChanges:
    """How a job differs from its ranks.

    Attributes:
        by_rank: the differences of each rank.
        empty: ranks that differ and hold no work, so that they may start over with the new
            settings.
    """

    by_rank: dict[int, list[Change]] = field(default_factory=dict)
    empty: list[int] = field(default_factory=list)

    @property
    def changes(self) -> list[Change]:
        """Each difference once."""
        found: list[Change] = []
        for changes in self.by_rank.values():
            found += [change for change in changes if change not in found]
        return found

    @property
    def ranks(self) -> list[int]:
        return sorted(self.by_rank)

    @property
    def is_layout(self) -> bool:
        return any(change.is_layout for change in self.changes)


class RankBinding(NamedTuple):
    """Whether a rank is bound to its run: it holds work, or a process works on it."""

    holds_work: bool
    is_finished: bool
    is_live: bool


@contextmanager
def join_job(
    root: Path,
    rank: int,
    identity: RunIdentity,
    accept_changes: bool,
    check_output: Callable[[], None],
) -> Iterator[None]:
    """Compares a starting rank with the other ranks of its job. The block writes ``run.json``.

    Args:
        root: ``checkpoints_local_dir``.
        check_output: called before ``job.json`` names another output folder; its error refuses the
            rank.

    Raises:
        CheckpointMismatch: another rank belongs to another run; the message names each field with
            both values.
        CheckpointLocked: another process has kept ``job.lock`` for a minute.
    """
    guard = None if _is_current(root, identity) else _lock_job(root, identity)
    try:
        if guard is not None and not _is_current(root, identity):
            ranks = [other for other in layout.rank_numbers(root) if other != rank]
            others = _compare_ranks(root, ranks, identity)
            if others.changes and (not accept_changes or others.is_layout):
                raise refuse_changes(root, others)
            content = job_content(identity, _read_job(root), others)
            if _read_job(root).get(OUTPUT_FOLDER) != identity.fields.get(OUTPUT_FOLDER):
                check_output()
            files.disk.replace(root / layout.JOB, content)
        yield
    finally:
        if guard is not None:
            guard.release(remove=True)
    # Another job started at the same instant.
    if changes := compare(_read_job(root), identity, with_output=True):
        raise refuse_changes(root, JobChanges({rank: changes}))


def recorded_runs(root: Path) -> Iterator[Json]:
    """Yields the content of ``job.json``, and of each rank's ``run.json``; the readers of other
    files report damaged ones.
    """
    for path in _run_files(root):
        with suppress(CheckpointError):
            if path.exists():
                yield read_run(path)


def _run_files(root: Path) -> Iterator[Path]:
    yield root / layout.JOB
    if root.is_dir():  # a caller that needs only the first file does not list the ranks
        for rank in layout.rank_numbers(root):
            yield layout.rank_folder(root, rank) / layout.RUN


def recorded_output(root: Path) -> str | None:
    """Returns the output folder of the last start. Finished ranks may name an older one."""
    folders = (run.get(OUTPUT_FOLDER) for run in recorded_runs(root))
    return next((str(folder) for folder in folders if folder), None)


def note_output(root: Path, folder: str) -> None:
    """Writes the output folder into ``job.json``. No running rank may write elsewhere.

    Raises:
        CheckpointError: ``job.json`` is damaged, or cannot be written.
    """
    if _read_job(root).get(OUTPUT_FOLDER, folder) == folder:
        return
    with suppress(CheckpointLocked):  # a starting rank holds the lock, and writes the folder
        guard = Lock(root / layout.JOB_LOCK)
        try:
            job = _read_job(root)  # a rank may have written it since
            content = sealed_json(stamped({**job, OUTPUT_FOLDER: folder}))
            files.disk.replace(root / layout.JOB, content)
        finally:
            guard.release(remove=True)


def compare_job(
    root: Path,
    identity: RunIdentity,
    ranks: Collection[int] | None,
    only_tasks: bool,
) -> JobChanges:
    """Compares a job that is about to start with its ranks, finished ones included. Changes
    nothing.

    Args:
        ranks: the ranks to compare if ``job.json`` agrees with the job; None: all that have a
            folder.
        only_tasks: see ``compare_runs``.
    """
    job = _read_job(root)
    if ranks is None or not job or compare(job, identity):
        ranks = layout.rank_numbers(root) if root.exists() else []
    return _compare_ranks(root, ranks, identity, only_tasks)


def refuse_other_tasks(root: Path, identity: RunIdentity) -> None:
    """Refuses a job whose ranks have another number of tasks.

    Raises:
        CheckpointMismatch: with both numbers, and advice.
    """
    found = compare_job(root, identity, None, only_tasks=True)
    if found.changes:
        raise refuse_changes(root, found)


def name_tasks(ranks: list[int]) -> str:
    noun = "task" if len(ranks) == 1 else "tasks"
    shown = f"{noun} {', '.join(map(str, ranks[:5]))}"
    if len(ranks) <= 5:
        return shown
    return f"{shown}, ... ({len(ranks)} in all)"


def recorded_settings(root: Path) -> Json:
    """Returns the settings of a folder's run; empty if no undamaged file has them."""
    return next((run for run in recorded_runs(root) if run.get("tasks")), {})


def _job_with_secrets(root: Path) -> Json:
    path = root / layout.JOB
    if path.exists():
        return run_with_secrets(path)
    return {}


def _read_job(root: Path) -> Json:
    return run_without_secrets(_job_with_secrets(root))


def _is_current(root: Path, identity: RunIdentity) -> bool:
    """Whether ``job.json`` agrees, code and output folder included, and holds no plain secret."""
    job = _job_with_secrets(root)
    clean = run_without_secrets(job)
    is_same = job == clean and not compare(job, identity, with_output=True)
    is_same = is_same and not new_records(job.get("accepted_changes", []), identity)
    return bool(job) and is_same and describe_alike(job, identity.fields)


def _lock_job(root: Path, identity: RunIdentity) -> Lock | None:
    """Takes ``job.lock``. Returns None once another rank has written a matching ``job.json``."""
    deadline = time.monotonic() + 60.0
    while True:
        try:
            return Lock(root / layout.JOB_LOCK)
        except CheckpointLocked:
            if _is_current(root, identity):
                return None
            if time.monotonic() > deadline:
                raise
        time.sleep(0.02)


def job_content(identity: RunIdentity, before: Json, others: JobChanges) -> bytes:
    accepted = [*before.get("accepted_changes", []), *records(others.changes)]
    accepted += new_records(accepted, identity)
    job = {**identity.kept, **({"accepted_changes": accepted} if accepted else {})}
    return sealed_json(job)


def refuse_changes(
    root: Path | str, found: JobChanges, advice: str = "", may_mix: bool = True
) -> CheckpointMismatch:
    """Returns ``refusal`` for the checkpoints of tasks in a folder or mirror."""
    what = f"The checkpoints in {root} ({name_tasks(found.ranks)}) were"
    return refusal(what, found.changes, advice, may_mix)


def _compare_ranks(
    root: Path, ranks: Iterable[int], identity: RunIdentity, only_tasks: bool = False
) -> JobChanges:
    runs = {}
    for rank in ranks:
        path = layout.rank_folder(root, rank) / layout.RUN
        if path.exists():
            runs[rank] = read_run(path)

    def state_of(rank: int) -> RankBinding:
        folder = layout.rank_folder(root, rank)
        holder = lock_holder(folder / layout.LOCK)
        owner = runs[rank].get("owner", {})
        # Whether another process that wrote ``run.json`` works on the rank.
        is_live = holder is not None and all(
            holder.get(name) == owner.get(name) for name in ("host", "pid")
        )
        return RankBinding(holds_work(folder), layout.is_finished(folder), is_live)

    return compare_runs(runs, state_of, _read_job(root), identity, only_tasks)


def compare_runs(
    runs: Mapping[int, Json],
    state_of: Callable[[int], RankBinding],
    job: Json,
    identity: RunIdentity,
    only_tasks: bool,
) -> JobChanges:
    """Compares a job with the ``run.json`` of its ranks.

    Args:
        runs: the content of each ``run.json``.
        state_of: called for ranks that differ.
        job: the content of ``job.json``; empty if there is none.
        only_tasks: compare the number of tasks, and nothing else.
    """
    found = JobChanges()
    accepted = [
        (change.get("field"), change.get("old"), change.get("new"))
        for content in (job, *runs.values())
        for change in content.get("accepted_changes", [])
    ]
    for rank, run in runs.items():
        changes = compare(run, identity, with_output=True)
        if only_tasks:
            changes = [change for change in changes if change.field == "tasks"]
        if not changes:
            continue
        state = state_of(rank)
        if not state.is_live:
            changes = [change for change in changes if change.field != OUTPUT_FOLDER]
        if state.is_finished:
            changes = [
                change
                for change in changes
                if (change.field, change.old, change.new) not in accepted
            ]
        if changes and not state.holds_work and not state.is_live:
            found.empty.append(rank)
        elif changes:
            found.by_rank[rank] = changes
    return found


def removed_ranks(root: Path, missing: Iterable[int]) -> list[int]:
    """Returns the missing ranks that have a last_chunk file or a retry of dead letters."""
    folders = (root / "last_chunk", *layout.retry_folders(root))
    named = {path.stem for folder in folders for path in folder.glob("*")}
    places = {rank: layout.rank_folder(root, rank) for rank in missing}
    # Checked again: a rank may have started after the listing, and have finished a chunk.
    return [
        rank
        for rank, folder in places.items()
        if folder.name in named and not (folder / layout.RUN).exists()
    ]
