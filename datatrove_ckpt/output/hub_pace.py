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
    """Returns a title that tells other ranks whose commit it is. ``files``: "3 files"."""
    return f"Add {files}: rank {rank}, chunks {chunks}"


class MadeCommit(NamedTuple):
    """``at``: Unix seconds, by the hub's clock."""

    oid: str
    at: float
    title: str


class CommitHistory(NamedTuple):
    """What the hub shows of a branch.

    Attributes:
        now: the hub's clock, in Unix seconds.
        made: its commits of the last hour, and the newest one however old it is. Newest first.
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
    """When a rank commits.

    Args:
        seconds: how long uploaded files wait for more files of their rank.
        per_hour: everybody's commits to the repository in any hour, beyond which every rank waits.
    """

    seconds: float = 300.0
    per_hour: int = 112

    def seconds_of_next(self) -> float:
        """The wait for the next commit, varied so that ranks do not commit together."""
        return self.seconds * random.uniform(0.5, 1)

    def seconds_until_turn(self, history: CommitHistory, ends: bool = False) -> float:
        """Returns the seconds until the rank should look again; 0: it may commit now.

        ``ends``: the rank has nothing else left to do.

        Each commit that becomes older than an hour makes room for one commit. If n ranks have
        committed, each waits for one of the next n such moments, drawn by chance.
        """
        made = history.of_last_hour[::-1]
        most = self.per_hour
        if not ends:
            most = math.ceil(self.per_hour / 2)
        over = len(made) - most
        if over < 0:
            return 0.0
        competing = {"".join(_RANK.findall(commit.title)) for commit in made}
        turn = min(over + random.randrange(len(competing)), len(made) - 1)
        # The hub's dates may be rounded down.
        return made[turn].at + HOUR - history.now + random.uniform(0, 2)
