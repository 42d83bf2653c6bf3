"""Counts the attempts of a rank, and decides when it is given up and beside which ranks it runs.

The worker processes of a run and the processes that share claims use this policy:

- A failure is an attempt. So is the death of a process with this rank alone.
- The death of a process with several ranks is an attempt of none: any may be the cause. Each of
  them then runs alone, after all others.
- An attempt with progress counts as the first attempt.
- After too many attempts in a row the rank is given up, with its last cause.
"""

from typing import NamedTuple

AttemptProgress = tuple[int, int, int]
"""Bytes of a rank's commits, journals and saved answers, compared in this order: a commit removes
journals and answers.
"""


class AttemptRecord(NamedTuple):
    """The failed attempts of a rank.

    Attributes:
        tries: attempts in a row that ended by a failure or a death, all but the first without
            progress.
    """

    tries: int = 0
    reached: AttemptProgress = (0, 0, 0)
    why: str = ""
    alone: bool = False

    def ended(
        self, cause: str, max_tries: int, reached: AttemptProgress = (0, 0, 0)
    ) -> "AttemptRecord":
        tries = self.tries + 1
        if reached > self.reached:
            tries = 1
        is_given_up = tries >= max_tries
        return AttemptRecord(tries, reached, cause if is_given_up else "", self.alone)


def may_overlap(ranks: list[AttemptRecord], free: int, siblings: int) -> bool:
    """Whether a process with ``ranks`` may take another rank.

    Args:
        free: the number of ranks that it could take.
        siblings: the number of processes without a rank. Each gets one of the free ranks first.
    """
    return free > siblings and not any(rank.alone for rank in ranks)
