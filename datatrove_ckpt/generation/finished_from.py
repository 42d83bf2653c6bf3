"""Finds finished documents in an old output, so that they need no request (``finished_from``).

A row belongs to the document with its id, text and metadata. The input file's path is ignored, and
so are keys that the rollout added or, if it is the user's function, removed.

Each start reads the old output again, so no crash leaves a state. The rows are copied to an unnamed
temporary file, because gzip cannot seek and datatrove's rows are unordered. Each row takes 16 bytes
of memory, and 40 while it is sorted.
"""

import gzip
import os
import re
import tempfile
import zlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson
import xxhash
from datatrove.data import Document
from datatrove.io import DataFolder, get_datafolder
from datatrove.pipeline.inference.types import InferenceResult
from loguru import logger

from datatrove_ckpt.checkpoint.checksummed_lines import PREFIX, Json, explained, verified_body
from datatrove_ckpt.checkpoint.compare import changes_text, compare, describe_alike, records
from datatrove_ckpt.checkpoint.identity import OUTPUT_FOLDER, RunIdentity
from datatrove_ckpt.checkpoint.journal import FinishedDocument
from datatrove_ckpt.checkpoint.layout import CHECKPOINT_LINES, LOCK
from datatrove_ckpt.checkpoint.lock import lock_holder, name_holder
from datatrove_ckpt.common.formatting import plural, safe_repr, safe_text
from datatrove_ckpt.config.paths import expand_path
from datatrove_ckpt.errors import CheckpointLocked, CheckpointMismatch, ConfigError, InputError
from datatrove_ckpt.generation.runner_settings import RunnerSettings
from datatrove_ckpt.output.arrow_types import Row
from datatrove_ckpt.output.csv_writer import text_of
from datatrove_ckpt.output.document_codec import (
    Result,
    decode,
    document_of,
    encode,
    number_column,
    result_of,
)
from datatrove_ckpt.output.formats import CSV, Format, format_of_file, from_cell
from datatrove_ckpt.output.output_folder import RunOrigin, owners_of
from datatrove_ckpt.rollouts.interface import FIELDS

Places = str | Path | Sequence[str]
_OF_TASK = re.compile(r"/[^/]*(\*|\$\{rank\}).*")
"""The end of a location that names a task's own files."""
_ADAPTER = "output_writer.adapter"  # it changes values
_UNCHECKED = {"when": "", "field": "finished_from", "old": "unchecked results", "new": None}
_TORN = "torn lines, as a kill leaves them"
_DAMAGED = (EOFError, ValueError, zlib.error, gzip.BadGzipFile)  # pyarrow raises a ValueError
_DIGEST_BYTES = 16
_LENGTH_BYTES = 8
# In Parquet, results without these fields have null there.
_OF_SOME = frozenset({"tool_calls", "logprobs", "choices", "answer", "response_id", "model"})


def compare_earlier_runs(step: RunnerSettings, identity: RunIdentity) -> tuple[list[Json], str]:
    """Compares the runs of ``finished_from`` with the new run, except in the number of tasks, the
    size of chunks and all settings of files.

    A run of this package is found by its checkpoint: in the location, beside it, or in the folder
    that the owner record of an output folder names. datatrove's runs have no checkpoint. If the old
    run accepted changes, some of its results were made with the earlier values.

    Returns:
        The differences, for the record of the run that accepts them; and a sentence about runs that
        were not compared, after a space, or "" if all were.

    Raises:
        CheckpointMismatch: an old run differs, and the change is not accepted.
        ConfigError: an old run's rows are no documents.
    """
    runs = [
        (location, run) for location in listed(step.finished_from or ()) for run in _runs(location)
    ]
    changes = [
        change
        for _, run in runs
        for settings in _all_settings(run)
        for change in compare(settings, identity)
        if not change.is_layout
        and change.field != "explode"
        and (change.field == _ADAPTER or not change.field.startswith("output_"))
    ]
    if not step.explode and any(run.get("explode") for _, run in runs):
        raise ConfigError(
            "finished_from: the old run wrote items. Also set explode, or leave finished_from out."
        )
    if not CSV.is_written_by(step.output_writer) and any(
        str(run.get("output_writer")).endswith(CSV.writer) for _, run in runs
    ):
        raise ConfigError(
            "finished_from: the old run wrote CSV, without types. Also write CSV (output_format: "
            "csv), or leave finished_from out."
        )
    if changes and not step.accept_changes:
        raise CheckpointMismatch(
            f"{changes_text('finished_from: the old results were', changes)}Go back to the old "
            "values, leave finished_from out, or set accept_changes to take the old results.",
            changes=[{"accept_changes": True}],
        )
    unknown = [
        location
        for location, run in runs
        if run.get("accepted_changes") or not describe_alike(run, identity.fields)
    ]
    unchecked = ""
    accepted = records(changes)
    if unknown:
        accepted += [_UNCHECKED]
        unchecked = (
            f" finished_from: results in {', '.join(unknown)} were taken over unchecked: no "
            "checkpoint there shows all their settings."
        )
    return accepted, unchecked


def _all_settings(run: Json) -> list[Json]:
    if not run:
        return []
    earlier = [
        {**run, change["field"]: change.get("old")}
        for change in run.get("accepted_changes", [])
        if "field" in change
    ]
    return [run, *earlier]


def listed(locations: Places) -> list[str]:
    listed = [locations] if isinstance(locations, str | Path) else locations
    return [str(location) for location in listed]


def _expanded(location: str) -> str:
    if "://" in location:
        return location
    return str(expand_path("finished_from", location))


def _runs(location: str) -> list[Json]:
    from datatrove_ckpt.mirror.restore import read_job  # few runs need it

    location = _expanded(_OF_TASK.sub("", location))
    job = read_job(location) or read_job(f"{location}/checkpoints")
    if job:
        return [job]
    # A folder that was moved or copied as a whole has its own checkpoints beside its output.
    folder, _, name = location.rstrip("/").rpartition("/")
    beside = {}
    with suppress(PermissionError):  # checkpoints are private, and this may be another user
        beside = read_job(f"{folder or '.'}/checkpoints")
    if str(beside.get(OUTPUT_FOLDER)).rpartition("/")[2] == name:
        return [beside]
    runs = []
    for owner in owners_of(get_datafolder(location)):
        run = {}
        with suppress(PermissionError):
            if RunOrigin(Path(owner.home), None).recorded in (
                None,
                owner,
            ):  # else the folder holds another run
                run = read_job(owner.home)
        runs.append(run)
    return runs or [{}]


OldDocument = tuple[Json, list[object]]
"""Metadata and results of a finished document; the answers, if the results were not written."""
_OldFile = tuple[DataFolder, str, Format]


@dataclass(eq=False)
class FinishedDocuments:
    """Finds the old results of documents, in one thread; another thread may call ``close``.

    Args:
        keeps_metadata: the rollout removes no keys of the metadata.
    """

    _locations: Places
    _rank: int
    _step: RunnerSettings
    _folder: Path
    _keeps_metadata: bool

    def __post_init__(self) -> None:
        self._metadata_key = self._step.metadata_key
        self._rollouts = self._step.model.rollouts_per_document
        self._incomplete: set[str] = set()  # documents of which a file may lack rows
        self._lost: set[str] = set()  # names that are in the log
        self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 (``close`` closes it)
        self._is_read = False
        self._are_cells = False  # CSV, whose values are texts
        self._keys = np.zeros(0, np.uint64)
        self._offsets = np.zeros(0, np.uint64)
        self._causes = Counter[str]()
        self._most_results = 0
        self._has_warned = False

    def take(self, document: Document) -> OldDocument | None:
        """Returns the finished document; None if the old output lacks the document.

        The first call reads the old output.

        Raises:
            ConfigError: the old output is missing, or holds no usable result.
            CheckpointLocked: a process works on the old run.
            InputError, StorageFailed: an input file, or the temporary file, cannot be read.
        """
        if not self._is_read:
            self._is_read = True
            self._read()
        digest = _digest(str(document.id), document.text)
        if str(document.id) in self._incomplete:
            return None
        rows = self._whole(document, map(decode, self._find(digest)))
        for old in rows:
            if not self._differing(document.metadata, old):
                lost = [name for name in _lost(document.metadata, old) if name not in self._lost]
                if lost:
                    self._lost.update(lost)
                    logger.warning(
                        f"finished_from: the document {safe_repr(str(document.id))} is taken "
                        f"over without {', '.join(map(repr, lost))}, which the old output lacks."
                    )
                if self._are_cells:  # columns of other documents
                    old = {
                        name: old[name] for name in old if old[name] or name in document.metadata
                    }
                # JSON has lost types that the document has as it was read.
                for name in old.keys() & document.metadata.keys() - {self._metadata_key}:
                    old[name] = document.metadata[name]
                return old, self._results(document, old)
        if rows and not self._has_warned:
            self._has_warned = True
            names = ", ".join(map(repr, self._differing(document.metadata, rows[0])))
            logger.warning(
                f"finished_from: the document {safe_repr(str(document.id))} is requested again, "
                f"as are others like it: its old metadata has another {names}."
            )
        return None

    def close(self) -> None:
        """A thread that still uses the temporary file gets a ValueError."""
        self._file.close()

    def _whole(self, as_read: Document, rows: Iterable[Document]) -> list[Json]:
        column = str(self._step.answer_column)
        wholes: list[Json] = []
        items: list[Json] = []
        for row in rows:
            old = row.metadata
            if row.id == str(as_read.id):
                wholes.append(old)
                continue
            number = row.id.rpartition("/")[2]
            counter = number_column(old, number, column, self._metadata_key, as_read.metadata)
            if counter is None:
                continue
            own: Json = {}
            item: Json = {}
            part = own
            for name, value in old.items():
                if name == counter:
                    part = item
                elif name in as_read.metadata:
                    own[name] = value
                else:
                    part[name] = value
            if number == "0":
                items = []
                wholes.append({**own, column: items})
            if number == str(len(items)):
                items.append(item)
        return [
            old for old in wholes if self._metadata_key in old or not self._step.rollout_results
        ]

    def _results(self, as_read: Document, old: Json) -> list[object]:
        key = self._metadata_key
        if self._step.rollout_results:
            return [_result(result) for result in old[key]]
        if key not in as_read.metadata:  # else it is a column of the input
            old.pop(key, None)
        return [old[str(self._step.answer_column)]]

    def _find(self, digest: bytes) -> Iterator[bytes]:
        key = np.uint64(_key(digest))
        first = int(np.searchsorted(self._keys, key))
        last = int(np.searchsorted(self._keys, key, side="right"))
        for offset in self._offsets[first:last]:
            at = int(offset)
            head = os.pread(self._file.fileno(), _DIGEST_BYTES + _LENGTH_BYTES, at)
            if head.startswith(digest):
                yield os.pread(
                    self._file.fileno(), int.from_bytes(head[_DIGEST_BYTES:]), at + len(head)
                )

    def _differing(self, as_read: Json, old: Json) -> list[str]:
        names = old.keys() & as_read.keys() - {"file_path", self._metadata_key}
        differing = [
            name
            for name in as_read
            if name in names
            and not _is_same(as_read[name], old[name])
            and not (self._are_cells and text_of(as_read[name]) == old[name])
        ]
        if self._keeps_metadata:
            differing += _lost(as_read, old)
        return differing

    # the old output ------------------------------------------------------------------------------

    def _read(self) -> None:
        file = self._file
        locations = listed(self._locations)
        files = [old for location in locations for old in self._files(location)]
        self._are_cells = any(form is CSV for _, _, form in files)
        names = ", ".join(locations)
        keys = array("Q")
        offsets = array("Q")
        with explained("write a temporary file in", self._folder):
            for old in files:
                for source, document in self._documents(*old):
                    digest = _digest(source, document.text)
                    document.text = ""
                    data = encode(document)
                    keys.append(_key(digest))
                    offsets.append(file.tell())
                    file.write(b"".join((digest, len(data).to_bytes(_LENGTH_BYTES), data)))
            file.flush()
        causes = [f"{number} {cause}" for cause, number in self._causes.items()]
        problem = ""
        # Single documents have fewer results where a rollout returned None.
        if 0 < self._most_results < self._rollouts:
            results = plural(self._most_results, "result")
            problem = (
                f"no document has over {results}, and rollouts_per_document is {self._rollouts}"
            )
        elif not keys and "${rank}" not in names:
            problem = "; ".join(causes) or "no rows"
        if problem:
            raise ConfigError(
                f"finished_from: nothing in {names} can be taken over: {problem}. Name the old "
                "run's output folder and checkpoints, and set its metadata_key and "
                "rollouts_per_document."
            )
        order = np.argsort(np.frombuffer(keys, np.uint64), kind="stable")
        self._keys = np.frombuffer(keys, np.uint64)[order]
        self._offsets = np.frombuffer(offsets, np.uint64)[order]
        number = plural(len(np.unique(self._keys)), "finished document")
        logger.info(
            f"finished_from: {names} has {number} in {plural(len(files), 'file')}, which need no "
            "request."
        )
        for cause in causes:
            logger.warning(f"finished_from: not taken over: {cause}.")

    def _files(self, location: str) -> list[_OldFile]:
        path = location.replace("${rank}", f"{self._rank:05d}")
        pattern = None
        if "*" in path:
            path, _, pattern = path.rpartition("/")
        folder = get_datafolder(_expanded(path))
        if "${rank}" not in location and not folder.exists(""):
            raise ConfigError(f"finished_from: {location} does not exist.")
        files = []
        for name in folder.list_files(glob_pattern=pattern):
            parts = name.split("/")
            if parts[-1] == LOCK and folder.is_local():
                lock = Path(folder.resolve_paths(name))
                holder = lock_holder(lock)
                if holder is not None:
                    raise CheckpointLocked(
                        f"finished_from: {name_holder(holder)} works on the old run, in "
                        f"{lock.parent}. Stop it, and run again."
                    )
            file_format = format_of_file(name)
            if (
                file_format is not None
                and parts[-1] not in CHECKPOINT_LINES
                and not any(part[0] == "." for part in parts)
            ):
                files.append((folder, name, file_format))
        if not files:
            logger.warning(f"finished_from: {location} names no file of documents.")
        return files

    def _documents(
        self, folder: DataFolder, name: str, form: Format
    ) -> Iterator[tuple[str, Document]]:
        path = folder.resolve_paths(name)
        last = ""
        try:
            with form.open(folder, name) as file:
                for row, line in form.rows(file):
                    document, source = self._document(row, line)
                    if document is not None:
                        last = source if source != document.id else ""
                        yield source, document
                        continue
                    self._causes[source] += 1
                    if source == _TORN:
                        self._incomplete.add(last)
        except _DAMAGED:
            self._incomplete.add(last)
            self._causes["files that are damaged or cut off, after their whole rows"] += 1
        except OSError as error:
            raise InputError(
                f"finished_from: {path} cannot be read ({safe_text(error)}). Run again when it can."
            ) from error

    def _document(self, row: Row | None, line: bytes) -> tuple[Document | None, str]:
        step = self._step
        column = str(step.answer_column)
        key = self._metadata_key
        is_journal = line.startswith(PREFIX)
        if row is None:
            return None, _TORN
        if is_journal:
            body = verified_body(line)
            if body is None:
                return None, _TORN
            finished = FinishedDocument.from_body(body)
            if finished.outcome != "written":
                return None, "documents that are dropped or dead letters"
            document = decode(finished.document)
        elif row.get("id") is None:
            return None, "rows without an id"
        else:
            document = document_of(row)
        document.media = []
        results = document.metadata.get(key)
        if self._are_cells and results:
            results = document.metadata[key] = from_cell(results)
        source, _, number = document.id.rpartition("/")
        is_item = number_column(document.metadata, number, column, key) is not None
        if is_item and step.explode and not is_journal:
            return document, source
        if not step.rollout_results and column in document.metadata:
            return document, document.id
        if not isinstance(results, list) or not results:
            return (
                None,
                f"documents without results under {key!r}",
            )
        if len(results) > self._rollouts:
            return (
                None,
                f"documents with more results than rollouts_per_document ({self._rollouts})",
            )
        self._most_results = max(self._most_results, len(results))
        return document, document.id


def _digest(name: str, text: str) -> bytes:
    return xxhash.xxh3_128_digest(f"{len(name)} {name}{text}".encode("utf-8", "surrogatepass"))


def _key(digest: bytes) -> int:
    return int.from_bytes(digest[:8])


def _lost(as_read: Json, old: Json) -> list[str]:
    # A table has ``metadata_text`` for a key ``text``, and may lack a column of nulls.
    old_names = {*old, *FIELDS, "file_path"}
    return [name for name in as_read if name not in old_names and as_read[name] is not None]


def _is_same(as_read: object, old: object) -> bool:
    option = orjson.OPT_SERIALIZE_NUMPY
    try:
        read_json, old_json = (
            orjson.dumps(value, default=str, option=option) for value in (as_read, old)
        )
    except TypeError:  # integers beyond 64 bits
        return str(as_read) == str(old)
    return _without_nulls(orjson.loads(read_json)) == _without_nulls(orjson.loads(old_json))


def _without_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None}
    if isinstance(value, list):
        return [_without_nulls(part) for part in value]
    return value


def _result(value: object) -> object:
    if type(value) is InferenceResult:
        return Result(**vars(value))
    if not isinstance(value, dict):
        return value
    fields = {
        name: field for name, field in value.items() if field is not None or name not in _OF_SOME
    }
    try:
        return result_of(fields, Result)
    except TypeError:  # a result of the rollout's own form
        return value
