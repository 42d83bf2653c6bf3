"""Random events at a router: whatever happens, no place is used twice, and no request waits for ever."""

import asyncio
import math
import random

import pytest

from datatrove_ckpt.inference.client.routing import WINDOW, Request, Router, Sender

TEXTS = [
    b'{"messages":[{"content":"%s"}]}' % (word * 200) for word in (b"one ", b"two ", b"three ")
]


class World:
    """Requests that are held at servers until an event ends them."""

    def __init__(self, chance):
        self.chance = chance
        self.senders = [Sender(order=0), Sender(order=1)]
        self.router = Router(chance.choice([6, 1000]))
        self.held = {}  # what ends a request in flight, and its target
        self.tasks = []
        self.sent = []  # orders of the requests without a text that were sent since the last event
        self.waiting = set()
        for _ in range(chance.randint(1, 4)):
            self.add_server()

    # events ---------------------------------------------------------------------------------------

    def arrive(self):
        sender = self.chance.choice(self.senders)
        body = self.chance.choice([b"", *TEXTS])
        request = Request(sender, order=self.chance.randrange(20), body=body)
        self.tasks.append(asyncio.create_task(self._complete(request)))

    def arrive_in_crowds(self):
        for _ in range(100):
            self.arrive()

    def answer(self):
        if self.held:
            self.chance.choice([*self.held]).set_result(None)

    def cancel(self):
        if self.tasks:
            self.chance.choice(self.tasks).cancel()

    def add_server(self):
        server = self.router.add()
        self.router.divide(server, self.chance.choice([1, 1, 3]))
        for rank in server.ranks:
            rank.limit = self.chance.randint(1, 8)
            rank.up = True
        self.router.admit(resized=True)

    def die(self):
        target = self.chance.choice(self.router.targets)
        if target.up:
            self.router.mark_dead(target, "bang")

    def come_back(self):
        for rank in self.chance.choice(self.router.targets).ranks:
            rank.up = True
        self.router.admit(resized=True)

    def resize(self):
        target = self.chance.choice(self.router.targets)
        target.limit = self.chance.choice([1, 2, 8, math.inf])
        target.cache_share_per_request = self.chance.choice([0, 0.1, 0.5, 2.0])
        target.foreign_requests = self.chance.choice([0, 3, 100])
        self.router.admit(resized=True)

    def cool_down(self):
        target = self.chance.choice(self.router.targets)
        target.cooldown_until = self.chance.choice([0.0, math.inf])
        self.router.admit()

    # what a client does ---------------------------------------------------------------------------

    async def _complete(self, request):
        while True:
            self.waiting.add(request)
            try:
                target = await self.router.acquire(request)
            finally:
                self.waiting.discard(request)
            if request.is_quarantined:
                assert target.reserved or not target.up
            elif not request.body:
                self.sent.append(_order(request))
            alone = request.is_quarantined and sum(rank.in_flight for rank in target.ranks) == 1
            if await self._hold(request, target):
                return
            if alone and request.deaths[-1].in_flight == 1:
                self.router.attribute_deaths(request)
                return

    async def _hold(self, request, target):
        """Returns False if the server has died."""
        attempt = target.start_attempt(request)
        end = asyncio.get_running_loop().create_future()
        self.held[end] = target
        try:
            await end
        except asyncio.CancelledError:
            if not attempt.lost or attempt.is_cancelled:
                raise
        finally:
            attempt.end()
            target.attempts.discard(attempt)
            del self.held[end]
            self.router.release(target)
        return not attempt.lost

    # what must hold -------------------------------------------------------------------------------

    async def settle(self):
        for _ in range(12):
            await asyncio.sleep(0)
        for task in self.tasks:
            if task.done() and not task.cancelled():
                task.result()
        self.tasks = [task for task in self.tasks if not task.done()]

    def check(self):
        router = self.router
        at_servers = [*self.held.values()]
        assert router.in_flight == len(at_servers) <= router._limit
        assert router.waiting == len(self.waiting) == len(self.tasks) - len(at_servers)
        waiting = [request for request in self.waiting if not request.is_quarantined]
        orders = [_order(request) for request in waiting if not request.body]
        for target in router.targets:
            assert target.in_flight == at_servers.count(target)
            assert target.up or not target.reserved
            if target.reserved and router.in_flight < router._limit:
                assert any(rank.in_flight for rank in target.ranks)  # of any requests
            takes = target.up and not target.reserved and target.cooldown_until == 0
            if takes and router.in_flight < router._limit and len(waiting) <= WINDOW:
                assert not orders or target.load >= 1
                assert not waiting or target.load >= 0.75
        if self.sent and orders:
            assert max(self.sent) <= min(orders)

    async def end(self):
        for target in self.router.targets:
            target.cooldown_until = 0.0
            target.up = True
        self.router.admit(resized=True)
        for _ in range(10_000):
            await self.settle()
            if not self.tasks:
                break
            for end in [*self.held]:
                end.set_result(None)
        assert not self.tasks
        assert self.router.waiting == self.router.in_flight == 0


def _order(request):
    return request.sender.order, request.order


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 100))]
)
async def test_no_place_is_used_twice_and_every_request_is_sent_at_last(seed):
    chance = random.Random(seed)
    world = World(chance)
    events = [*[world.arrive] * 8, *[world.answer] * 6, world.arrive_in_crowds, world.cancel]
    events += [world.add_server, world.resize, world.cool_down]
    events += [world.die, world.come_back] * chance.choice([1, 5])
    for _ in range(150):
        event = chance.choice(events)
        event()
        await world.settle()
        if event in (world.arrive, world.arrive_in_crowds, world.die):
            world.sent.clear()  # an older request may have come, or come back, later
        world.check()
        world.sent.clear()
    await world.end()
