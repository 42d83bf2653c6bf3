"""Estimates how long work still takes."""

from collections.abc import Iterable


def time_left(
    amount: float, pace: float, quiet: float, parts: Iterable[float] = ()
) -> float | None:
    """Returns the seconds that the rest takes at this pace, at least the slowest part's.

    Args:
        amount: the amount of work that remains.
        pace: amount of work per second.
        quiet: seconds since something was finished. None is returned if they are longer.
        parts: the seconds of each part that is known.
    """
    if pace <= 0:
        return None
    seconds = max([amount / pace, *parts])
    # A longer time is chance.
    if quiet <= seconds < 1e9:
        return seconds
    return None
