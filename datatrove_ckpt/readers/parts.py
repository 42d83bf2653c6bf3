"""A reader's input when ``reshard`` has dealt it out: the parts of its rank's share (see ``shares.py``) as files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from datatrove_ckpt.checkpoint.shares import Part, Place
from datatrove_ckpt.errors import CheckpointMismatch
from datatrove_ckpt.readers.extent import FileExtent
from datatrove_ckpt.readers.inputs import Inputs
from datatrove_ckpt.readers.positions import PLAIN_INTEGER, FilePosition
from datatrove_ckpt.readers.rows import ALL_ROWS, FileRead


class PartInputs(Inputs):
    """The files of a share, in order. A file may come several times.

    Args:
        grows: whether a part knows the size that counts: its file may have grown since, in another rank's part.
    """

    def __init__(self, inputs: Inputs, parts: Sequence[Part], grows: Sequence[bool]) -> None:
        super().__init__(inputs.folder, [part.name for part in parts])
        self.parts = parts
        self._grows = grows

    def size(self, index: int) -> int:
        part = self.parts[index]
        if part.end is not None and part.size is not None and self._grows[index]:
            return part.size
        return super().size(index)

    def size_for_people(self, index: int) -> int:
        part = self.parts[index]
        return super().size_for_people(index) if part.is_whole else part.bytes

    def bytes_before(self, index: int, read: int) -> int:
        return sum(self.size_for_people(number) for number in range(index))


def part_of(inputs: Inputs, index: int) -> Part:
    """The part of the file of this index that is read."""
    return inputs.parts[index] if isinstance(inputs, PartInputs) else Part(inputs.names[index])


def until_end(rows: FileRead, part: Part, at: FilePosition) -> FileRead:
    """The rows of a part's file after ``at``, which is in the part, up to the end of the part.

    Raises:
        CheckpointMismatch: the file has no row that ends where the part does, so it has changed.
    """
    if part.end is None:
        return (yield from rows)
    if at == part.end:
        return None
    for document, after in rows:
        here = tuple(number & PLAIN_INTEGER for number in after)
        if here > part.end:
            break
        yield document, after
        if here == part.end:
            return None
    raise CheckpointMismatch(
        f"The input file {part.name!r} has changed: it was divided at {list(part.end)} when the run was dealt out to "
        "other tasks, and no document ends there now. Restore the file, or start another run for the new input."
    )


def between(parts: Sequence[Part], start: Place, end: Place) -> list[Part]:
    """What lies after ``start``, up to and including ``end``."""
    found = []
    for index in range(start.part, min(end.part + 1, len(parts))):
        part = parts[index]
        if index == end.part and not end.at:  # nothing of it, wherever it begins
            break
        if index == start.part and start.at:
            part = replace_ends(part, begin=start.at)
        if index == end.part:
            part = replace_ends(part, end=end.at)
        if part.end is None or part.begin != part.end:
            found.append(part)
    return found


def after(parts: Sequence[Part], start: Place) -> list[Part]:
    """What lies after ``start``."""
    found = list(parts[start.part :])
    if found and start.at:
        found[0] = replace_ends(found[0], begin=start.at)
    return [part for part in found if part.end is None or part.begin != part.end]


def replace_ends(part: Part, **ends: FilePosition) -> Part:
    return part._replace(**ends)  # type: ignore[arg-type]


def joined(parts: Sequence[Part]) -> list[Part]:
    """The same, with parts that follow each other in a file made one."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if last is not None and last.name == part.name and last.end is not None and last.end == part.begin:
            found[-1] = last._replace(end=part.end, bytes=last.bytes + part.bytes)
        else:
            found.append(part)
    return found


def divide(reader: Any, inputs: Inputs, index: int, part: Part, ends: Sequence[int]) -> list[Part]:
    """Divides a part of a file after about so many bytes of it each.

    Reads it up to the last of these places. The pieces are fewer if there is no document between two places.

    Args:
        reader: a ``SeekingReader``.
        inputs: the files of the input, of which the part's is the one at ``index``.
        ends: in ascending order.
    """
    if hasattr(reader, "without_documents"):
        reader = reader.without_documents()
    reader._file_extent = extent = FileExtent(size=inputs.size(index))
    pieces: list[Part] = []
    begin, before, wanted = part.begin, 0, list(ends)
    rows = until_end(reader._read_input(inputs, index, part.begin, ALL_ROWS, (0, 0)), part, part.begin)
    for _, place in rows:
        if not wanted:
            break
        read = int(extent.inside(place) - extent.inside(part.begin))
        if read >= wanted[0]:
            here = tuple(number & PLAIN_INTEGER for number in place)
            pieces.append(part._replace(begin=begin, end=here, bytes=read - before))
            begin, before = here, read
            wanted = [end for end in wanted if end > read]
    rows.close()
    return [*pieces, part._replace(begin=begin, bytes=max(0, part.bytes - before))]
