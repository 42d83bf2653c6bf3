"""BatchLog records the batches of requests that a rank has at a provider: none is paid for twice.

Requests that the request cache does not have are *parked*: each is a line of a file in
``batches/``, and its document is dropped from memory unrecorded, as a kill drops it. The
answers become rows of the request cache, and the next pass over the input is a resume.

The order of effects, each safe to repeat, and what the next attempt does after a crash behind it:

    1. write the requests; sync       no line names the file: it is removed; they park again
    2. "filled"; sync                 upload
    3. upload                         upload again; an input file costs nothing
    4. "uploaded"; sync               create
    5. "creating"; sync; mirror       look for the batch; see 6
    6. create                         the money: look in the provider's list, for ``list_lag``
                                      seconds, and in Anthropic's form until each batch of the same
                                      size has ended; not found: delete the input file, so that a
                                      late request fails, and go back to 2
    7. "created"; sync                wait; the provider has forgotten it: "incomplete", until it is
                                      given up
    8. rows of the request cache      read again, put again
    9. "read"; sync; remove the file  the next pass
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import orjson

from datatrove_ckpt.checkpoint import files, identity, layout
from datatrove_ckpt.checkpoint.checksummed_lines import add_checksum, read_lines
from datatrove_ckpt.checkpoint.clock import unix_seconds
from datatrove_ckpt.checkpoint.fence import Fence, RunClaim
from datatrove_ckpt.checkpoint.lock import Lock
from datatrove_ckpt.checkpoint.request_cache import AnswerKey, CachedAnswer, CachedRequest
from datatrove_ckpt.common import CUSTOM_ID, MESSAGES, JsonObject

ANSWER = "batch_answer"
"""Key in the JSON of a row: the body of an answer that no rollout has used yet."""
FAILURE = "batch_failure"
"""Key in the JSON of a row: the cause of a missing answer, for a request that is sent again."""
OF_BATCH = frozenset({ANSWER, FAILURE})
MOST_REQUESTS = 50_000  # of a batch
_SIZES = 1000  # of batches in Anthropic's form, which are found by their size
MOST_BYTES = 190_000_000
_ID = re.compile(r"(?:[0-9a-f]{6}-)?(\d+)-(\d+)-(\d+)-([0-9a-f]{32})-(\d+)-(\d+)")


class RequestId(NamedTuple):
    """The custom id of a request, at most 64 characters of ``[0-9a-f-]`` with the tag of its batch,
    which ``MessageBatches`` writes before it.

    ``attempt``: how often the request was in a batch, from 1.
    """

    chunk_index: int
    ordinal: int
    key: AnswerKey
    attempt: int

    @classmethod
    def parse(cls, text: object) -> RequestId | None:
        match = _ID.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            return None
        chunk, ordinal, rollout, occurrence, attempt = map(int, match.group(1, 2, 3, 5, 6))
        return cls(chunk, ordinal, AnswerKey(rollout, match[4], occurrence), attempt)

    def __str__(self) -> str:
        rollout, payload_hash, occurrence = self.key
        return (
            f"{self.chunk_index}-{self.ordinal}-{rollout}-{payload_hash}-{occurrence}-"
            f"{self.attempt}"
        )

    def row(self, answer: CachedAnswer) -> CachedRequest:
        return CachedRequest(self.chunk_index, self.ordinal, "", self.key, answer)


class ParkedRequest(NamedTuple):
    """A request that waits for a batch.

    Attributes:
        path: begins with ``/v1/``.
    """

    model: str
    path: str
    id: RequestId
    body: bytes

    def line(self) -> bytes:
        before = b'","params":'
        if self.path != MESSAGES:
            before = b'","method":"POST","url":"%s","body":' % self.path.encode()
        return b"%s%s%s%s}\n" % (CUSTOM_ID, str(self.id).encode(), before, self.body)


def fields_of_batch(answer: CachedAnswer | None) -> JsonObject:
    if answer is not None and answer.result is not None:
        fields: JsonObject = orjson.loads(answer.result)
        if not OF_BATCH.isdisjoint(fields):
            return fields
    return {}


@dataclass
class Batch:
    """A batch of requests.

    Attributes:
        state: "filled", "uploaded", "creating", "created", "incomplete" (lines
            are missing, or the batch is); then "read" or "dropped".
        run: digest of the identity of the run that parked the requests.
        tag: finds the batch in the provider's list.
        at: Unix time of the change to this state, in seconds.
    """

    number: int
    state: str = ""
    model: str = ""
    path: str = ""
    requests: int = 0
    run: str = ""
    tag: str = ""
    file: str = ""
    id: str = ""
    at: float = 0.0
    url: str = ""
    key_env: str = ""

    @property
    def is_open(self) -> bool:
        return self.state not in ("read", "dropped")

    def row(self, request: RequestId, kind: str, value: object) -> CachedRequest:
        """Returns the row that the request cache keeps until the rollout repeats this request.

        Earlier versions see an answer without a finish_reason, and send the request again.
        """
        fields = {"text": "", "finish_reason": None, "usage": {}, kind: value}
        fields |= {"attempt": request.attempt, "run": self.run}
        return request.row(CachedAnswer(orjson.dumps(fields), None))


def read_batches(folder: Path) -> tuple[dict[int, Batch], int]:
    batches: dict[int, Batch] = {}
    size = 0
    for line in read_lines(folder / layout.BATCHES):
        fields = orjson.loads(line.body)
        batch = batches.setdefault(fields["number"], Batch(fields["number"]))
        vars(batch).update(fields)
        size = line.offset + line.length
    return batches, size


@dataclass
class _ParkedFile:
    number: int
    model: str
    path: str
    file: files.AppendFile
    capacity: int
    requests: int = 0


class BatchLog:
    """``batches.jsonl`` of one rank, and its files of requests. Used in the storage thread only.

    Opening the log removes files that no line names, and a torn line.
    """

    def __init__(self, folder: Path, fence: Fence, run: str = "") -> None:
        self._fence = fence
        self._run = run
        self._parked: list[_ParkedFile] = []
        self._filling: dict[tuple[str, str], _ParkedFile] = {}
        self._folder = folder / layout.BATCHES_FOLDER
        self.batches, size = read_batches(folder)
        self.file = files.AppendFile(folder / layout.BATCHES, size)
        if self._folder.is_dir():
            for path in sorted(self._folder.iterdir()):
                batch = self.batches.get(int(path.stem)) if path.stem.isdigit() else None
                if batch is None or not batch.is_open:
                    files.disk.remove(path)

    def open(self) -> list[Batch]:
        """Returns the open batches.

        Drops batches that are not created and that a run with other settings or code parked.
        """
        for batch in self.batches.values():
            if batch.state in ("filled", "uploaded") and batch.run != self._run:
                self.note(batch.number, "dropped")
        return [batch for batch in self.batches.values() if batch.is_open]

    def path(self, number: int) -> Path:
        return self._folder / f"{number:05d}.jsonl"

    def requests(self, number: int) -> Iterator[RequestId]:
        """Yields the requests in a batch's file; none if another node has it."""
        path = self.path(number)
        if path.exists():
            with path.open("rb") as lines:
                for line in lines:
                    name, _, _ = line.removeprefix(CUSTOM_ID).partition(b'"')
                    if (request := RequestId.parse(name.decode())) is not None:
                        yield request

    def park(self, request: ParkedRequest) -> None:
        kind = request.model, request.path
        line = request.line()
        parked = self._filling.get(kind)
        if (
            parked is None
            or parked.requests >= parked.capacity
            or parked.file.size + len(line) > MOST_BYTES
        ):
            files.disk.make_dirs(self._folder, files.PRIVATE_FOLDER)
            number = max(self.batches, default=0) + len(self._parked) + 1
            capacity = MOST_REQUESTS
            if request.path == MESSAGES:
                capacity -= secrets.randbelow(min(capacity, _SIZES))
            parked = _ParkedFile(number, *kind, files.AppendFile(self.path(number)), capacity)
            self._parked.append(parked)
            self._filling[kind] = parked
        parked.file.append(line)
        parked.requests += 1

    def filled(self) -> None:
        """Ends step 1, and does step 2."""
        for parked in self._parked:
            parked.file.sync()
            files.disk.forget(parked.file.path)
            self.note(
                parked.number,
                "filled",
                model=parked.model,
                path=parked.path,
                requests=parked.requests,
                run=self._run,
            )
        self._parked.clear()
        self._filling.clear()

    def note(self, number: int, state: str, **fields: object) -> None:
        """Appends a line, and syncs it: before an effect that it announces, after an effect that it
        reports.

        Raises:
            Fenced: another process has taken the rank over.
        """
        self._fence.check(thorough=True)
        if state == "filled":  # again: a new name, which no earlier request to the provider has
            fields = {**fields, "tag": secrets.token_hex(16), "file": "", "id": ""}
        line = {"number": number, "state": state, **fields, "at": unix_seconds()}
        self.file.append(add_checksum(orjson.dumps(line)))
        self.file.sync()
        batch = self.batches.setdefault(number, Batch(number))
        vars(batch).update(line)
        if not batch.is_open:
            files.disk.remove(self.path(number))
            files.disk.remove_dir(self._folder)


def give_up(folder: Path, number: int) -> None:
    """Drops a batch of a rank on which no process works: the next run sends its requests again."""
    lock = Lock(folder / layout.LOCK)
    try:
        settings = identity.settings_in(identity.read_run(folder / layout.RUN))
        log = BatchLog(folder, RunClaim(folder, identity.RunIdentity(settings)).take())
        log.note(number, "dropped")
    finally:
        lock.release()
