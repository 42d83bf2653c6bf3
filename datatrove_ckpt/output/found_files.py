"""What lies in an output folder, and what is wrong with a file of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from datatrove_ckpt.checkpoint.commits import OutputFile
from datatrove_ckpt.output.hub import HubFile
from datatrove_ckpt.output.names import plain


@dataclass
class FoundFiles:
    """What lies in an output folder.

    Attributes:
        sizes: in bytes, by path; None: the store tells no size.
        by_rank: the files that the template may have named, each with the folder of its retry ("": of no retry).
        hub_files: what the hub tells of the files; empty elsewhere.
    """

    sizes: dict[str, int | None]
    by_rank: dict[int, list[tuple[str, str]]] = field(default_factory=lambda: defaultdict(list))
    hub_files: dict[str, HubFile] = field(default_factory=dict)

    def show(self, files: Mapping[str, HubFile]) -> None:
        """Adds what a later look at the hub has found."""
        self.hub_files |= files
        self.sizes |= {name: file.size for name, file in files.items()}

    def size(self, file: OutputFile) -> int | None:
        return self.sizes.get(plain(file.path))

    def is_right(self, file: OutputFile) -> bool:
        name = plain(file.path)
        if name in self.hub_files:
            return self.hub_files[name].holds(file.size, file.hub_hash)
        return name in self.sizes and self.sizes[name] in (file.size, None)


def file_problem(file: OutputFile, size: int | None) -> tuple[str, str]:
    """The kind and the description of what is wrong with a file that is not right.

    Args:
        size: its size now, in bytes; None: it does not exist.
    """
    if size is None:
        return "missing", "is missing"
    if size == file.size:
        return "altered", "is altered: the hub lists another hash for it"
    kind = "truncated" if size < file.size else "grown"
    return kind, f"is {kind}: it has {size} bytes instead of {file.size}"


def stray_advice(number: int) -> str:
    """What to do about files of a template that no commit names. ``run`` and ``verify`` say the same."""
    it, its = ("it", "Its") if number == 1 else ("them", "Their")
    return (
        f"{its} documents may be in the output twice. Move {it} out of the output folder, or delete {it} if nothing "
        f"else needs {it}"
    )
