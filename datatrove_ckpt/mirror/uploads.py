"""Uploads: what of one life's checkpoint lies on the remote, and the generations made of it."""

from __future__ import annotations

import datetime
from typing import Any

from loguru import logger

from datatrove_ckpt.checkpoint.snapshot import Snapshot
from datatrove_ckpt.errors import ConfigError, Fenced
from datatrove_ckpt.formatting import error_text
from datatrove_ckpt.mirror.manifests import Manifest, Ownership, Part, Version, Versions, encode_answers
from datatrove_ckpt.remote_errors import io_errors

KEPT = 3
"""Versions."""
# A file of this many parts gets its small last ones as one: restoring it should not take a thousand requests.
_MAX_PARTS = 64
_SMALL_PART = 8 * 2**20


class Uploads:
    """What lies on the remote of this life's checkpoint.

    Nothing of earlier lives is used again: their objects may be damaged, and a life starts with little. ``begin`` a
    mirroring, ``add`` what is new, ``publish``. What was added and not published stays, and the next one goes on there.
    """

    def __init__(self, generations: Versions) -> None:
        self.last_answer = 0
        """Number of the last answer that was copied."""
        self._generations = generations
        self._files: dict[str, list[Part]] = {}
        self._answers: list[tuple[Part, frozenset[int]]] = []
        self._count = 0
        self._run: dict[str, Any] = {}
        self._kept: dict[Version, set[str]] = {}
        self._garbage: set[tuple[str, str]] = set()
        self._published: Manifest | None = None
        self._claim: Ownership | None = None
        self._floor: int | None = None
        """Numbers of this life's generations are larger."""
        self.begun = False
        """Whether this life has claimed the mirror."""

    # objects ---------------------------------------------------------------------------------------------------

    def size(self, name: str) -> int:
        """How many bytes of the file were copied."""
        return sum(part.size for part in self._files.get(name, ()))

    def make_room(self) -> None:
        """Where there are many small parts, forgets them: they are copied again as one."""
        for parts in self._files.values():
            if len(parts) >= _MAX_PARTS:
                while parts and parts[-1].size < _SMALL_PART:
                    parts.pop()
        if len(self._answers) >= _MAX_PARTS:
            self._answers.clear()
            self.last_answer = 0

    def begin(self, run: dict[str, Any], snapshot: Snapshot) -> None:
        """Leaves out what committed chunks have dropped. ``run``: what ``run.json`` holds.

        Raises:
            ConfigError: the place to mirror to does not exist.
        """
        self._run = run
        if not self.begun:
            self._begin_life()
            self.begun = True
        for name in self._files.keys() - snapshot.sizes.keys():
            del self._files[name]
        self._answers = [(part, of) for part, of in self._answers if of & snapshot.unfinished]

    def _begin_life(self) -> None:
        """Claims the mirror. Done again after it failed: with one number, which never outdoes a later life's claim."""
        claims, names = self._generations.listing()
        self._claim = self._claim or Ownership.after(claims, self._nonce)
        try:
            self._generations.claim(self._claim, self._run["owner"])
        except FileNotFoundError as error:
            raise ConfigError(
                f"checkpoints_remote_dir: nothing can be written to {self._generations.url}: {error}. Make the bucket "
                "or folder, or correct the setting, and run the same command again; what was answered is kept here."
            ) from error
        if not names:
            # So that objects without any generation are damage, and not a first upload that was killed.
            self._generations.write(Version(1, self._nonce), Manifest(self._run, {}, [], False), _now())

    def add(self, name: str, data: bytes) -> None:
        """The file's next bytes."""
        self._files.setdefault(name, []).append(self._put(data))

    def add_answers(self, snapshot: Snapshot) -> None:
        """All or nothing: of answers that are half copied, all are copied again."""
        self._answers += [(self._put(data), ordinals) for data, ordinals in encode_answers(snapshot.answers)]
        self.last_answer = snapshot.last_answer

    def _put(self, data: bytes) -> Part:
        name = f"{self._nonce}-{self._count:06d}"
        self._count += 1
        self._garbage |= {("objects", name), ("copies", name)}
        return self._generations.put(name, data)

    @property
    def _nonce(self) -> str:
        return str(self._run["owner"]["nonce"])

    # generations -----------------------------------------------------------------------------------------------

    def publish(self, finished: bool) -> bool:
        """Makes a generation of what was copied, if it is another than the last one, and tidies up.

        Returns whether it was another.

        Raises:
            Fenced: another process has claimed the mirror since.
        """
        files = {name: list(parts) for name, parts in self._files.items()}
        manifest = Manifest(self._run, files, [part for part, _ in self._answers], finished)
        claims, names = self._list()  # also by a process that has nothing new to say
        if manifest == self._published:
            return False
        if self._published is None:
            self._take_stock(names)
        new = self._next(names)
        self._generations.write(new, manifest, _now())
        self._published = manifest
        self._kept[new] = manifest.objects()
        try:
            # Only what was seen before is removed. If nobody has claimed the mirror until now, all of it is older than
            # whoever does next, however long this process stands still from here on.
            self._list()
            self._tidy([name for name in names if name < new], claims)
        except io_errors() as error:
            logger.warning(
                f"Could not remove old generations at {self._generations.url}: {error_text(error)}. They "
                "take room and do no harm; the next mirroring tries again."
            )
        return True

    def _next(self, names: list[Version]) -> Version:
        """A life's first number leaves as many out as there were claims, later ones leave none out.

        An owner before us that listed before we claimed may still write one generation, and that must not be newer than
        ours: if it is its first one, it leaves fewer out.
        """
        if self._floor is None:
            assert self._claim is not None
            self._floor = max((name.number for name in names), default=0) + self._claim.number
        own = [name.number for name in names if name.nonce == self._nonce]
        return Version(1 + max([self._floor, *own]), self._nonce)

    def _list(self) -> tuple[list[Ownership], list[Version]]:
        """Claims and generations, unless there is a newer claim than ours."""
        claims, names = self._generations.listing()
        if claims and self._claim is not None and claims[-1] > self._claim:
            raise Fenced(
                f"Another process has taken this rank over: {self._generations.claimant(claims[-1])} has claimed the "
                f"mirror {self._generations.url}. This one writes nothing more; what it saved is kept."
            )
        return claims, names

    def _take_stock(self, names: list[Version]) -> None:
        """What earlier owners left behind. Who is still at work among them stops at the sight of our claim."""
        for name in names:
            manifest = self._generations.read(name)
            if manifest is not None:
                self._kept[name] = manifest.objects()
        self._garbage |= self._generations.objects()

    def _tidy(self, names: list[Version], claims: list[Ownership]) -> None:
        """First generations, then what none of the others needs: a kill in between leaves objects too many only."""
        keep = sorted(self._kept)[-KEPT:]
        for name in sorted({*names, *self._kept} - set(keep)):
            self._generations.remove(name)
        for claim in claims[:-1]:
            self._generations.remove(claim)
        self._kept = {name: self._kept[name] for name in keep}
        needed = set().union(*self._kept.values())
        for found in sorted(self._garbage):
            if found[1] not in needed:
                self._generations.remove_object(*found)
                self._garbage.discard(found)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
