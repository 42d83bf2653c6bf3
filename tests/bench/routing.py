"""CPU time of the router for a request: ``python -m tests.bench.routing``.

Texts of two lengths come to eight servers, while requests wait for one that is full.
"""

import asyncio
import time

from datatrove_ckpt.inference.client.attempts import Request, Sender
from datatrove_ckpt.inference.client.routing import Router
from tests.bench import tables

ROUNDS = 100
REQUESTS = 50


def body(number, size):
    return b'{"messages":[{"role":"user","content":"%d %s"}]}' % (number, b"word " * (size // 5))


async def microseconds(size, waiting, seen):
    router = Router(10_000)
    for _ in range(8):
        target = router.add()
        target.up = True
        target.limit = 100
    home = await router.acquire(Request(body=body(0, 4000)))
    home.add_in_flight(99)
    for target in router.targets:
        if target is not home:
            target.add_in_flight(80)
    tasks = [
        asyncio.create_task(router.acquire(Request(order=1, body=body(0, 4000))))
        for _ in range(waiting)
    ]
    await asyncio.sleep(0)
    sender = Sender()
    spent = 0.0
    for number in range(ROUNDS):
        first = 1 if seen else number * REQUESTS + 1
        bodies = [body(first + (not seen) * other, size) for other in range(REQUESTS)]
        started = time.thread_time()
        for text in bodies:
            request = Request(sender, body=text)
            taken = router.take(request)
            assert taken is not None
            router.release(taken, request)
        spent += time.thread_time() - started
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return spent / ROUNDS / REQUESTS * 1e6


def main():
    rows = []
    for size in (4_000, 128_000):
        for waiting in (0, 8, 64):
            cells = [asyncio.run(microseconds(size, waiting, seen)) for seen in (True, False)]
            rows.append([f"{size:,} bytes, {waiting} wait", *cells])
    print(tables.markdown(["microseconds a request", "text seen before", "new text"], rows))


if __name__ == "__main__":
    main()
