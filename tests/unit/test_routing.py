"""Which server takes a request: documents by what the caches hold, requests where their text is."""

import asyncio
import math
import time
from types import SimpleNamespace

import pytest

from datatrove_ckpt.config.endpoints import EndpointConfig
from datatrove_ckpt.generation.embedding_batches import EmbeddingBatches
from datatrove_ckpt.inference.client.body import RequestBody
from datatrove_ckpt.inference.client.responses import CHAT
from datatrove_ckpt.inference.client.routing import (
    _REMEMBERED,
    WINDOW,
    MinuteLimits,
    MustDivide,
    PrefixIndex,
    Request,
    Router,
    Sender,
    ServerDeath,
)
from datatrove_ckpt.process.shutdown import Shutdown
from tests.clients import turns


def router(servers, places):
    made = Router(1000)
    for _ in range(servers):
        target = made.add()
        target.up = True
        target.limit = places
    return made


def body(text):
    return b'{"seed":1,"messages":[{"role":"user","content":"%s"}]}' % (text.encode() * 400)


def request(text="", order=0):
    return Request(order=order, body=body(text) if text else b"")


async def release(made, target):
    """Ends a request at the server, and lets those go that may."""
    made.release(target)
    await turns(5)


async def waiting(made, *requests):
    """Tasks that have come to the router, in this order."""
    tasks = []
    for one in requests:
        tasks.append(asyncio.create_task(made.acquire(one)))
        await turns(5)
    return tasks


async def test_a_request_goes_where_its_leading_text_is():
    made = router(3, 10)
    first = await made.acquire(request("one"))
    second = await made.acquire(request("two"))
    assert first is not second
    for _ in range(3):
        assert await made.acquire(request("one")) is first
        assert await made.acquire(request("two")) is second


async def test_it_waits_for_a_place_there_while_others_go_ahead():
    made = router(2, 8)
    full = [await made.acquire(request("one", order)) for order in range(8)]
    for _ in range(7):  # three quarters are no idle server
        await made.acquire(request())
    (waits,) = await waiting(made, request("one", 8))
    assert not waits.done()
    other = await made.acquire(request("two", 9))
    assert other is not full[0]
    made.release(full[0])
    assert await waits is full[0]


async def test_it_goes_to_a_server_that_stands_idle_which_becomes_a_home():
    made = router(2, 8)
    full = [await made.acquire(request("one")) for _ in range(8)]
    other = await made.acquire(request("one"))
    assert other is not full[0]
    made.release(full[0])
    assert await made.acquire(request("one")) is other  # the least busy home


async def test_requests_that_share_a_text_are_spread_over_servers_that_stand_idle():
    """Where the limit is high, a few hundred rows with one prompt would all be at one server."""
    made = router(4, 500)
    for _ in range(200):
        await made.acquire(request("one"))
    assert all(target.in_flight >= 40 for target in made.targets)
    assert all(target.in_flight <= 60 for target in made.targets)


async def test_nothing_waits_for_a_home_that_is_down_or_reserved():
    for state in ("down", "reserved", "cooling"):
        made = router(2, 2)
        home = await made.acquire(request("one"))
        other = made.targets[1 - made.targets.index(home)]
        other.add_in_flight(1)  # half of its places; with the next one it is no idle server
        if state == "down":
            made.mark_dead(home, "bang")
        elif state == "reserved":
            home.reserved = True
        else:
            home.cooldown_until = float("inf")
        assert await made.acquire(request("one")) is other


async def test_a_server_that_comes_back_has_an_empty_cache():
    made = router(2, 10)
    home = await made.acquire(request("one"))
    other = await made.acquire(request("two"))
    made.mark_dead(home, "bang")
    home.up = True
    home.add_in_flight(2)
    assert await made.acquire(request("one")) is other


async def test_requests_wait_while_the_caches_are_full_and_open_documents_go_first():
    made = router(1, 100)
    made.targets[0].cache_share_per_request = 0.1
    for order in range(9):
        target = await made.acquire(request(order=order))
    new, later = await waiting(made, request(order=9), request(order=3))
    assert (new.done(), later.done()) == (False, False)
    await release(made, target)
    assert (new.done(), later.done()) == (False, True)
    await release(made, target)
    assert new.done()


async def test_a_server_that_others_fill_takes_a_quarter_of_its_requests():
    made = router(1, 100)
    made.targets[0].cache_share_per_request = 0.01
    made.targets[0].foreign_requests = 1000
    sent = 0
    while made.take(request()) is not None:
        sent += 1
    assert sent == 23  # 23 and three times as many of others fill more than 0.9


@pytest.mark.parametrize("usage_each, others", [(1.0, 500), (1.0, 1), (math.inf, 3)])
async def test_a_server_without_requests_takes_a_document_whatever_its_metrics_show(
    usage_each, others
):
    """Other clients may fill the cache for hours, and metrics may be old."""
    made = router(2, 100)
    for target in made.targets:
        target.cache_share_per_request = usage_each
        target.foreign_requests = others
    made.admit(resized=True)
    first = made.take(request(order=1))
    second = made.take(request(order=2))
    assert {first, second} == {*made.targets}
    (third,) = await waiting(made, request(order=3))
    assert not third.done()
    await release(made, first)
    assert third.done()


async def test_no_request_waits_for_a_home_while_a_server_without_requests_shows_a_full_cache():
    made = router(2, 8)
    home = await made.acquire(request("one"))
    other = made.targets[1 - made.targets.index(home)]
    other.cache_share_per_request = 1.0
    other.foreign_requests = 8
    made.admit(resized=True)
    for _ in range(7):
        await made.acquire(request("one"))
    assert await made.acquire(request("one")) is other
    (waits,) = await waiting(made, request("one"))
    assert not waits.done()


async def with_a_full_window():
    """A router with two full servers, of which as many wait for the first as may."""
    made = router(2, 8)
    home = await made.acquire(request("one"))
    for _ in range(7):
        await made.acquire(request("one"))
    for _ in range(8):
        await made.acquire(request())
    held = await waiting(made, *(request("one", order) for order in range(1, WINDOW + 1)))
    return made, home, made.targets[1 - made.targets.index(home)], held


async def test_no_more_than_the_window_goes_ahead_of_a_request():
    made, home, other, held = await with_a_full_window()
    (late,) = await waiting(made, request("two", WINDOW + 1))
    await release(made, other)
    assert not late.done()
    assert made.take(request("three", WINDOW + 2)) is None
    assert made.take(request("two", 0)) is other
    made.release(other)
    await release(made, home)
    assert held[0].done()
    assert late.done()


async def test_waiting_requests_are_looked_at_only_if_one_may_go(monkeypatch):
    made, home, other, held = await with_a_full_window()
    made.release(other)
    looked_up = []
    homes = PrefixIndex.homes
    monkeypatch.setattr(
        PrefixIndex, "homes", lambda self, text: looked_up.append(text) or homes(self, text)
    )
    other.limit = 9
    made.take(request())
    made.release(other)
    assert not looked_up
    await release(made, home)
    assert held[0].done()


@pytest.mark.parametrize("end", ["cancelled", "their rank stops"])
async def test_requests_that_nobody_wants_any_more_hold_up_no_other(end):
    made = router(2, 8)
    sender = Sender()
    for _ in range(8):
        home = await made.acquire(request("one"))
    other = made.targets[1 - made.targets.index(home)]
    for _ in range(7):
        await made.acquire(request())
    requests = [request("one", order) for order in range(2 * WINDOW)]
    for each in requests:
        each.sender = sender
    tasks = await waiting(made, *requests)
    assert made.waiting == 2 * WINDOW
    if end == "cancelled":
        for task in tasks:
            task.cancel()
    else:
        sender.shutdown.request("SIGTERM")
    assert await asyncio.wait_for(made.acquire(request("two", WINDOW)), 60) is other
    assert made.in_flight == home.in_flight + other.in_flight == 16


def test_only_equal_leading_texts_are_known_and_fields_before_them_do_not_count():
    prefixes = PrefixIndex()
    hashes, known = prefixes.find(body("one"))
    assert known == 0
    prefixes.add(hashes, 0)
    assert prefixes.homes(hashes[-1]) == 0
    prefixes.add(hashes, 4)
    again, known = prefixes.find(body("one").replace(b'"seed":1', b'"seed":1234'))
    assert (again, known) == (hashes, hashes[-1])
    assert prefixes.homes(known) == 4
    longer = body("one")[:-3] + b"two" * 500
    more, known = prefixes.find(longer)
    assert known == hashes[-1] == more[len(hashes) - 1]
    assert prefixes.find(body("two"))[1] == 0


def test_a_text_is_forgotten_after_two_generations_without_it():
    prefixes = PrefixIndex()
    texts = iter(range(1, 1 << 20))
    prefixes.add([0], 4)
    prefixes.add([-1], 2)
    for generation in range(3):
        for _ in range(_REMEMBERED):
            prefixes.add([next(texts)], 1)
        assert prefixes.homes(0) == (4 if generation < 1 else 4 | 8)
        prefixes.add([0], 8)
    assert prefixes.homes(-1) == 0


def test_media_are_part_of_the_leading_text():
    prefixes = PrefixIndex()
    texts = [b'{"messages":[' + b"x" * 300, b"y" * 300]
    prefixes.add(prefixes.find(RequestBody(texts, [b"one picture"]))[0], 1)
    assert prefixes.find(RequestBody(texts, [b"one picture"]))[1] != 0
    shared, known = prefixes.find(RequestBody(texts, [b"another"]))
    assert known == shared[0] != shared[-1]


async def test_a_shared_request_and_its_parts_have_the_order_and_the_text_of_a_document():
    seen = []

    async def complete(body, way, request):
        assert request.body == body
        seen.append((request.order, body))
        if request.is_shared:
            raise MustDivide
        raise LookupError

    client = SimpleNamespace(sender=Sender(), complete=complete)
    batches = EmbeddingBatches(2)
    texts = [batches.complete(client, {"input": text}, CHAT, 7) for text in "ab"]
    await asyncio.gather(*texts, return_exceptions=True)
    assert seen == [
        (7, b'{"input":["a","b"]}'),
        (7, b'{"input":"a"}'),
        (7, b'{"input":"b"}'),
    ]


async def test_a_server_is_another_one_only_where_a_request_may_go():
    """Else a request that waits for a quota would be handed back and forth, and no time pass."""
    made = router(2, 16)
    limited, failing = made.targets
    limited.cooldown_until = math.inf
    failing.failures = 3
    assert made.has_other(limited)
    failing.add_in_flight(1)  # one at a time
    assert await made.acquire(request()) is limited
    assert not made.has_other(limited)


def limited(servers=1, **limits):
    made = router(servers, 100)
    made.has_homes = False
    made.has_limits = True
    made.targets[0].limits = MinuteLimits(EndpointConfig("http://e", **limits))
    return made


async def test_a_request_goes_when_an_answer_took_fewer_tokens_than_expected():
    made = limited(tokens_per_minute=100)
    target = made.targets[0]
    sent = [Request(body=b"x" * 300) for _ in range(2)]
    for one in sent:
        assert await made.acquire(one) is target
    (waits,) = await waiting(made, Request())
    assert not waits.done()
    for one in sent:
        target.limits.answered(one.quota_use, 20)
        made.release(target)
    await turns(5)
    assert waits.done()


async def test_a_request_goes_to_a_server_that_answers_again_while_others_wait_for_a_minute():
    made = limited(servers=2, requests_per_minute=1)
    first, failing = made.targets
    failing.failures = 3
    assert await made.acquire(Request()) is first
    trial = Request()
    assert await made.acquire(trial) is failing
    (waits,) = await waiting(made, Request())
    assert not waits.done()
    failing.failures = 0
    made.release(failing)
    await turns(5)
    assert waits.done()


async def test_one_timer_waits_for_the_minute_however_often_its_end_moves(monkeypatch):
    """Each timer sets the next one: two would be two in every minute of the run."""
    timers = []
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(
        loop,
        "call_later",
        lambda _, look: timers.append(loop.call_at(math.inf, look)) or timers[-1],
    )
    made = limited(requests_per_minute=1)
    await made.acquire(Request())
    waits = await waiting(made, Request())
    for seconds in range(3):
        made.targets[0].limits.opens_at -= seconds
        made.admit()
    assert len(timers) > 1
    assert sum(not timer.cancelled() for timer in timers) == 1
    for task in waits:
        task.cancel()


# quarantine, and servers that fail ----------------------------------------------------------------


def quarantined(age=0.0):
    request = Request()
    for _ in range(2):
        request.record_death(ServerDeath("bang"), age)
    return request


def acquire(made, request=None):
    return asyncio.create_task(made.acquire(request or Request()))


async def test_a_server_whose_connection_failed_gets_a_request_only_when_no_other_can():
    made = router(2, 100)
    failed, other = made.targets
    body = b'{"messages":' + b"x" * 1000
    assert await made.acquire(Request(body=body)) is failed
    failed.cooldown_until = time.monotonic() + 1000
    assert [await made.acquire(Request(body=body)) for _ in range(4)] == [other] * 4
    other.up = False
    assert await made.acquire(Request(body=body)) is failed


async def test_a_request_that_is_cancelled_as_it_gets_its_place_gives_it_back():
    made = router(1, 1)
    target = await made.acquire(Request())
    cancelled, next_one = acquire(made), acquire(made)
    await turns(5)
    made.release(target)  # which gives the place on
    cancelled.cancel()
    await turns(5)
    assert (cancelled.cancelled(), next_one.done(), made.in_flight) == (True, True, 1)


async def test_a_rank_that_stops_gets_no_place_even_if_one_is_free():
    made = router(1, 1)
    sender = Sender(Shutdown())
    sender.shutdown.request("test")
    assert made.take(Request(sender)) is None
    waiting = acquire(made, Request(sender))
    await turns(5)
    assert (waiting.done(), made.in_flight) == (False, 0)
    waiting.cancel()


async def test_a_quarantined_request_is_alone_and_the_youngest_goes_first():
    made = router(1, 100)
    target = await made.acquire(Request())
    old, young, normal = acquire(made, quarantined(9)), acquire(made, quarantined(1)), acquire(made)
    await turns(5)
    assert not any(task.done() for task in (old, young, normal))
    await release(made, target)
    assert (young.done(), old.done(), normal.done()) == (True, False, False)
    await release(made, target)
    assert (old.done(), normal.done()) == (True, False)
    made.release(target)
    await normal


async def test_a_server_dies_with_all_its_ranks_and_a_quarantined_request_has_them_for_itself():
    made = Router(1000)
    made.divide(made.add(), 2)
    first, second = made.targets
    for rank in (first, second):
        rank.up = True
        rank.limit = 10
    assert (first.rank, second.rank) == ("0", "1")
    held = [await made.acquire(request("one")) for _ in range(2)]
    held.append(await made.acquire(request("two")))
    assert held == [first, first, second]
    poison = acquire(made, quarantined())
    await turns(5)
    for target in held:
        assert not poison.done()
        await release(made, target)
    assert first.reserved is second.reserved is poison.done() is True
    attempts = [rank.start_attempt(Request()) for rank in (first, second)]
    assert made.mark_dead(second, "bang").in_flight == 2
    assert all(attempt.lost for attempt in attempts)
    assert first.up is second.up is False


async def test_the_members_of_a_group_whose_server_died_run_alone():
    made = router(1, 100)
    requests = [quarantined(n) for n in range(100)]
    waiting = {request: acquire(made, request) for request in requests}
    for expected in (1, 2, 4):
        await turns(5)
        group = [request for request, task in waiting.items() if task.done()]
        assert len(group) == expected
        if expected < 4:
            for request in group:
                made.release(waiting.pop(request).result())
    death = made.mark_dead(made.targets[0], "bang")
    for request in group:
        request.record_death(death, 0)
        made.release(waiting.pop(request).result())
    assert made.targets[0].in_flight == 0
    again = [acquire(made, request) for request in group]
    made.targets[0].up = True
    for task in again:
        await turns(5)
        assert made.targets[0].in_flight == 1
        await release(made, await task)
    assert made.targets[0].in_flight > 1  # the others continue in groups


async def test_attributed_deaths_quarantine_no_other_request():
    made = router(1, 100)
    guilty, innocent = Request(), Request()
    for _ in range(2):
        death = ServerDeath("bang")
        guilty.record_death(death, 0)
        innocent.record_death(death, 0)
    await made.acquire(guilty)
    waiting = [acquire(made, innocent), acquire(made)]
    await turns(5)
    assert not any(task.done() for task in waiting)
    made.attribute_deaths(guilty)
    made.release(made.targets[0])
    await asyncio.gather(*waiting)
    assert not innocent.is_quarantined
