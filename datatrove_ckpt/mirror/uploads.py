"""Uploads the new bytes of a rank's checkpoint, and makes versions of them.

Files only grow, so their new bytes become a new object, and so do new answers of unfinished
documents. Then the manifest completes the version, and objects that the last three versions do not
need are removed. A kill leaves the previous version intact, and unneeded objects for the next
process to remove.
"""

from __future__ import annotations

import datetime
from contextlib import suppress

from loguru import logger

from datatrove_ckpt.checkpoint.layout import HISTORY
from datatrove_ckpt.checkpoint.lines import Json
from datatrove_ckpt.checkpoint.rank_files import Snapshot
from datatrove_ckpt.common.retrying import failure_line
from datatrove_ckpt.errors import Fenced
from datatrove_ckpt.mirror.manifests import (
    Damaged,
    Manifest,
    Ownership,
    Part,
    Version,
    Versions,
    encode_answers,
)
from datatrove_ckpt.mirror.object_store import needs_bucket

KEPT_VERSIONS = 3
# From this many parts on, a file's small last parts are uploaded again as one, to keep restores
# short.
_MAX_PARTS = 64
_SMALL_PART_BYTES = 8 * 2**20


class Uploads:
    """The parts that are uploaded, and the versions made of them.

    For each version: ``start_version``, then ``add`` and ``add_answers`` with what is new, then
    ``publish``. Unpublished parts stay for the next version. Objects of earlier owners are not
    reused: they may be damaged, and a process starts with little to upload.
    """

    def __init__(self, versions: Versions) -> None:
        self.last_answer = 0
        """Number of the last answer that is uploaded."""
        self.owns_mirror = False
        """Whether this process has taken ownership of the mirror."""
        self._versions = versions
        self._run: Json = {}
        self._files: dict[str, list[Part]] = {}
        self._generation: int | None = None
        """Generation of the history that this process uploaded."""
        self._answers: list[tuple[Part, frozenset[int]]] = []
        self._object_count = 0
        self._published: Manifest | None = None
        self._kept: dict[Version, set[str]] = {}
        """The versions on the mirror, with the names of their objects."""
        self._garbage: set[tuple[str, str]] = set()
        """Folder and name of objects that are removed once no kept version needs them."""
        self._ownership: Ownership | None = None
        self._number_floor: int | None = None
        """The numbers of this owner's versions are larger."""

    def uploaded_bytes(self, name: str) -> int:
        return sum(part.size for part in self._files.get(name, ()))

    def forget_replaced(self, snapshot: Snapshot) -> None:
        """Forgets the parts of a history that was replaced, so that it is uploaded again as a
        whole.
        """
        # An earlier attempt may have replaced what it had uploaded.
        if self._generation != snapshot.generation:
            self._files.pop(HISTORY, None)
            self._generation = snapshot.generation

    def compact(self) -> None:
        """Forgets small parts where there are many of them, so that they are uploaded again as
        one.
        """
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
        """Takes ownership. Retries reuse the number, so they never outrank a newer owner."""
        ownerships, versions = self._versions.listing()
        if self._ownership is None:
            self._ownership = Ownership(
                1 + max((other.number for other in ownerships), default=0), self._nonce
            )
        with needs_bucket(self._versions.url):
            self._versions.write_ownership(self._ownership, self._run["owner"])
        only_first = all(version.number == 1 for version in versions)
        if only_first and self._versions.newest(versions, self._versions.read_manifest, []) is None:
            # An empty first version, so that objects without a version always mean damage. A killed
            # process may leave it torn.
            self._versions.write_manifest(
                Version(1, self._nonce), Manifest(self._run, {}, [], False), _now()
            )

    def add(self, name: str, data: bytes) -> None:
        self._files.setdefault(name, []).append(self._put_part(data))

    def add_answers(self, snapshot: Snapshot) -> None:
        """Uploads the snapshot's answers.

        If that fails halfway, all of them are uploaded again next time.
        """
        self._answers += [
            (self._put_part(data), ordinals) for data, ordinals in encode_answers(snapshot.answers)
        ]
        self.last_answer = snapshot.last_answer

    def _put_part(self, data: bytes) -> Part:
        name = f"{self._nonce}-{self._object_count:06d}"
        self._object_count += 1
        self._garbage |= {("objects", name), ("copies", name)}
        return self._versions.put_object(name, data)

    @property
    def _nonce(self) -> str:
        return str(self._run["owner"]["nonce"])

    def publish(self, finished: bool) -> bool:
        """Makes a version of the uploaded parts, unless nothing has changed, and removes what is no
        longer needed.

        Returns whether there is a new version.

        Raises:
            Fenced: another process has taken ownership of the mirror.
        """
        files = {name: list(parts) for name, parts in self._files.items()}
        manifest = Manifest(self._run, files, [part for part, _ in self._answers], finished)
        # Also if nothing has changed: a fenced process must stop.
        ownerships, versions = self.list_as_owner()
        if manifest == self._published:
            return False
        if self._published is None:
            # What earlier owners left. Those that still run stop when they see our ownership.
            for version in versions:
                with suppress(Damaged):
                    self._kept[version] = self._versions.read_manifest(version).object_names()
            self._garbage |= self._versions.list_objects()
        new = self._next_version(versions)
        self._versions.write_manifest(new, manifest, _now())
        self._published = manifest
        self._kept[new] = manifest.object_names()
        try:
            # Only what was listed before is removed. If the owner is still this process, all of
            # that is older than the next owner, however long this process pauses before the
            # removals.
            self.list_as_owner()
            self._collect_garbage([version for version in versions if version < new], ownerships)
        except OSError as error:
            logger.warning(
                f"Could not remove old versions at {self._versions.url}: {failure_line(error)}. "
                "They use storage and do no harm. The next upload tries again."
            )
        return True

    def _next_version(self, versions: list[Version]) -> Version:
        """Returns the next version; the first number of an owner skips one number per earlier
        owner.

        An earlier owner that listed the mirror before may still write one version, and ours must be
        newer. An earlier owner's first version skips fewer numbers.
        """
        if self._number_floor is None:
            assert self._ownership is not None
            highest = max((version.number for version in versions), default=0)
            self._number_floor = highest + self._ownership.number
        # Listings lag.
        own = [
            version.number for version in {*versions, *self._kept} if version.nonce == self._nonce
        ]
        return Version(1 + max([self._number_floor, *own]), self._nonce)

    def list_as_owner(self) -> tuple[list[Ownership], list[Version]]:
        """Raises:
        Fenced: another process has taken ownership.
        """
        ownerships, versions = self._versions.listing()
        if ownerships and self._ownership is not None and ownerships[-1] > self._ownership:
            other = self._versions.owner_text(ownerships[-1])
            raise Fenced(
                f"Another process has taken this task over: {other} owns the mirror "
                f"{self._versions.url} now. This one writes nothing more; what it saved is kept."
            )
        return ownerships, versions

    def _collect_garbage(self, versions: list[Version], ownerships: list[Ownership]) -> None:
        """Removes old versions first, then the objects that no kept version needs.

        In this order a kill leaves superfluous objects, never a version without its objects.
        """
        keep = sorted(self._kept)[-KEPT_VERSIONS:]
        for version in sorted({*versions, *self._kept} - set(keep)):
            self._versions.remove(version.file)
        for ownership in ownerships[:-1]:
            self._versions.remove(ownership.file)
        self._kept = {version: self._kept[version] for version in keep}
        needed = set().union(*self._kept.values())
        for found in sorted(self._garbage):
            if found[1] not in needed:
                self._versions.remove("/".join(found))
                self._garbage.discard(found)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
