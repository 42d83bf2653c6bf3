"""The format of a rank's checkpoint on a remote: objects, and manifests that name a checkpoint's
objects.

    REMOTE/00000/claim-00000003-<nonce>.json        an Ownership: the process that writes here; the
                                                    largest number wins
    REMOTE/00000/generation-00000012-<nonce>.json   a Version: a manifest, one line with its own
                                                    checksum, written last
    REMOTE/00000/objects/<nonce>-000034             a part of a file; never changed, shared by
                                                    versions
    REMOTE/00000/copies/<nonce>-000034              a second copy of this part

The object names keep the older words "claim" and "generation", which are part of the format.
``nonce`` is the writing owner's, so two processes never write one object.

A version is complete if its manifest and at least one copy of each object are intact. Versions
share objects, so without second copies one bad byte would spoil all versions.

Files only grow, so their new bytes become a new object, and so do new answers of unfinished
documents. Then the manifest completes the version, and objects that the last three versions do not
need are removed. A kill leaves the previous version intact, and unneeded objects for the next
process to remove.

Versions are signed if there is a key in the environment. A signed manifest names the SHA-256 of
each object, because xxh128 is not cryptographic. A signature is an HMAC-SHA256 of the manifest, the
name of the version and the rank's address on the mirror. So without the key no manifest can be
made, changed, renumbered, or moved to another rank. A writer can still remove versions, so that an
older signed version is the newest; only a node that still has its folder notices. A writer can also
stop a run by claiming the mirror.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import ClassVar, TypeVar

import orjson
import xxhash
from loguru import logger

from datatrove_ckpt.checkpoint import layout
from datatrove_ckpt.checkpoint.checksummed_lines import Json, add_checksum, is_count, verified_body
from datatrove_ckpt.checkpoint.identity import WRITTEN_BY, check_format, check_run
from datatrove_ckpt.checkpoint.open_checkpoint import Snapshot
from datatrove_ckpt.checkpoint.request_cache import CachedRequest
from datatrove_ckpt.common.object_store import ObjectStore
from datatrove_ckpt.common.redaction import MIRROR_KEY_VARIABLE, Secret
from datatrove_ckpt.common.retrying import failure_line
from datatrove_ckpt.errors import CheckpointCorrupt, ConfigError, Fenced, printable

_LEAST_CHARACTERS = 16
_SIGNED = re.compile(rb'(?s)(\{.*),"hmac":"([0-9a-f]{64})"\}')


class ManifestSigner:
    """Adds and checks the signatures of one rank's versions. Without a key, it adds no signature.

    Raises:
        ConfigError: the key is too short.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        # Not the whole URL: a mirror may be moved, and another node may mount it elsewhere.
        self._address = layout.RankAddress.of(url)
        self._key = Secret(os.environ.get(MIRROR_KEY_VARIABLE, ""))
        self.is_on = MIRROR_KEY_VARIABLE in os.environ
        """Whether there is a key."""
        if self.is_on and len(self._key.reveal()) < _LEAST_CHARACTERS:
            raise ConfigError(
                f"{MIRROR_KEY_VARIABLE}: a key has at least {_LEAST_CHARACTERS} characters "
                "(openssl rand -hex 32). Unset it to mirror without a key."
            )

    def add(self, name: str, body: bytes) -> bytes:
        if not self.is_on:
            return body
        return b'%s,"hmac":"%s"}' % (body[:-1], self._digest(name, body).encode())

    def check(self, name: str, body: bytes) -> None:
        """Checks a manifest that is about to be trusted.

        Raises:
            CheckpointCorrupt: there is a key, and the signature is missing or of another key.
            ConfigError: there is a signature, and no key.
        """
        signed = _SIGNED.fullmatch(body)
        url = f"{self._url}/{name}"
        if not self.is_on:
            if signed is not None:
                raise ConfigError(
                    f"{MIRROR_KEY_VARIABLE} is not set, but {url} is signed with a key. Export "
                    "it where the tasks run; or, to run without, remove the mirror where the local "
                    "folder is whole."
                )
        elif signed is None:
            raise CheckpointCorrupt(
                f"{url} is not signed, although {MIRROR_KEY_VARIABLE} is set. If you made it "
                "before the key, start once without it; else remove this version, which others "
                "may have made."
            )
        elif not hmac.compare_digest(self._digest(name, signed[1] + b"}").encode(), signed[2]):
            raise CheckpointCorrupt(
                f"{url} is not signed with the key in {MIRROR_KEY_VARIABLE}, or not for this "
                "task and version. Set the right key, or remove this version."
            )

    def _digest(self, name: str, body: bytes) -> str:
        message = f"datatrove-ckpt mirror 1\n{self._address}\n{name}\n".encode() + body
        return hmac.digest(self._key.reveal().encode(), message, "sha256").hex()


T = TypeVar("T")

FORMAT = 1
"""Version of the format of everything below a rank's folder."""
MAX_OBJECT_BYTES = 16 * 2**20
"""Limit of an object, which is put from memory in one request."""

# [0-9], because \d also matches the digits of other scripts.
_NAME = re.compile(r"(generation|claim)-([0-9]{8,18})-([0-9a-f]{16})\.json")
_OBJECT = re.compile(r"[0-9a-f]{16}-[0-9]{6,18}")


@dataclass(frozen=True, order=True)
class _Numbered:
    kind: ClassVar[str]
    number: int
    nonce: str

    @property
    def file(self) -> str:
        return f"{self.kind}-{self.number:08d}-{self.nonce}.json"


class Version(_Numbered):
    """A version's name. Numbers grow from version to version, and from owner to owner."""

    kind = "generation"


class Ownership(_Numbered):
    """The name of the object by which a process owns the mirror.

    The largest number wins, then the largest nonce.
    """

    kind = "claim"


@dataclass(frozen=True, slots=True)
class FilePart:
    """A range of a file's bytes. ``sha256`` is empty unless the version is signed."""

    name: str
    size: int
    xxh128: str
    sha256: str = ""

    def is_whole(self, data: bytes) -> bool:
        if len(data) != self.size or xxhash.xxh3_128_hexdigest(data) != self.xxh128:
            return False
        return not self.sha256 or hashlib.sha256(data).hexdigest() == self.sha256

    def to_json(self) -> dict[str, str | int]:
        return {name: value for name, value in asdict(self).items() if value or name != "sha256"}

    @classmethod
    def from_json(cls, data: Json) -> FilePart:
        part = cls(**data)
        if (
            not _OBJECT.fullmatch(part.name)
            or not is_count(part.size)
            # A row of the request cache may be larger than an object should be.
            or not 0 < part.size <= 2**30
        ):
            raise ValueError(
                f"it names {part.name!r} of {part.size!r} bytes, which is no object of a mirror"
            )
        return part


@dataclass(slots=True)
class Manifest:
    """The content of a version.

    Attributes:
        answers: parts that hold rows of the request cache, as lines of JSON.
        uploaded_at: time of the upload, in ISO 8601.
    """

    run: Json
    files: dict[str, list[FilePart]]
    answers: list[FilePart]
    finished: bool
    uploaded_at: str = ""

    @property
    def sizes(self) -> dict[str, int]:
        return {name: sum(part.size for part in parts) for name, parts in self.files.items()}

    def parts(self) -> Iterator[FilePart]:
        for parts in self.files.values():
            yield from parts
        yield from self.answers

    def object_names(self) -> set[str]:
        return {part.name for part in self.parts()}

    def to_json(self) -> bytes:
        files = {name: [part.to_json() for part in parts] for name, parts in self.files.items()}
        answers = [part.to_json() for part in self.answers]
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return orjson.dumps(
            {
                "format": FORMAT,
                "run": self.run,
                "files": files,
                "answers": answers,
                "finished": self.finished,
                "when": self.uploaded_at or now,
            }
        )

    @classmethod
    def from_json(cls, body: bytes, url: str) -> Manifest:
        """Reads a manifest, and checks all values: others may have written to the mirror.

        Raises:
            MirrorDamaged: the manifest is damaged, or names an object or file that no version
                holds.
            VersionMismatch: a newer version of this program wrote it.
        """
        try:
            data = orjson.loads(body)
            data.pop("hmac", None)
            run = data.get("run")
            written_by = run.get(WRITTEN_BY) if isinstance(run, dict) else None
            check_format(url, data, range(1, FORMAT + 1), written_by)
            check_format(url, run)
            if not is_count(data.pop("format")):
                raise ValueError("it has no format")
            for name in data["files"]:
                if not layout.is_mirrored(name):
                    raise ValueError(f"it names {name!r}, which is no file of a checkpoint")
            files = {
                name: [FilePart.from_json(part) for part in parts]
                for name, parts in data.pop("files").items()
            }
            answers = [FilePart.from_json(part) for part in data.pop("answers")]
            uploaded_at = data.pop("when", "")
            manifest = cls(files=files, answers=answers, uploaded_at=uploaded_at, **data)
            if (
                not re.fullmatch(r"[0-9a-f]{16}", check_run(manifest.run)["owner"]["nonce"])
                or "earlier" not in manifest.run["owner"]
            ):
                raise ValueError("its owner is damaged")
            if not isinstance(manifest.finished, bool) or not re.fullmatch(
                r"[0-9T:+.Z-]{0,40}", manifest.uploaded_at
            ):
                raise ValueError("its state or time is damaged")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise MirrorDamaged(f"its manifest is damaged ({error})") from error
        return manifest


def contains_version(owner: Json, version: Version) -> bool:
    """Whether an owner's local checkpoint holds all work of a version."""
    if version.nonce == owner["nonce"]:
        return True
    earlier = owner.get("earlier", {})
    up_to = earlier.get(version.nonce, 0)
    return up_to is None or version.number <= up_to


def encode_answers(rows: list[CachedRequest]) -> Iterator[tuple[bytes, frozenset[int]]]:
    lines: list[bytes] = []
    start = size = 0
    for end, row in enumerate(rows, 1):
        more = {"chunk_index": row.chunk_index, "error_message": row.answer.error_message}
        lines.append(orjson.dumps(row.to_json() | more) + b"\n")
        size += len(lines[-1])
        if size >= MAX_OBJECT_BYTES or end == len(rows):
            yield b"".join(lines), frozenset(row.ordinal for row in rows[start:end])
            lines = []
            start = end
            size = 0


def decode_answers(data: bytes) -> Iterator[CachedRequest]:
    for line in data.splitlines():
        try:
            request = CachedRequest.from_json(line)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise MirrorDamaged(f"an answer is damaged ({error!r})") from error
        yield request


class MirrorDamaged(Exception):
    """A manifest is damaged, or both copies of an object are missing or damaged."""


# versions ---------------------------------------------------------------------------------------


class VersionStore:
    def __init__(self, url: str) -> None:
        self.store = ObjectStore(url)
        self.url = self.store.url
        self._signer = ManifestSigner(self.url)

    def listing(self) -> tuple[list[Ownership], list[Version]]:
        """The ownership that wins and the newest version come last."""
        ownerships: list[Ownership] = []
        versions: list[Version] = []
        for match in filter(None, map(_NAME.fullmatch, self.store.names())):
            if match[1] == Ownership.kind:
                ownerships.append(Ownership(int(match[2]), match[3]))
            else:
                versions.append(Version(int(match[2]), match[3]))
        return sorted(ownerships), sorted(versions)

    def all_versions(self) -> list[Version]:
        return self.listing()[1]

    def newest(
        self, versions: list[Version], use: Callable[[Version], T], problems: list[str]
    ) -> T | None:
        """Returns ``use(version)`` for the newest intact version; None if all are damaged.

        Args:
            problems: receives a description of each damaged version.
        """
        for version in reversed(versions):
            try:
                return use(version)
            except MirrorDamaged as damage:
                problems.append(f"version {version.number} ({version.file}): {damage}")
        return None

    def read_manifest(self, version: Version, trusted: bool = False) -> Manifest:
        """Reads the manifest of a version.

        Args:
            trusted: check the signature first, because the version is restored.

        Raises:
            MirrorDamaged: the manifest is missing or damaged.
            CheckpointCorrupt, ConfigError: see ``ManifestSigner.check``.
            VersionMismatch: a newer version of this program wrote the manifest. The caller tries no
                older manifest, which would lack work.
        """
        body = verified_body(self.store.read(version.file, 64 * 2**20) or b"")
        if body is None:
            raise MirrorDamaged("its manifest is damaged")
        if trusted:
            self._signer.check(version.file, body)
        return Manifest.from_json(body, f"{self.url}/{version.file}")

    def write_manifest(self, version: Version, manifest: Manifest) -> None:
        self.store.put(
            version.file, add_checksum(self._signer.add(version.file, manifest.to_json()))
        )

    def put_object(self, name: str, data: bytes) -> FilePart:
        self.store.put(f"objects/{name}", data)
        self.store.copy(f"objects/{name}", f"copies/{name}", data)
        strong = ""
        if self._signer.is_on:
            strong = hashlib.sha256(data).hexdigest()
        return FilePart(name, len(data), xxhash.xxh3_128_hexdigest(data), strong)

    def read_object(self, part: FilePart) -> bytes:
        for folder in ("objects", "copies"):
            data = self.store.read(f"{folder}/{part.name}", part.size)
            if data is not None and part.is_whole(data):
                return data
            if folder == "objects":
                logger.warning(
                    f"{self.url}/objects/{part.name} is missing or damaged. Its copy is read."
                )
        raise MirrorDamaged(f"object {part.name} is missing or damaged, and so is its copy")

    def list_objects(self) -> set[tuple[str, str]]:
        names = (
            (folder, name) for folder in ("objects", "copies") for name in self.store.names(folder)
        )
        return {(folder, name) for folder, name in names if _OBJECT.fullmatch(name)}


KEPT_VERSIONS = 3
# From this many parts on, a file's small last parts are uploaded again as one, to keep restores
# short.
_MAX_PARTS = 64
_SMALL_PART_BYTES = 8 * 2**20


class VersionWriter:
    """Uploads parts, and makes versions of them.

    For each version: ``start_version``, then ``add`` and ``add_answers`` with the new data, then
    ``publish``. Unpublished parts stay for the next version. Objects of earlier owners are not
    reused: they may be damaged, and a process starts with little to upload.
    """

    def __init__(self, versions: VersionStore) -> None:
        self.last_answer = 0
        """The number of the last answer that was uploaded."""
        self.owns_mirror = False
        """Whether this process has taken ownership of the mirror."""
        self._versions = versions
        self._run: Json = {}
        self._files: dict[str, list[FilePart]] = {}
        self._answers: list[tuple[FilePart, frozenset[int]]] = []
        self._object_count = 0
        self._published: Manifest | None = None
        self._objects_of: dict[Version, set[str]] = {}
        """The versions on the mirror, with the names of their objects."""
        self._garbage: set[tuple[str, str]] = set()
        """Folder and name of objects that are removed once no version on the mirror needs them."""
        self._ownership = Ownership(0, "")
        self._number_floor = 0
        """The numbers of this owner's versions are larger."""

    def uploaded_bytes(self, name: str) -> int:
        return sum(part.size for part in self._files.get(name, ()))

    def compact(self) -> None:
        for parts in self._files.values():
            if len(parts) >= _MAX_PARTS:
                while parts and parts[-1].size < _SMALL_PART_BYTES:
                    parts.pop()
        if len(self._answers) >= _MAX_PARTS:
            self._answers.clear()
            self.last_answer = 0

    def start_version(self, run: Json, snapshot: Snapshot) -> None:
        """Drops the parts that the snapshot no longer needs. The first call takes ownership of the
        mirror.

        Raises:
            ConfigError: the bucket or folder does not exist.
        """
        self._run = run
        if not self.owns_mirror:
            self._take_ownership()
            self.owns_mirror = True
        for name in self._files.keys() - snapshot.sizes.keys():
            del self._files[name]
        self._answers = [(part, of) for part, of in self._answers if of & snapshot.unfinished]

    def _take_ownership(self) -> None:
        """Retries reuse the number, so they never outrank a newer owner."""
        ownerships, versions = self._versions.listing()
        if not self._ownership.number:
            self._ownership = Ownership(
                1 + max((other.number for other in ownerships), default=0), self._nonce
            )
        owner = self._run["owner"]
        process = orjson.dumps({"host": owner["host"], "pid": owner["pid"]})
        self._versions.store.put(self._ownership.file, process)
        only_first = all(version.number == 1 for version in versions)
        if only_first and self._versions.newest(versions, self._versions.read_manifest, []) is None:
            # An empty first version, so that objects without a version always mean damage. A killed
            # process may leave it torn.
            self._versions.write_manifest(
                Version(1, self._nonce), Manifest(self._run, {}, [], False)
            )

    def add(self, name: str, data: bytes) -> None:
        self._files.setdefault(name, []).append(self._put_part(data))

    def add_answers(self, snapshot: Snapshot) -> None:
        """After a failure halfway, all answers are uploaded again."""
        self._answers += [
            (self._put_part(data), ordinals) for data, ordinals in encode_answers(snapshot.answers)
        ]
        self.last_answer = snapshot.last_answer

    def _put_part(self, data: bytes) -> FilePart:
        name = f"{self._nonce}-{self._object_count:06d}"
        self._object_count += 1
        self._garbage |= {("objects", name), ("copies", name)}
        return self._versions.put_object(name, data)

    @property
    def _nonce(self) -> str:
        return str(self._run["owner"]["nonce"])

    def publish(self, finished: bool) -> bool:
        """Makes a version of the uploaded parts, and removes old versions and objects.

        Returns False if nothing has changed, so that there is no new version.

        Raises:
            Fenced: another process has taken ownership of the mirror.
        """
        files = {name: list(parts) for name, parts in self._files.items()}
        manifest = Manifest(self._run, files, [part for part, _ in self._answers], finished)
        # Even without changes: a process that lost the mirror must stop.
        ownerships, versions = self.list_as_owner()
        if manifest == self._published:
            return False
        if self._published is None:
            # Earlier owners left these. An owner that still runs stops when it finds our ownership.
            for version in versions:
                with suppress(MirrorDamaged):
                    self._objects_of[version] = self._versions.read_manifest(version).object_names()
            self._garbage |= self._versions.list_objects()
        new = self._next_version(versions)
        self._versions.write_manifest(new, manifest)
        self._published = manifest
        self._objects_of[new] = manifest.object_names()
        try:
            # Only objects of the first listing are removed. If this process is still the owner,
            # they are older than the next owner, however long this process pauses before a removal.
            self.list_as_owner()
            self._collect_garbage([version for version in versions if version < new], ownerships)
        except OSError as error:
            logger.warning(
                f"Could not remove old versions at {self._versions.url}: {failure_line(error)}. "
                "The next upload tries again."
            )
        return True

    def _next_version(self, versions: list[Version]) -> Version:
        """Returns the next version; the first number of an owner skips one number per earlier
        owner.

        An earlier owner that has listed the mirror may still write one version.
        """
        if not self._number_floor:
            highest = max((version.number for version in versions), default=0)
            self._number_floor = highest + self._ownership.number
        # A listing may lack our last versions.
        numbers = [
            version.number
            for version in {*versions, *self._objects_of}
            if version.nonce == self._nonce
        ]
        return Version(1 + max([self._number_floor, *numbers]), self._nonce)

    def list_as_owner(self) -> tuple[list[Ownership], list[Version]]:
        """Raises Fenced if another process has taken ownership."""
        ownerships, versions = self._versions.listing()
        if ownerships and ownerships[-1] > self._ownership:
            process = self._versions.store.read(ownerships[-1].file, 2**16)
            other = (process or b"another process").decode(errors="replace")[:300]
            raise Fenced(
                f"Another process has taken this task over: {printable(other)} owns the mirror "
                f"{self._versions.url} now. This process writes nothing more."
            )
        return ownerships, versions

    def _collect_garbage(self, versions: list[Version], ownerships: list[Ownership]) -> None:
        """Removes old versions first, then the objects that no remaining version needs.

        In this order a kill leaves superfluous objects, never a version without its objects.
        """
        keep = sorted(self._objects_of)[-KEPT_VERSIONS:]
        for version in sorted({*versions, *self._objects_of} - set(keep)):
            self._versions.store.delete(version.file)
        for ownership in ownerships[:-1]:
            self._versions.store.delete(ownership.file)
        self._objects_of = {version: self._objects_of[version] for version in keep}
        needed = set().union(*self._objects_of.values())
        for folder, name in sorted(self._garbage):
            if name not in needed:
                self._versions.store.delete(f"{folder}/{name}")
                self._garbage.discard((folder, name))
