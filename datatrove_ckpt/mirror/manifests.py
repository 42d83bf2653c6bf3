"""The format of a rank's checkpoint on a remote: objects, and manifests that say which objects make a checkpoint.

    REMOTE/00000/claim-00000003-<nonce>.json        an Ownership: who writes here; the largest number wins
    REMOTE/00000/generation-00000012-<nonce>.json   a Version: a manifest, one line with its own checksum, written last
    REMOTE/00000/objects/<nonce>-000034             a part of a file; never changed, shared by versions
    REMOTE/00000/copies/<nonce>-000034              a second copy of the same part

The names of the objects are part of the format, so they keep the older words "claim" and "generation".
``nonce`` is that of the owner (see ``checkpoint/identity.py``) that wrote the object, so two processes never write one
object.

A version is complete if its manifest is intact and so is, of each of its objects, one of the two copies. Versions
share objects, so with one copy a single bad byte would spoil all the versions that are kept. The object store itself
makes the second copy, which costs a request and no transfer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import orjson
import xxhash
from loguru import logger

from datatrove_ckpt.checkpoint.lines import seal, unseal
from datatrove_ckpt.checkpoint.request_cache import Answer, AnswerKey, CachedRequest
from datatrove_ckpt.mirror.object_store import ObjectStore

FORMAT = 1
"""Version of the format of everything below a rank's folder."""
MAX_OBJECT_BYTES = 16 * 2**20
"""An object is put from memory, in one request."""

RunJson: TypeAlias = dict[str, Any]
"""The content of ``run.json``: plain JSON values, see ``checkpoint/identity.py``."""
OwnerJson: TypeAlias = dict[str, Any]
"""The owner in it: ``nonce``, ``host``, ``pid``, ``fence`` and ``earlier``."""

_NAME = re.compile(r"(generation|claim)-(\d{8,})-([0-9a-f]{16})\.json")


@dataclass(frozen=True, order=True)
class _Numbered:
    number: int
    nonce: str


class Version(_Numbered):
    """Names one version of the checkpoint. Numbers grow from version to version, and from owner to owner."""

    @property
    def file(self) -> str:
        return f"generation-{self.number:08d}-{self.nonce}.json"


class Ownership(_Numbered):
    """Names the object by which a process owns the mirror. The largest number wins, then the largest nonce."""

    @classmethod
    def after(cls, others: list[Ownership], nonce: str) -> Ownership:
        """An ownership that wins against all the others."""
        return cls(1 + max((other.number for other in others), default=0), nonce)

    @property
    def file(self) -> str:
        return f"claim-{self.number:08d}-{self.nonce}.json"


@dataclass(frozen=True, slots=True)
class Part:
    """A range of a file's bytes, stored as one object. ``size`` is in bytes."""

    name: str
    size: int
    xxh128: str


@dataclass(slots=True)
class Manifest:
    """The content of a version.

    Attributes:
        run: the content of ``run.json``.
        files: the parts of each other file, in order.
        answers: parts that hold rows of the request cache, as lines of JSON.
        finished: whether every document of the input is committed.
        when: the time of the upload, in ISO 8601.
    """

    run: RunJson
    files: dict[str, list[Part]]
    answers: list[Part]
    finished: bool
    when: str = ""

    def parts(self) -> Iterator[Part]:
        """Every part, of the files and of the answers."""
        for parts in self.files.values():
            yield from parts
        yield from self.answers

    def object_names(self) -> set[str]:
        return {part.name for part in self.parts()}

    def to_line(self, when: str) -> bytes:
        return seal(orjson.dumps({"format": FORMAT, **asdict(self), "when": when}))

    @classmethod
    def from_line(cls, line: bytes) -> Manifest | None:
        """None if the line is damaged, or of another format."""
        body = unseal(line)
        if body is None:
            return None
        data = orjson.loads(body)
        if data.pop("format") != FORMAT:
            return None
        files = {name: [Part(**part) for part in parts] for name, parts in data.pop("files").items()}
        return cls(files=files, answers=[Part(**part) for part in data.pop("answers")], **data)


def contains_version(owner: OwnerJson, version: Version) -> bool:
    """Whether this owner's local checkpoint holds all that the version holds."""
    if version.nonce == owner["nonce"]:
        return True
    earlier = owner.get("earlier", {})
    up_to = earlier.get(version.nonce, 0)
    return up_to is None or version.number <= up_to


def encode_answers(rows: list[CachedRequest]) -> Iterator[tuple[bytes, frozenset[int]]]:
    """Rows of the request cache as the contents of objects, each with the ordinals of its documents."""
    lines: list[bytes] = []
    ordinals: set[int] = set()
    size = 0
    for row in rows:
        result = row.answer.result
        fields = {
            "chunk_index": row.chunk_index,
            "ordinal": row.ordinal,
            "doc_id": row.doc_id,
            "key": list(row.key),
            "result": None if result is None else result.decode(),
            "error_message": row.answer.error_message,
        }
        lines.append(orjson.dumps(fields) + b"\n")
        ordinals.add(row.ordinal)
        size += len(lines[-1])
        if size >= MAX_OBJECT_BYTES:
            yield b"".join(lines), frozenset(ordinals)
            lines, ordinals, size = [], set(), 0
    if lines:
        yield b"".join(lines), frozenset(ordinals)


def decode_answers(data: bytes) -> Iterator[CachedRequest]:
    """The inverse of ``encode_answers``, for one object."""
    for line in data.splitlines():
        row = orjson.loads(line)
        result = None if row["result"] is None else row["result"].encode()
        answer = Answer(result, row["error_message"])
        yield CachedRequest(row["chunk_index"], row["ordinal"], row["doc_id"], AnswerKey(*row["key"]), answer)


class Damaged(Exception):
    """A manifest is damaged, or both copies of an object are missing or damaged."""


class Versions:
    """The versions of one rank's checkpoint, below the URL of the rank's folder."""

    def __init__(self, url: str) -> None:
        self._store = ObjectStore(url)
        self.url = self._store.url

    def listing(self) -> tuple[list[Ownership], list[Version]]:
        """All ownerships and versions, from one listing. The ownership that wins and the newest version come last."""
        found = [match for match in map(_NAME.fullmatch, self._store.names()) if match]
        ownerships = sorted(Ownership(int(match[2]), match[3]) for match in found if match[1] == "claim")
        return ownerships, sorted(Version(int(match[2]), match[3]) for match in found if match[1] == "generation")

    def all_versions(self) -> list[Version]:
        """Oldest first."""
        return self.listing()[1]

    def write_ownership(self, ownership: Ownership, owner: OwnerJson) -> None:
        """Makes this process the owner: every earlier owner stops when it sees the object."""
        self._store.put(ownership.file, orjson.dumps({"host": owner["host"], "pid": owner["pid"]}))

    def owner_text(self, ownership: Ownership) -> str:
        """The owner's host and process id, for an error message."""
        content = self._store.read(ownership.file)
        return content.decode(errors="replace") if content else "unknown"

    def read_manifest(self, version: Version) -> Manifest | None:
        """None if the manifest is missing or damaged."""
        line = self._store.read(version.file)
        return None if line is None else Manifest.from_line(line)

    def write_manifest(self, version: Version, manifest: Manifest, when: str) -> None:
        """Completes the version. Its objects must have been written before."""
        self._store.put(version.file, manifest.to_line(when))

    def remove(self, name: Version | Ownership) -> None:
        self._store.remove(name.file)

    def put_object(self, name: str, data: bytes) -> Part:
        """Writes a new object and its second copy."""
        self._store.put(f"objects/{name}", data)
        self._store.copy(f"objects/{name}", f"copies/{name}")
        return Part(name, len(data), str(xxhash.xxh3_128_hexdigest(data)))

    def read_object(self, part: Part) -> bytes:
        """The part's bytes, from whichever copy is intact.

        Raises:
            Damaged: neither is.
        """
        for folder in ("objects", "copies"):
            data = self._store.read(f"{folder}/{part.name}")
            if data is not None and len(data) == part.size and xxhash.xxh3_128_hexdigest(data) == part.xxh128:
                return data
            if folder == "objects":
                logger.warning(f"{self.url}/objects/{part.name} is missing or damaged. Reading its copy instead.")
        raise Damaged(f"object {part.name} is missing or damaged, and so is its copy")

    def list_objects(self) -> set[tuple[str, str]]:
        """Folder and name of every object, of both copies."""
        return {(folder, name) for folder in ("objects", "copies") for name in self._store.names(folder)}

    def remove_object(self, folder: str, name: str) -> None:
        self._store.remove(f"{folder}/{name}")
