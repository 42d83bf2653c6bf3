"""What a rank reads of an input that ``reshard`` has dealt out: parts of files, instead of every n-th file.

A share is a rank's whole input, from its first document on. A part that follows may be read by another rank after the
next ``reshard``, but what the rank has read stays the beginning of its share. So a position that was saved before is a
position after it, too, and a chunk that is made again finds its documents.

``shares.json`` holds the shares of all ranks, and a hash over the names of all files: a file that is added later is in
no share, so it is refused. Together the shares are each file once: whatever was done to ``shares.json``, no document is
in two shares or in none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from xxhash import xxh3_128_hexdigest

from datatrove_ckpt.checkpoint.layout import SHARES
from datatrove_ckpt.checkpoint.lines import explained, read_sealed, sealed_json
from datatrove_ckpt.errors import CheckpointCorrupt, CheckpointMismatch

VERSION = 2
"""1 has no checksum."""

FilePosition: TypeAlias = tuple[int, ...]
"""As in ``positions``."""


class Part(NamedTuple):
    """A file, or what lies in it after ``begin``, up to and including the document at ``end``.

    ``end``: None: the end of the file, wherever that is when it is read. ``size``: of the whole file in bytes, when it
    was divided; None: it was not. ``hash``: of the file then, if it may not grow. ``bytes``: the size of the part,
    about.
    """

    name: str
    begin: FilePosition = ()
    end: FilePosition | None = None
    size: int | None = None
    hash: str = ""
    bytes: int = 0

    @property
    def is_whole(self) -> bool:
        return not self.begin and self.end is None

    def to_json(self) -> list[Any]:
        """A list without the last values that are the usual ones."""
        values = [self.name, list(self.begin), None if self.end is None else list(self.end), self.size, self.hash]
        return [self.name, [], None, None, "", self.bytes] if self.is_whole else [*values, self.bytes]

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> Part:
        """The opposite of ``to_json``."""
        name, begin, end, size, content, length = values
        # An end before the first document is that of an empty part, wherever it begins.
        return cls(str(name), tuple(begin), None if end is None else tuple(end or begin), size, content, int(length))


class Place(NamedTuple):
    """A place in a list of parts: the number of the part, and the position in its file."""

    part: int
    at: FilePosition


@dataclass(frozen=True)
class Share:
    """The input of one rank.

    Attributes:
        round: how many times the run was dealt out anew, with this one.
        input: hash over the names of all files of the input.
    """

    round: int
    input: str
    parts: list[Part] = field(default_factory=list)

    def check_input(self, names: Sequence[str]) -> None:
        """Checks that the names are those of all files that were dealt out.

        Raises:
            CheckpointMismatch: they are not.
        """
        if names_hash(names) != self.input:
            raise CheckpointMismatch(
                f"The input has {len(names)} files, and they are not the {self.input.partition(':')[0]} that were "
                "dealt out when the number of tasks was changed: files were added, removed or renamed since. Put the "
                "input back, and process new files as another run."
            )


def names_hash(names: Sequence[str]) -> str:
    """For ``Share.input``."""
    return f"{len(names)}:{xxh3_128_hexdigest(chr(0).join(sorted(names)).encode(errors='surrogatepass'))}"


@dataclass(frozen=True)
class Shares:
    """The content of ``shares.json``.

    Attributes:
        tasks: number of tasks of the run. There are shares of more ranks if there were more tasks before.
        ranks: the parts of each rank's share.
    """

    round: int
    tasks: int
    input: str
    ranks: dict[int, list[Part]]

    def of(self, rank: int) -> Share:
        return Share(self.round, self.input, self.ranks.get(rank, []))

    @property
    def retired(self) -> dict[int, list[Part]]:
        """The shares of the ranks of an earlier, larger number of tasks."""
        return {rank: parts for rank, parts in self.ranks.items() if rank >= self.tasks}

    def to_bytes(self) -> bytes:
        ranks = {str(rank): [part.to_json() for part in parts] for rank, parts in self.ranks.items()}
        content = {"version": VERSION, "round": self.round, "tasks": self.tasks, "input": self.input, "ranks": ranks}
        return sealed_json(content, indent=False)

    @classmethod
    @lru_cache(maxsize=1)  # a start asks several times
    def from_bytes(cls, data: bytes, path: object) -> Shares:
        """
        Raises:
            CheckpointCorrupt: it holds no shares, or they are not each file once. The message names ``path``.
        """
        try:
            content = read_sealed(data, (VERSION,))
            if content["version"] != VERSION:
                raise ValueError(f"version {content['version']}")
            ranks = {int(rank): [Part.from_json(part) for part in parts] for rank, parts in content["ranks"].items()}
            shares = cls(int(content["round"]), int(content["tasks"]), str(content["input"]), ranks)
            shares._check_cover()
            return shares
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointCorrupt(
                f"{path} cannot be read ({error}), so it is not known what each task reads. Restore it from a copy, or "
                "from the mirror."
            ) from error

    def _check_cover(self) -> None:
        """
        Raises:
            ValueError: a part of a file is in no share, or in two.
        """
        found: dict[str, list[Part]] = defaultdict(list)
        for part in chain(*self.ranks.values()):
            if part.end is None or part.end != part.begin:
                found[part.name].append(part)
        for name, parts in found.items():
            parts.sort(key=lambda part: part.begin)
            if [part.begin for part in parts] + [None] != [(), *(part.end for part in parts)]:
                raise ValueError(f"the shares do not hold {name!r} once")
        if names_hash(list(found)) != self.input:
            raise ValueError(f"the shares hold {len(found)} files, not the {self.input.partition(':')[0]} of the input")


def read_shares(root: Path) -> Shares | None:
    """The shares of all ranks below ``checkpoints_local_dir``; None if datatrove deals out the files.

    Raises:
        CheckpointCorrupt: the file holds none.
        StorageFailed: it cannot be read.
    """
    path = root / SHARES
    with explained("read", path):
        return Shares.from_bytes(path.read_bytes(), path) if path.exists() else None
