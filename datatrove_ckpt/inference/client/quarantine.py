"""Requests that may have killed servers.

A request that was in flight at two deaths of a server runs apart from all others, on a server that
first finishes its other requests. The youngest at its first death goes first: a poisonous request
mostly kills soon. A death of one request alone is attributed to it, with its earlier deaths, and
the other requests leave the quarantine.

Quarantined requests run in groups: first one request, then each answer makes room for one more, up
to the square root of their peak number. If the server dies of a group, its members run alone.
Running only single requests would leave the server nearly idle for hours; halving groups would need
more deaths than ``server_max_restarts`` allows.
"""

from __future__ import annotations

import heapq
import math

from datatrove_ckpt.inference.client.attempts import Place, Request


class Quarantine:
    """The requests in quarantine."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.arrivals = 0
        self._waiting: list[tuple[float, int, Request, Place]] = []
        self._group_limit = 1
        self._peak = 0
        self._runs_alone = False

    def has_waiting(self) -> bool:
        while self._waiting:
            _, _, request, future = self._waiting[0]
            if not future.done() and not request.may_not_be_sent:
                return True
            heapq.heappop(self._waiting)
        return False

    def has_room(self) -> bool:
        if not self.has_waiting():
            return False
        if (self.in_flight and self._runs_alone) or self._waiting[0][2].must_run_alone:
            return self.in_flight == 0
        return self.in_flight < min(self._group_limit, math.isqrt(self._peak))

    def restart(self) -> None:
        """Begins with a group of one, on another server."""
        self.in_flight = 0
        self._group_limit = 1
        self._peak = len(self._waiting)

    def add(self, request: Request, future: Place) -> None:
        self.arrivals += 1
        heapq.heappush(self._waiting, (request.age, self.arrivals, request, future))
        self._peak = max(self._peak, self.in_flight + len(self._waiting))

    def start_next(self) -> tuple[Request, Place]:
        """Starts the next request. Call only if ``has_room``."""
        _, _, request, future = heapq.heappop(self._waiting)
        self.in_flight += 1
        self._runs_alone = request.must_run_alone
        return request, future

    def finish_one(self) -> None:
        self.in_flight -= 1
        self._group_limit += 1

    def all(self) -> list[tuple[Request, Place]]:
        return [(request, place) for _, _, request, place in self._waiting]

    def clear(self) -> None:
        self._waiting = []
