"""What a rank reads of an input that ``reshard`` has dealt out: parts of files, instead of every n-th file.

A share is a rank's whole input, from its first document on. A part that follows may be read by another rank after the
next ``reshard``, but what the rank has read stays the beginning of its share. So a position that was saved before is a
position after it, too, and a chunk that is made again finds its documents.

``shares.json`` holds the shares of all ranks, and a hash over the names of all files: a file that is added later is in
no share, so it is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from xxhash import xxh3_128_hexdigest

from datatrove_ckpt.errors import CheckpointCorrupt, CheckpointMismatch

VERSION = 1

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

    def to_json(self) -> dict[str, Any]:
        ranks = {str(rank): [part.to_json() for part in parts] for rank, parts in self.ranks.items()}
        return {"version": VERSION, "round": self.round, "tasks": self.tasks, "input": self.input, "ranks": ranks}

    @classmethod
    def from_json(cls, content: Any, path: object) -> Shares:
        """
        Raises:
            CheckpointCorrupt: it holds no shares. The message names ``path``.
        """
        try:
            if content["version"] != VERSION:
                raise ValueError(f"version {content['version']}")
            ranks = {int(rank): [Part.from_json(part) for part in parts] for rank, parts in content["ranks"].items()}
            return cls(int(content["round"]), int(content["tasks"]), str(content["input"]), ranks)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointCorrupt(
                f"{path} cannot be read ({error!r}), so nobody knows what each task reads. Restore it from a copy."
            ) from error
