"""Decides which server takes the next request, and which requests wait.

Requests wait here, not at a server, so an outage uses up no attempts, and a dead server's requests
(``mark_dead``) go to the next server that is up.

    waiting      the oldest document's first, until a server has a place and room in its KV cache.
                 So new documents do not push the prompts of open documents out of the caches. A
                 request whose leading text some servers have in their caches (its homes, see
                 ``prefixes.py``) waits for one of these, and others go ahead, as long as no server
                 stands idle
    quarantined  requests that were in flight at two deaths of a server: see ``quarantine.py``
"""

from __future__ import annotations

import asyncio
import time
from bisect import insort
from collections.abc import Sequence
from operator import attrgetter
from typing import TypeAlias

from datatrove_ckpt.config.inference_config import FIRST_LIMIT
from datatrove_ckpt.errors import ServerDied
from datatrove_ckpt.inference.client.attempts import (
    Attempt,
    Death,
    HealthProbe,
    Place,
    Request,
    Sender,
    Target,
)
from datatrove_ckpt.inference.client.prefixes import Prefixes
from datatrove_ckpt.inference.client.quarantine import Quarantine

# The oldest of the waiting requests may go ahead of each other. So many documents more than places
# are in work, so that there is a choice.
WINDOW = 64
# Load below which a server stands idle, and takes requests whose homes have no place.
_IDLE = 0.75
# A home may have so many times the requests of an idle server, and a few more.
_BUSIER = 2

Waiting: TypeAlias = tuple[int, int, int, Request, Place]
"""A waiting request: the orders of its sender and its document, its arrival, what it waits for."""


class Room:
    """Which servers have a place for a request now.

    Attributes:
        best: the least busy one; None: all are full.
    """

    __slots__ = ("_awaited", "_free", "_idle", "_targets", "best")

    def __init__(self, targets: Sequence[Target]) -> None:
        now = time.monotonic()
        self._targets = targets
        self._free = 0
        self._awaited = 0
        self.best: Target | None = None
        least = 1.0
        cooling = None
        for target in targets:
            if not target.up or target.reserved:
                continue
            load = target.load
            # A server that fails gets one request at a time, when its rest is over.
            if target.cooldown_until > now or (target.in_flight and target.fails):
                if load < 1 and (cooling is None or load < cooling.load):
                    cooling = target
                continue
            self._awaited |= target.bit
            if load < 1:
                self._free |= target.bit
            if load < least:
                least = load
                self.best = target
        self._idle: Target | None = None
        if least < _IDLE:
            self._idle = self.best
            self._awaited = 0
        # Whoever refuses at once would always be the least busy, and get what the others could do.
        if self.best is None and not self._awaited:
            self.best = cooling

    def choose(self, homes: int) -> Target | None:
        """Returns the server that takes a request, or None if the request waits.

        Args:
            homes: the servers that have its leading text. It waits for none that is down, reserved
                or cooling down: these may take no request for hours.
        """
        usable = homes & self._free
        if usable:
            home = min((target for target in self._targets if target.bit & usable), key=_load)
            idle = self._idle
            if idle is None or home.in_flight <= _BUSIER * idle.in_flight + FIRST_LIMIT:
                return home
        elif homes & self._awaited:
            return None
        return self.best


class Router:
    """Gives each attempt a target. ``limit``: requests in flight at all targets together."""

    def __init__(self, limit: int) -> None:
        self.targets: list[Target] = []
        self.senders: list[Sender] = []
        self._limit = limit
        self.in_flight = 0
        self._waiting: list[Waiting] = []  # in order: the first ones are the window
        self._arrivals = 0
        self._prefixes = Prefixes()
        self._quarantine = Quarantine()
        self._failure: str | None = None

    def add(self, probe: HealthProbe | None = None) -> Target:
        """Adds a server, which is not up yet."""
        target = Target(1 << len(self.targets), probe)
        self.targets.append(target)
        return target

    @property
    def waiting(self) -> int:
        return len(self._all_waiting())

    def waiting_of(self, sender: Sender) -> int:
        return sum(request.sender is sender for request, _ in self._all_waiting())

    def oldest_of(self, sender: Sender) -> Attempt | None:
        own = []
        for target in self.targets:
            attempts = list(target.attempts)  # a copy, because other threads ask, too
            own += [attempt for attempt in attempts if attempt.request.sender is sender]
        return min(own, key=lambda attempt: attempt.started_at, default=None)

    @property
    def capacity(self) -> int:
        return int(min(self._limit, sum(target.limit for target in self.targets if target.up)))

    def take(self, request: Request) -> Target | None:
        """Returns a target for one attempt, if one is free. Pass it to ``release`` afterwards.

        Raises:
            ServerDied: no server will be up again.
        """
        if self._failure is not None:
            raise ServerDied(self._failure)
        if request.texts is None:
            request.texts = ()
            if len(self.targets) > 1:
                request.texts, request.known = self._prefixes.find(request.body)
        if request.may_not_be_sent or (request.deaths and request.is_quarantined):
            return None
        later = self._waiting[WINDOW - 1 : WINDOW]
        if later and (request.sender.order, request.order) > later[0][:2]:
            return None
        target = self._room().choose(self._prefixes.homes(request.known))
        if target is not None:
            self._assign(target, request)
        return target

    async def acquire(self, request: Request) -> Target:
        target = self.take(request)
        if target is not None:
            return target
        future: Place = asyncio.get_running_loop().create_future()
        self._prefixes.add(request.texts or (), 0)
        self._enqueue(request, future)
        if len(self._waiting) >= WINDOW:  # requests that are cancelled may fill the window
            self.admit()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self.release(future.result(), request)
            raise

    def release(self, target: Target, request: Request) -> None:
        was_held = target.reserved or self.in_flight >= self._limit
        stage = _stage(target.load)
        target.add_in_flight(-1)
        self.in_flight -= 1
        request.sender.in_flight -= 1
        if target.reserved and self._quarantine.in_flight:
            self._quarantine.finish_one()
        # No request that waits could be sent before. Only these changes may let one go.
        if was_held or stage != _stage(target.load) or not self._waiting:
            self.admit()
        if request.sender.on_release is not None:
            request.sender.on_release()

    def admit(self, resized: bool = False) -> None:
        """Gives servers to waiting requests. ``resized``: servers have other limits than before."""
        if resized:
            for target in self.targets:
                target.add_in_flight(0)
        if self._quarantine.arrivals:
            self._admit_quarantined()
        waiting = self._waiting
        room = self._room()
        number = 0
        while number < min(WINDOW, len(waiting)) and room.best is not None:
            _, _, _, request, place = waiting[number]
            chosen = room.choose(self._prefixes.homes(request.known))
            # What may not be sent waits until its rank cancels it.
            is_wanted = not place.done() and not request.may_not_be_sent
            if is_wanted and chosen is None:
                number += 1
                continue
            del waiting[number]
            if is_wanted and chosen is not None:
                place.set_result(self._assign(chosen, request))
                room = self._room()
        for sender in self.senders:
            if resized and sender.on_change is not None:
                sender.on_change()
            elif not waiting and sender.on_free is not None:
                sender.on_free()

    def mark_dead(self, target: Target, cause: str) -> Death:
        """Sends the target's requests in flight to other targets."""
        target.up = target.reserved = False
        self._prefixes.forget(target.bit)
        death = Death(cause, len(target.attempts))
        now = time.monotonic()
        for attempt in target.attempts:
            attempt.request.record_death(death, now - attempt.started_at)
            attempt.abort()
        self.admit()
        return death

    def attribute_deaths(self, request: Request) -> None:
        """Attributes all deaths during this request to it: they count against no other request."""
        for death in request.deaths:
            death.attributed = True
        released = self._quarantine.all()
        self._quarantine.clear()
        for other, place in released:
            self._enqueue(other, place)
        self.admit()

    def fail(self, cause: str) -> None:
        """Makes ``acquire`` raise ServerDied."""
        self._failure = cause
        waiting = self._all_waiting()
        self._waiting = []
        self._quarantine.clear()
        for _, place in waiting:
            place.set_exception(ServerDied(cause))

    def _all_waiting(self) -> list[tuple[Request, Place]]:
        waiting = [(request, place) for *_, request, place in self._waiting]
        waiting += self._quarantine.all()
        return [(request, place) for request, place in waiting if not place.done()]

    def _enqueue(self, request: Request, future: Place) -> None:
        if request.is_quarantined:
            self._quarantine.add(request, future)
            self.admit()
        else:
            self._arrivals += 1
            order = (request.sender.order, request.order, self._arrivals)
            insort(self._waiting, (*order, request, future))

    def _assign(self, target: Target, request: Request) -> Target:
        self._prefixes.add(request.texts or (), target.bit)
        target.add_in_flight(1)
        self.in_flight += 1
        request.sender.in_flight += 1
        return target

    def _room(self) -> Room:
        if self.in_flight < self._limit:
            return Room(self.targets)
        return Room(())

    def _admit_quarantined(self) -> None:
        quarantine = self._quarantine
        reserved = next((target for target in self.targets if target.reserved), None)
        if reserved is None and quarantine.has_waiting():
            now = time.monotonic()
            reserved = min(
                (target for target in self.targets if target.up),
                key=lambda target: (target.cooldown_until > now, target.load),
                default=None,
            )
            quarantine.restart()
        if reserved is None:
            return
        reserved.reserved = quarantine.has_waiting() or reserved.in_flight > 0
        # The target has answered its other requests when all that it has in flight are quarantined.
        while (
            quarantine.has_room()
            and reserved.in_flight == quarantine.in_flight
            and self.in_flight < self._limit
        ):
            request, future = quarantine.start_next()
            future.set_result(self._assign(reserved, request))


def _stage(load: float) -> int:
    """0: the server stands idle; 1: it takes requests; 2: it is full."""
    return (load >= _IDLE) + (load >= 1)


_load = attrgetter("load")
