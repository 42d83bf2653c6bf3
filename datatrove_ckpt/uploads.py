"""Uploads: what of one life's checkpoint lies on the remote, and the generations made of it."""

from __future__ import annotations

import datetime
from typing import Any

from loguru import logger

from datatrove_ckpt.checkpoint.snapshot import Snapshot
from datatrove_ckpt.errors import Fenced
from datatrove_ckpt.generations import Claim, Generation, Generations, Manifest, Part, encode_answers

KEPT = 3
"""Generations."""
# A file of this many parts gets its small last ones as one: restoring it should not take a thousand requests.
_MAX_PARTS = 64
_SMALL_PART = 8 * 2**20


class Uploads:
    """What lies on the remote of this life's checkpoint.

    Nothing of earlier lives is used again: their objects may be damaged, and a life starts with little. ``begin`` a
    mirroring, ``add`` what is new, ``publish``. What was added and not published stays, and the next one goes on there.
    """

    def __init__(self, generations: Generations) -> None:
        self.last_answer = 0
        """Number of the last answer that was copied."""
        self._generations = generations
        self._files: dict[str, list[Part]] = {}
        self._answers: list[tuple[Part, frozenset[int]]] = []
        self._count = 0
        self._run: dict[str, Any] = {}
        self._kept: dict[Generation, set[str]] = {}
        self._garbage: set[tuple[str, str]] = set()
        self._published: Manifest | None = None
        self._claim: Claim | None = None

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
        """Leaves out what committed chunks have dropped. ``run``: what ``run.json`` holds."""
        self._run = run
        if self._claim is None:
            self._claim = self._generations.claim(run["owner"])
            if not self._generations.names():
                # So that objects without any generation are damage, and not a first upload that was killed.
                self._generations.write(Generation(1, self._nonce), Manifest(run, {}, [], False), _now())
        for name in self._files.keys() - snapshot.sizes.keys():
            del self._files[name]
        self._answers = [(part, of) for part, of in self._answers if of & snapshot.unfinished]

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
        claims = self._check_claim()  # also by a process that has nothing new to say
        if manifest == self._published:
            return False
        names = self._generations.names()
        if self._published is None:
            self._take_stock(names)
        new = Generation(1 + max((name.number for name in names), default=0), self._nonce)
        self._generations.write(new, manifest, _now())
        self._published = manifest
        self._kept[new] = manifest.objects()
        try:
            self._tidy(names, claims)
        except Exception as error:  # what the file system's library raises
            logger.warning(
                f"Could not remove old generations at {self._generations.url}: {type(error).__name__}: {error}. They "
                "take room and do no harm; the next mirroring tries again."
            )
        return True

    def _check_claim(self) -> list[Claim]:
        claims = self._generations.claims()
        if claims and self._claim is not None and claims[-1] > self._claim:
            raise Fenced(
                f"Another process has taken this rank over: {self._generations.claimant(claims[-1])} has claimed the "
                f"mirror {self._generations.url}. This one writes nothing more; what it saved is kept."
            )
        return claims

    def _take_stock(self, names: list[Generation]) -> None:
        """What earlier owners left behind. Who is still at work among them stops at the sight of our claim."""
        for name in names:
            manifest = self._generations.read(name)
            if manifest is not None:
                self._kept[name] = manifest.objects()
        self._garbage |= self._generations.objects()

    def _tidy(self, names: list[Generation], claims: list[Claim]) -> None:
        """First generations, then what none of the others needs: a kill in between leaves objects too many only."""
        keep = sorted(self._kept)[-KEPT:]
        for name in [*names, *self._kept]:
            if name not in keep:
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
