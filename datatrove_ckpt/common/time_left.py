"""Estimates how long work still takes."""

from collections.abc import Iterable


def time_left(rest: float, pace: float, quiet: float, parts: Iterable[float] = ()) -> float | None:
    """Returns the seconds that the rest takes at this pace, at least the slowest part's.

    Args:
        rest: the amount of work that remains.
        pace: amount of work per second.
        quiet: seconds since something was finished. None is returned if they are longer.
        parts: the seconds of each part that is known.
    """
    if pace <= 0:
        return None
    left = max([rest / pace, *parts])
    # A longer time is chance.
    if quiet <= left < 1e9:
        return left
    return None
