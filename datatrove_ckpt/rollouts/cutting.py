"""Cuts a text after a line, so that the message it is filled into fits."""

from collections.abc import Callable

from datatrove_ckpt.rollouts.model_files import TokenCounter


def cut_to_chars(fill: Callable[[str], str], text: str, times: int, limit: int) -> str:
    """Returns the text, cut so that ``fill(text)`` has at most ``limit`` characters.

    Args:
        times: how often the text is in the template.
    """
    if len(fill(text)) <= limit:
        return text
    return _whole_lines(text, max(0, limit - len(fill(""))) // max(times, 1))


def fits_for_sure(content: str, limit: int) -> bool:
    """Whether the content is too short to need a count: a token has at least one byte."""
    return len(content) <= limit and (
        content.isascii() or len(content.encode("utf-8", "replace")) <= limit
    )


def cut_to_tokens(
    fill: Callable[[str], str], text: str, times: int, limit: int, counter: TokenCounter
) -> str:
    """Returns the text, cut so that ``fill(text)`` has at most ``limit`` tokens."""
    if not times or fits_for_sure(fill(text), limit):
        return text
    room = max(0, limit - counter.count(fill(""))) // times
    end = _end_of(text, room, counter)
    cut = text
    if end < len(text):
        cut = _whole_lines(text, end)
    # Tokens of template and text do not add up exactly.
    while cut:
        excess = counter.count(fill(cut)) - limit
        if excess <= 0:
            return cut
        starts = counter.starts(cut)
        if not starts:
            return ""
        cut = _whole_lines(cut, starts[max(0, len(starts) - -(-excess // times))])
    return cut


def _end_of(text: str, room: int, counter: TokenCounter) -> int:
    size = 8 * (room + 8)  # few tokens are longer
    while True:
        starts = counter.starts(text[:size])
        if len(starts) > room:
            return starts[room]
        if size >= len(text):
            return len(text)
        size *= 4


def _whole_lines(text: str, end: int) -> str:
    line = text.rfind("\n", 0, end + 1)
    if line > 0:
        return text[:line]
    return text[:end]
