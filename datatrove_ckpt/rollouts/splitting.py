"""Splits a text where it hurts least, and joins answers that repeat each other."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Protocol

# Where a text may be split, best first: after a blank line, after a sentence, after a word.
_BOUNDARIES = (
    re.compile(r"\n[ \t]*\n\s*"),
    re.compile(r"[.!?…][\"'”’)\]]*\s+|[。！？]"),  # noqa: RUF001 (ends of Chinese and Japanese sentences)
    re.compile(r"\s+"),
)
_SHORTEST_REPEAT = 16
"""Characters. Shorter ends of one answer may begin the next one by chance."""
_LONGEST_REPEAT = 4000
"""Characters that are compared: two milliseconds."""


class Ruler(Protocol):
    """Measures stretches of one text."""

    def size(self, start: int, end: int) -> int: ...

    def end(self, start: int, limit: int) -> int:
        """The end of the longest stretch from ``start`` that has at most this size; at least one character."""
        ...


class Chars:
    """In characters."""

    def size(self, start: int, end: int) -> int:
        return end - start

    def end(self, start: int, limit: int) -> int:
        return start + limit


class Tokens:
    """In tokens, of which it is known where each begins."""

    def __init__(self, starts: Sequence[int], length: int) -> None:
        self._starts = starts
        self._length = length

    def size(self, start: int, end: int) -> int:
        return bisect_left(self._starts, end) - bisect_left(self._starts, start)

    def end(self, start: int, limit: int) -> int:
        last = bisect_left(self._starts, start) + limit
        return max(self._starts[last] if last < len(self._starts) else self._length, start + 1)


def split_text(text: str, limit: int) -> list[str]:
    """The text in parts of at most ``limit`` characters. At least one part, which may be empty."""
    return split(text, limit, Chars())


def split(text: str, limit: int, ruler: Ruler, overlap: int = 0) -> list[str]:
    """The text in parts of at most this size. At least one part, which may be empty.

    Args:
        overlap: characters of the end of a part with which the next one begins again; they add to its size. Fewer, so
            that it begins at a sentence or a word.
    """
    parts: list[tuple[int, int]] = []
    for start, end in _pieces(text, 0, len(text), limit, ruler, _BOUNDARIES):
        if parts and ruler.size(parts[-1][0], _trimmed(text, parts[-1][0], end)) <= limit:
            parts[-1] = (parts[-1][0], end)
        else:
            parts.append((start, end))
    shown = [(start, end) for start, end in parts if text[start:end].strip()]
    if not shown:
        return [text[: ruler.end(0, limit)]]
    first = shown[0][0]
    return [text[_earlier(text, start, overlap, first) : end].strip() for start, end in shown]


def stitch(answers: Sequence[str], separator: str, parts: Sequence[str], overlap: int) -> str:
    """The answers, joined. Where one begins with the end of the one before it, that is written once.

    Only about as much as the parts repeat is taken for a repetition, because a text may repeat itself.

    Args:
        parts: what the answers are to.
        overlap: characters that a part repeats at most.
    """
    joined = answers[0] if answers else ""
    for index, answer in enumerate(answers[1:], 1):
        part = parts[index]
        shared = max(_repeated(parts[index - 1], part, overlap), default=0)
        expected = shared * len(answer) / max(1, len(part))  # a translation may be longer
        found = [size for size in _repeated(joined, answer, int(1.5 * expected)) if size >= _SHORTEST_REPEAT]
        repeated = min(found, key=lambda size: abs(size - expected), default=0)
        joined += answer[repeated:] if repeated else separator + answer
    return joined


def _pieces(
    text: str, start: int, end: int, limit: int, ruler: Ruler, boundaries: tuple[re.Pattern[str], ...]
) -> Iterator[tuple[int, int]]:
    if ruler.size(start, _trimmed(text, start, end)) <= limit:
        yield start, end
    elif not boundaries:
        while start < end:
            cut = min(end, ruler.end(start, limit))
            yield start, cut
            start = cut
    else:
        stretch = text[start:end]
        for cut in [*(start + match.end() for match in boundaries[0].finditer(stretch)), end]:
            yield from _pieces(text, start, cut, limit, ruler, boundaries[1:])
            start = cut


def _trimmed(text: str, start: int, end: int) -> int:
    """The end without white space. Looks at little of a long text."""
    while end > start and text[end - 1].isspace():
        end -= 1
    return end


def _earlier(text: str, start: int, overlap: int, first: int) -> int:
    """Where a part begins if it repeats so many characters of what stands before it."""
    begin = max(first, start - overlap)
    if begin in (first, start):
        return begin
    for boundary in _BOUNDARIES[1:]:
        if (match := boundary.search(text, begin - 1, start)) and match.end() < start:
            return match.end()
    return begin


def _repeated(before: str, after: str, most: int) -> list[int]:
    """How many characters at the beginning of a text are also at the end of the one before it: each number that fits.

    The failure function of Knuth, Morris and Pratt: its time grows with the length, not with its square.
    """
    size = min(len(before), len(after), most, _LONGEST_REPEAT)
    both = [*after[:size], None, *before[len(before) - size :]]
    borders = [0] * len(both)
    for index in range(1, len(both)):
        border = borders[index - 1]
        while border and both[index] != both[border]:
            border = borders[border - 1]
        borders[index] = border + (both[index] == both[border])
    found = [borders[-1]] if size else []
    while found and found[-1]:
        found.append(borders[found[-1] - 1])
    return [number for number in found if number]
