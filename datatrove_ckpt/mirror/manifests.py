"""How a rank's checkpoint lies on a remote: objects, and manifests that say which objects make a checkpoint.

    REMOTE/00000/claim-00000003-<nonce>.json        who writes here; the largest number does
    REMOTE/00000/generation-00000012-<nonce>.json   a manifest: one line with its own checksum, written last
    REMOTE/00000/objects/<nonce>-000034             a part of a file; never changed, shared by generations
    REMOTE/00000/copies/<nonce>-000034              the same again

``nonce`` is that of the owner (see ``checkpoint/identity.py``) who wrote it, so two processes never write one object.

A generation is whole if its manifest and, of each of its objects, one of the two copies are. Objects are shared, so a
single copy of them would make one bad byte spoil all the generations that are kept; the second copy is made by the
store itself, and costs a request, not a transfer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import orjson
import xxhash
from loguru import logger

from datatrove_ckpt.checkpoint.lines import seal, unseal
from datatrove_ckpt.checkpoint.request_cache import Answer, AnswerKey, CachedRequest
from datatrove_ckpt.mirror.object_store import Store

FORMAT = 1
"""Version of everything below a rank's folder."""
MAX_OBJECT = 16 * 2**20
"""Bytes. An object is put from memory, in one step."""

_NAME = re.compile(r"(generation|claim)-(\d{8,})-([0-9a-f]{16})\.json")


@dataclass(frozen=True, order=True)
class _Numbered:
    number: int
    nonce: str


class Version(_Numbered):
    """A generation's name. Numbers grow, whoever writes; a larger one is newer."""

    @property
    def file(self) -> str:
        return f"generation-{self.number:08d}-{self.nonce}.json"


class Ownership(_Numbered):
    """The name of an owner's claim. Of two with one number, the larger nonce counts."""

    @classmethod
    def after(cls, others: list[Ownership], nonce: str) -> Ownership:
        return cls(1 + max((other.number for other in others), default=0), nonce)

    @property
    def file(self) -> str:
        return f"claim-{self.number:08d}-{self.nonce}.json"


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of a file, as one object."""

    name: str
    size: int
    xxh128: str


@dataclass(slots=True)
class Manifest:
    """What a generation is made of: the content of ``run.json``, and the parts of files, in order.

    ``answers`` hold rows of the request cache as lines of JSON. ``finished``: every document of the input is committed.
    """

    run: dict[str, Any]
    files: dict[str, list[Part]]
    answers: list[Part]
    finished: bool
    when: str = ""
    """When it was written, in ISO 8601."""

    def parts(self) -> Iterator[Part]:
        for parts in self.files.values():
            yield from parts
        yield from self.answers

    def objects(self) -> set[str]:
        return {part.name for part in self.parts()}

    def to_line(self, when: str) -> bytes:
        return seal(orjson.dumps({"format": FORMAT, **asdict(self), "when": when}))

    @classmethod
    def from_line(cls, line: bytes) -> Manifest | None:
        """None if the line is not whole."""
        body = unseal(line)
        if body is None:
            return None
        data = orjson.loads(body)
        if data.pop("format") != FORMAT:
            return None
        files = {name: [Part(**part) for part in parts] for name, parts in data.pop("files").items()}
        return cls(files=files, answers=[Part(**part) for part in data.pop("answers")], **data)


def covers(owner: dict[str, Any], generation: Version) -> bool:
    """Whether a checkpoint of this owner holds all that the generation holds. ``owner``: as in ``run.json``."""
    if generation.nonce == owner["nonce"]:
        return True
    earlier = owner.get("earlier", {})
    up_to = earlier.get(generation.nonce, 0)
    return up_to is None or generation.number <= up_to


def encode_answers(rows: list[CachedRequest]) -> Iterator[tuple[bytes, frozenset[int]]]:
    """Rows of the request cache as content of objects, each with the ordinals in it."""
    lines: list[bytes] = []
    ordinals: set[int] = set()
    size = 0
    for row in rows:
        result = row.answer.result
        kept = {
            "chunk_index": row.chunk_index,
            "ordinal": row.ordinal,
            "doc_id": row.doc_id,
            "key": list(row.key),
            "result": None if result is None else result.decode(),
            "error_message": row.answer.error_message,
        }
        lines.append(orjson.dumps(kept) + b"\n")
        ordinals.add(row.ordinal)
        size += len(lines[-1])
        if size >= MAX_OBJECT:
            yield b"".join(lines), frozenset(ordinals)
            lines, ordinals, size = [], set(), 0
    if lines:
        yield b"".join(lines), frozenset(ordinals)


def decode_answers(data: bytes) -> Iterator[CachedRequest]:
    for line in data.splitlines():
        row = orjson.loads(line)
        result = None if row["result"] is None else row["result"].encode()
        answer = Answer(result, row["error_message"])
        yield CachedRequest(row["chunk_index"], row["ordinal"], row["doc_id"], AnswerKey(*row["key"]), answer)


class Damaged(Exception):
    """An object that is missing, or is not what was written, in both its copies."""


class Versions:
    """The generations of one rank, by its folder's URL."""

    def __init__(self, url: str) -> None:
        self._store = Store(url)
        self.url = self._store.url

    def listing(self) -> tuple[list[Ownership], list[Version]]:
        """Both as they were at one moment. The claim that counts comes last, and so does the newest generation."""
        found = [match for match in map(_NAME.fullmatch, self._store.names()) if match]
        claims = sorted(Ownership(int(match[2]), match[3]) for match in found if match[1] == "claim")
        return claims, sorted(Version(int(match[2]), match[3]) for match in found if match[1] == "generation")

    def names(self) -> list[Version]:
        """Oldest first."""
        return self.listing()[1]

    def claim(self, claim: Ownership, owner: dict[str, Any]) -> None:
        """From here on this owner writes, and nobody who came before."""
        self._store.put(claim.file, orjson.dumps({"host": owner["host"], "pid": owner["pid"]}))

    def claimant(self, claim: Ownership) -> str:
        """Its host and pid."""
        content = self._store.read(claim.file)
        return content.decode(errors="replace") if content else "unknown"

    def read(self, generation: Version) -> Manifest | None:
        """None if the manifest is damaged, or gone."""
        line = self._store.read(generation.file)
        return None if line is None else Manifest.from_line(line)

    def write(self, generation: Version, manifest: Manifest, when: str) -> None:
        """The generation is there once this returns, and its objects must be before."""
        self._store.put(generation.file, manifest.to_line(when))

    def remove(self, name: Version | Ownership) -> None:
        self._store.remove(name.file)

    def put(self, name: str, data: bytes) -> Part:
        """A new object, twice."""
        self._store.put(f"objects/{name}", data)
        self._store.copy(f"objects/{name}", f"copies/{name}")
        return Part(name, len(data), str(xxhash.xxh3_128_hexdigest(data)))

    def fetch(self, part: Part) -> bytes:
        """The part's bytes, from whichever copy is good.

        Raises:
            Damaged: neither is.
        """
        for folder in ("objects", "copies"):
            data = self._store.read(f"{folder}/{part.name}")
            if data is not None and len(data) == part.size and xxhash.xxh3_128_hexdigest(data) == part.xxh128:
                return data
            if folder == "objects":
                logger.warning(f"{self.url}/objects/{part.name} is missing or damaged; its copy is read.")
        raise Damaged(f"object {part.name} is missing or damaged, and so is its copy")

    def objects(self) -> set[tuple[str, str]]:
        """Folder and name of every object, of both copies."""
        return {(folder, name) for folder in ("objects", "copies") for name in self._store.names(folder)}

    def remove_object(self, folder: str, name: str) -> None:
        self._store.remove(f"{folder}/{name}")
