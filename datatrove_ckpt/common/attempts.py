"""How often a rank is tried, and beside which others: one policy for the worker processes of a run,
and for processes that share claims.

    a failure             is an attempt, and so is a death while the rank was alone
    a death with several  is an attempt of none of them: any of them may be the cause. Each is tried
    ranks                 alone then, after all others
    progress              makes an attempt the first one again
    too many attempts     in a row: the rank is given up, and its last cause is kept
"""

from typing import NamedTuple

Progress = tuple[int, int, int]
"""Bytes of a rank's commits, journals and saved answers.

Earlier ones count more: a commit drops the others.
"""


class Record(NamedTuple):
    """Attributes:
    tries: attempts in a row that ended by a failure or a death, all but the first without
        progress.
    reached: the rank's progress at the end of the last of them.
    why: the cause, if the rank is given up.
    alone: its process has no other rank, so its death counts as an attempt.
    """

    tries: int = 0
    reached: Progress = (0, 0, 0)
    why: str = ""
    alone: bool = False

    def ended(self, why: str, most: int, reached: Progress = (0, 0, 0)) -> "Record":
        """Counts an attempt. The rank is given up after ``most`` of them in a row."""
        tries = self.tries + 1
        if reached > self.reached:
            tries = 1
        if tries < most:
            why = ""
        return Record(tries, reached, why, self.alone)


def may_overlap(ranks: list[Record], free: int, siblings: int) -> bool:
    """Whether a process takes one of ``free`` ranks beside others.

    Each of its ``siblings`` without a rank gets one first.
    """
    return free > siblings and not any(rank.alone for rank in ranks)
