"""What datatrove's own runner left of each rank in its ``checkpoints_local_dir``. Changes nothing.

    last_chunk/00000.txt      the chunk up to which all are finished. Written in place, so a kill may leave it empty
    00000/chunk_00007.jsonl   the finished documents of an unfinished chunk, each with its results
    00000/replay.sqlite3      answers of documents that are not finished; not used: nothing proves which model gave them

A rank without an unfinished chunk has the first file only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from datatrove_ckpt.checkpoint.layout import (
    FROM_DATATROVE,
    RUN,
    is_datatroves,
    is_rank,
    journal_indices,
    journal_path,
    last_chunk_file,
    rank_folder,
)
from datatrove_ckpt.errors import ConfigError

Stamp: TypeAlias = list[tuple[str, int, int]]


@dataclass(frozen=True)
class TheirRank:
    """A rank of datatrove's run. Neither of the two need exist.

    Attributes:
        folder: with its chunk files and answers.
        last_chunk: the file that names the last finished chunk.
    """

    rank: int
    folder: Path
    last_chunk: Path

    def last(self) -> int:
        """The chunk up to which datatrove calls all finished; -1: none, or the file is damaged."""
        try:
            text = self.last_chunk.read_bytes()
        except OSError:
            return -1
        return int(text) if text.strip().isdigit() and len(text) < 20 else -1

    def chunk_files(self) -> dict[int, Path]:
        """The files of unfinished chunks, by chunk index."""
        if not self.folder.is_dir():
            return {}
        return {index: journal_path(self.folder, index) for index in journal_indices(self.folder)}

    def stamp(self) -> Stamp:
        """Names, sizes and times of its files: others if the run is still on."""
        paths = [self.last_chunk, *(sorted(self.folder.iterdir()) if self.folder.is_dir() else ())]
        found = [(path, path.stat()) for path in paths if path.exists()]
        return [(path.name, status.st_size, status.st_mtime_ns) for path, status in found]


def find_ranks(folder: Path, root: Path) -> dict[int, TheirRank]:
    """The ranks of datatrove's run, in ascending order.

    Args:
        folder: datatrove's ``checkpoints_local_dir``.
        root: ours, which may be the same folder. Then what an earlier ``migrate`` has moved aside belongs to it.

    Raises:
        ConfigError: there is no such folder, or nothing of datatrove's runner in it.
    """
    if not folder.is_dir():
        raise ConfigError(f"--from: {str(folder)!r} is not a folder.")
    bases = [root / FROM_DATATROVE, folder] if is_in_place(folder, root) else [folder]
    found: dict[int, TheirRank] = {}
    for rank in sorted({rank for base in bases for rank in _ranks(base)}):
        folders = [rank_folder(base, rank) for base in bases]
        lasts = [last_chunk_file(base, rank) for base in bases]
        found[rank] = TheirRank(
            rank,
            next((one for one in folders if _is_theirs(one)), folders[-1] / "none"),
            next((one for one in lasts if is_datatroves(one)), lasts[0].with_name("none")),
        )
    if not found:
        raise ConfigError(
            f"--from: {str(folder)!r} holds no checkpoint of datatrove's own InferenceRunner (last_chunk/00000.txt, "
            "00000/chunk_00000.jsonl). Name the folder that was its checkpoints_local_dir."
        )
    return found


def is_in_place(folder: Path, root: Path) -> bool:
    """Whether datatrove's folder becomes ours."""
    return folder.resolve() == root.resolve()


def _ranks(base: Path) -> Iterator[int]:
    if not base.is_dir():
        return
    for path in base.iterdir():
        if is_rank(path.name) and _is_theirs(path):
            yield int(path.name)
    for path in (base / "last_chunk").glob("*.txt"):
        if is_rank(path.stem) and is_datatroves(path):
            yield int(path.stem)


def _is_theirs(folder: Path) -> bool:
    return folder.is_dir() and not (folder / RUN).exists() and any(folder.iterdir())
