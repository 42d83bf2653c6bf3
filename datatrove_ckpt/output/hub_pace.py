"""Limits how often the ranks of a job together commit to one repository of the hub.

The hub allows a free account 128 commits per hour and repository, and then refuses commits for up
to an hour. So each rank counts the last hour's commits in the repository's history, and waits once
there are ``per_hour``. A commit succeeds only if no other commit followed the count, so the ranks
together keep the limit.

A rank with more documents waits at half of the number without loss: the other half is for ranks at
their end, which block GPUs.
"""

import math
import random
import re
from dataclasses import dataclass
from typing import NamedTuple

HOUR = 3600.0

_RANK = re.compile(r": rank (\d+), chunks? ")


def commit_title(files: str, rank: int, chunks: str) -> str:
    """Returns the title of a commit, which shows its rank to others; ``files`` is "3 files"."""
    return f"Add {files}: rank {rank}, chunks {chunks}"


class MadeCommit(NamedTuple):
    """A commit on the hub, made ``at`` this time of the hub's clock, in Unix seconds."""

    oid: str
    at: float
    title: str


class CommitHistory(NamedTuple):
    """The newest commits of a branch on the hub.

    Attributes:
        now: the hub's clock, in Unix seconds.
        made: commits of the last hour, and at least the newest commit, from the newest to the
            oldest.
    """

    now: float = 0.0
    made: tuple[MadeCommit, ...] = ()

    @property
    def head(self) -> str | None:
        if not self.made:
            return None
        return self.made[0].oid

    @property
    def of_last_hour(self) -> list[MadeCommit]:
        return [commit for commit in self.made if self.now - commit.at < HOUR]


@dataclass(frozen=True)
class CommitPace:
    """Decides when a rank commits.

    Args:
        seconds: time that uploaded files wait for more files of their rank.
        per_hour: number of commits of all users to the repository in an hour after which every rank
            waits.
    """

    seconds: float = 300.0
    per_hour: int = 112

    def seconds_of_next(self) -> float:
        """Returns the wait for the next commit, varied so that ranks do not commit together."""
        return self.seconds * random.uniform(0.5, 1)

    def seconds_until_turn(self, history: CommitHistory, ends: bool = False) -> float:
        """Returns the seconds after which the rank should check again; 0 if it may commit now.

        Each commit that becomes older than an hour permits another commit. If n ranks have
        committed, each waits for a random moment among the next n such moments.

        Args:
            ends: whether the rank has nothing else to do.
        """
        made = history.of_last_hour[::-1]
        max_commits = self.per_hour
        if not ends:
            max_commits = math.ceil(self.per_hour / 2)
        over = len(made) - max_commits
        if over < 0:
            return 0.0
        competing = {"".join(_RANK.findall(commit.title)) for commit in made}
        turn = min(over + random.randrange(len(competing)), len(made) - 1)
        # The hub's dates may be rounded down.
        return made[turn].at + HOUR - history.now + random.uniform(0, 2)
