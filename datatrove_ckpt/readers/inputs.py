"""Whether an input is still the one a position was made for.

A state has room for neither ten thousand names nor their sizes. It keeps, of the files that were read to their end, a
``Digest``: their number and total size, one hash over all, short ones over at most 32 groups of neighbours, and the XOR
of their names. The first tells *that* something differs, the others *what*: the group where the first difference is,
and there each single change is tried out until the hash fits: one file new, gone, renamed or resized. The XOR gives
back the name of a file that is not there any more.

Of the current file it keeps name, size and a hash of its first (and last) 64 kB. Contents of files that were read to
their end are not read again: on resume that would cost what seeking saves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from datatrove.io import DataFolder
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from datatrove_ckpt.errors import CheckpointMismatch

_GROUPS = 32
_NAME_BYTES = 64
_SAMPLE = 2**16

REMEDY = "Restore it, or start anew (another checkpoints_local_dir, no state)."


class Inputs:
    """The files a reader reads, in order. Sizes are asked for one by one: a fresh start needs few of them."""

    def __init__(self, folder: DataFolder, names: Sequence[str]) -> None:
        self.folder = folder
        self.names = names
        self._sizes: dict[int, int] = {}

    def size(self, index: int) -> int:
        if index not in self._sizes:
            self._sizes[index] = int(self.folder.info(self.names[index])["size"] or 0)
        return self._sizes[index]

    def digest(self, count: int) -> Digest:
        """Of the first ``count`` files."""
        digest = Digest()
        for index in range(count):
            digest.add(self.names[index], self.size_as_before(index))
        return digest

    def size_as_before(self, index: int) -> int:
        """Of a file that was there before."""
        try:
            return self.size(index)
        except FileNotFoundError as error:
            raise CheckpointMismatch(f"The input file {self.names[index]!r} is gone. {REMEDY}") from error

    def resume(self, state: dict[str, Any]) -> Digest:
        """The digest of the files before the current one, once they are known to be the same.

        Raises:
            CheckpointMismatch: a file before the current one, or the current one itself, is not there as it was.
        """
        before, current = state["before"], state["file"]["name"]
        count = before["files"]
        if count < len(self.names) and short(self.names[count]) == current:
            digest = self.digest(count)
            if digest.state() == before:
                return digest
        raise CheckpointMismatch(f"The input has changed: {''.join(_changes(self, before, current))}. {REMEDY}")


class Digest:
    """Of the files that were read to their end. Grows by one file at a time, at the same cost each."""

    def __init__(self) -> None:
        self.files = 0
        self.bytes = 0
        self.all = 0
        self.names = 0
        self.per_group = 1
        self.groups: list[int] = []

    def add(self, name: str, size: int) -> None:
        if self.files == _GROUPS * self.per_group:
            self.per_group *= 2
            self.groups = [left ^ right for left, right in zip(self.groups[::2], self.groups[1::2], strict=True)]
        if self.files % self.per_group == 0:
            self.groups.append(0)
        entry = _entry(self.files, name, size)
        self.groups[-1] ^= _group_part(entry)
        self.all ^= entry
        self.names ^= _name_number(name)
        self.bytes += size
        self.files += 1

    def state(self) -> dict[str, Any]:
        return {
            "files": self.files,
            "bytes": self.bytes,
            "all": f"{self.all:016x}",
            "names": f"{self.names:x}",
            "groups": "".join(f"{group:08x}" for group in self.groups),
        }

    def __str__(self) -> str:
        return f"{self.files}:{self.all:016x}"


def fingerprint(folder: DataFolder, name: str, size: int, whole: bool) -> str:
    """Of a file's first 64 kB, and with ``whole`` of its last.

    The last bytes of a gzip file hold a checksum of all it contains, those of a Parquet file its table of contents.
    """
    sample = folder.cat_file(name, start=0, end=min(size, _SAMPLE)) if size else b""
    if whole and size > _SAMPLE:
        sample += folder.cat_file(name, start=max(_SAMPLE, size - _SAMPLE), end=size)
    return str(xxh3_64_hexdigest(sample))


def short(name: str) -> str:
    """The name, or if it is very long its end and a hash."""
    encoded = name.encode()
    if len(encoded) <= 200:
        return name
    return f"{xxh3_64_hexdigest(encoded)}...{encoded[-160:].decode(errors='ignore')}"


def _entry(index: int, name: str, size: int) -> int:
    # With its index, so that the order counts although XOR has none.
    return int(xxh3_64_intdigest(f"{index}/{size}/{name}".encode()))


def _group_part(entry: int) -> int:
    return entry & 0xFFFFFFFF


def _name_number(name: str) -> int:
    return int.from_bytes(name.encode()[-_NAME_BYTES:], "big")


def _number_name(number: int) -> str:
    return number.to_bytes(_NAME_BYTES, "big").lstrip(b"\0").decode(errors="replace")


# What has changed, for people ------------------------------------------------------------------------------------


def _changes(inputs: Inputs, before: dict[str, Any], current: str) -> Iterator[str]:
    """One sentence, perhaps followed by what is known beyond it."""
    place = _place(inputs, current, before["files"])
    if place is None:
        yield f"the file {current!r}, where the position stands, is gone or has another name"
        return
    groups = [int(before["groups"][at : at + 8], 16) for at in range(0, len(before["groups"]), 8)]
    per_group = 1
    while before["files"] > per_group * _GROUPS:
        per_group *= 2
    entries = [(name, inputs.size_as_before(index)) for index, name in enumerate(inputs.names[:place])]
    group = _first_difference(entries, groups, per_group)
    low = group * per_group
    for change, old in _single_changes(entries, low, per_group, before):
        likely = group == len(groups) or _group(old, low, per_group) == groups[group]  # spares _all() most of the time
        if likely and _all(old) == before["all"]:
            yield change
            return
    first = repr(entries[low][0]) if low < len(entries) else "the end"
    yield f"the {before['files']} files that were read before {current!r} are not the {place} that are there now; "
    yield f"the first difference is {'at' if per_group == 1 else f'among the {per_group} files from'} {first}"
    yield "" if per_group == 1 else " on"


def _place(inputs: Inputs, current: str, expected: int) -> int | None:
    if expected < len(inputs.names) and short(inputs.names[expected]) == current:
        return expected
    return next((index for index, name in enumerate(inputs.names) if short(name) == current), None)


def _first_difference(entries: list[tuple[str, int]], groups: list[int], per_group: int) -> int:
    for number, group in enumerate(groups):
        if _group(entries, number * per_group, per_group) != group:
            return number
    return len(groups)


def _single_changes(
    entries: list[tuple[str, int]], low: int, per_group: int, before: dict[str, Any]
) -> Iterator[tuple[str, list[tuple[str, int]]]]:
    """Each change of one file that might explain the difference, and the files as they would have been before it."""
    size_then = before["bytes"] - sum(size for _, size in entries)
    names_then = int(before["names"], 16)
    for name, _ in entries:
        names_then ^= _name_number(name)
    for at in range(low, min(low + per_group, len(entries)) + 1):
        head, tail = entries[:at], entries[at:]
        if len(entries) == before["files"] - 1:
            gone = (_number_name(names_then), size_then)
            yield f"the file {gone[0]!r}, which was read before, is gone", [*head, gone, *tail]
        elif not tail:
            return
        elif len(entries) == before["files"] + 1:
            yield f"the file {tail[0][0]!r} is new, and stands before the position", head + tail[1:]
        elif names_then == 0:
            name, size = tail[0]
            yield (
                f"the file {name!r} had {size + size_then} bytes, and has {size}",
                [
                    *head,
                    (name, size + size_then),
                    *tail[1:],
                ],
            )
        else:
            name, size = tail[0]
            old = (_number_name(names_then ^ _name_number(name)), size + size_then)
            yield f"the file {old[0]!r} is now {name!r}", [*head, old, *tail[1:]]


def _group(entries: list[tuple[str, int]], low: int, per_group: int) -> int:
    result = 0
    for index, (name, size) in enumerate(entries[low : low + per_group], start=low):
        result ^= _group_part(_entry(index, name, size))
    return result


def _all(entries: list[tuple[str, int]]) -> str:
    result = 0
    for index, (name, size) in enumerate(entries):
        result ^= _entry(index, name, size)
    return f"{result:016x}"
