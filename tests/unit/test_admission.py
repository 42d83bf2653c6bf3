"""``max_concurrent_generations: auto``: the engine is kept busy with a short queue, and documents
are enough for it.
"""

import asyncio
import math
from itertools import cycle

import pytest

from datatrove_ckpt.common.memory import ByteBudget
from datatrove_ckpt.generation import document_limit
from datatrove_ckpt.generation.document_limit import DocumentLimit, most_documents
from datatrove_ckpt.inference.client.http1 import Response
from datatrove_ckpt.inference.client.routing import Request, Router, Sender, Target
from datatrove_ckpt.inference.client.urls import HiddenUrl
from datatrove_ckpt.inference.servers import host
from datatrove_ckpt.inference.servers.host import Admission, Metrics, adapt_admission
from tests import golden
from tests.clients import config, turns
from tests.simulated_engine import Engine, Simulation

ENGINES = {
    "gpu, 256 places": lambda: Engine(256, 8192, base=0.05, per_decode=4e-5, per_prompt_token=2e-5),
    "one place": lambda: Engine(1),
    "cpu, 32 places": lambda: Engine(32, base=0.05, per_decode=0.002, per_prompt_token=0.0003),
}
LENGTHS = {
    "short": lambda chance, now: (chance.randint(20, 100), chance.randint(20, 60)),
    "spread": lambda chance, now: (
        chance.randint(50, 200),
        int(chance.lognormvariate(4.5, 0.7)) + 1,
    ),
    "long prompts": lambda chance, now: (chance.randint(300, 900), chance.randint(10, 100)),
    "few tokens": lambda chance, now: (chance.randint(50, 200), chance.randint(1, 5)),
}


@pytest.mark.matrix("seed", range(3))
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_the_engine_is_kept_busy_with_a_short_queue(engine, lengths, seed):
    auto = Simulation(engine(), lengths, Admission(), seed=seed).run(40)
    most = max(
        Simulation(engine(), lengths, number, seed=seed).run(40).mean_running(15)
        for number in (32, 128, 512)
    )
    assert auto.mean_running(15) >= 0.95 * most
    assert all(waiting <= 2 * target for _, _, waiting, target in auto.steps)


def reasoning(chance, now):
    return chance.randint(50, 200), min(4000, int(chance.lognormvariate(6.5, 0.9)) + 1)


@pytest.mark.matrix("seed", range(3))
def test_long_answers_that_do_not_all_fit_the_cache_are_not_held_back(seed):
    """Preempted requests cost less than places that stay empty."""

    def tokens(limit):
        engine = Engine(256, 8192, blocks=1000, base=0.05, per_decode=1e-4, per_prompt_token=2e-5)
        Simulation(engine, reasoning, limit, seed=seed).run(600)
        return engine.answer_tokens

    assert tokens(Admission()) >= 0.99 * max(map(tokens, (16, 32, 64, 128)))


@pytest.mark.parametrize(
    "tokens, limit", [(0, 16), (50_000, 16), (100_000, 24), (400_000, 64), (9_000_000, 64)]
)
async def test_the_first_requests_are_as_many_as_the_cache_holds(monkeypatch, tokens, limit):
    async def read(target, names, seconds):
        return [Metrics(0, 0, 0, 0.0, tokens)]

    monkeypatch.setattr(host, "read_metrics", read)
    assert await host.first_limit(Target(), config().engine.metrics) == limit


def test_an_engine_that_starts_at_once_what_it_gets_is_full_within_two_seconds():
    engine = Engine(256, 8192, base=0.008, per_decode=1e-5, per_prompt_token=3e-5)
    job = Simulation(engine, lambda chance, now: (100, chance.randint(300, 600)), Admission(64))
    job.run(2)
    assert job.steps[-1][1] == 256


@pytest.mark.parametrize("requests", [1, 5, 60])
def test_the_limit_does_not_run_away_where_few_requests_want_to_be_in_flight(requests):
    auto = Simulation(
        ENGINES["gpu, 256 places"](), LENGTHS["short"], Admission(), requests=requests
    ).run(30)
    assert auto.admission.limit <= 2 * requests + 16


@pytest.mark.parametrize(
    "seen, limit",
    golden.values("samples_without_news", globals()),
)
def test_a_sample_that_shows_nothing_new_changes_no_limit(seen, limit):
    made = Admission()
    for metrics, in_flight in seen:
        made.update(metrics, in_flight, 0)
    assert made.limit == limit


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(host, "_SAMPLE_SECONDS", 0.0)
    monkeypatch.setattr(host, "_WAIT_FOR_METRICS_SECONDS", 0.05)


@pytest.fixture
def adapted(monkeypatch):
    """Returns the target whose limit ``adapt_admission`` adapts. ``read``: gives the metrics."""

    async def adapt(read, until):
        if read is not None:

            async def read_all(*_):
                metrics = await read()
                return [metrics] if metrics else []

            monkeypatch.setattr(host, "read_metrics", read_all)
        target = Target(url=HiddenUrl("http://127.0.0.1:1"), limit=16)
        names = config().engine.metrics
        following = asyncio.create_task(adapt_admission("Server 0", target, Router(1000), names))
        async with asyncio.timeout(300):
            while not until(target) and not following.done():
                await asyncio.sleep(0)
        assert not following.done(), following
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        return target

    return adapt


async def test_without_metrics_the_answers_decide_and_a_line_says_why(adapted, log):

    async def read():
        return None

    await adapted(read, lambda target: target.pace is not None)
    (said,) = log
    assert (
        "Server 0 shows no metrics at /metrics, so max_concurrent_generations: auto starts with 16 "
        "requests and goes up to 500."
    ) in said


async def test_several_servers_behind_one_address_are_noticed_before_the_limit_runs_away(
    adapted, log
):
    limits = []
    tokens = cycle([1000, 900, 1100, 950])

    async def read():
        return Metrics(8, 0, next(tokens))

    def until(target):
        limits.append(target.limit)
        return target.pace is not None

    target = await adapted(read, until)
    assert target.limit == 16
    assert all(limit <= 24 for limit in limits if limit != math.inf)
    assert "as load balancers do" in log[0]


async def test_metrics_that_stop_for_a_while_are_waited_for(adapted, log):
    reads = []

    async def read():
        reads.append(True)
        await asyncio.sleep(0.001)
        return Metrics(8, 8, 1) if len(reads) == 1 else None

    target = await adapted(read, lambda target: len(reads) > 100)
    assert (target.limit, log) == (8, [])


async def test_what_metrics_showed_of_the_cache_is_forgotten_when_they_stop_for_long(adapted):
    """Else a server that stops showing them when its cache is full would stay full."""
    pages = [Metrics(8, 8, 1, 0.9)]

    async def read():
        await asyncio.sleep(0.001)
        return pages.pop() if pages else None

    def is_forgotten(target):
        target.add_in_flight(4 - target.in_flight)
        loads.append(target.load)
        return loads[-1] < 1 and not pages

    loads = []
    await adapted(read, is_forgotten)
    assert max(loads) > 1


async def test_a_cache_that_no_running_request_takes_holds_back_no_document(adapted):
    reads = []

    async def read():
        reads.append(True)
        return Metrics(0, 0, len(reads), 1.0)

    target = await adapted(read, lambda target: len(reads) > 2)
    target.add_in_flight(9)
    assert target.load < 1


@pytest.mark.parametrize("shown", ["NaN", "+Inf", "-Inf", "-1", "100", "1e308", "", "many"])
@pytest.mark.parametrize("name", ["num_requests_running", "kv_cache_usage_perc"])
async def test_whatever_the_metrics_show_a_server_gets_requests_and_a_document(
    adapted, monkeypatch, name, shown
):
    reads = []

    async def get(url, api_key, seconds, proxied):
        reads.append(url)
        page = f"vllm:num_requests_waiting {len(reads)}\nvllm:{name} {shown}\nvllm:{name} {shown}\n"
        return Response(200, page.encode())

    monkeypatch.setattr(host, "get", get)
    # Else a stall of the machine ends the reads of pages that show nothing.
    monkeypatch.setattr(host, "_WAIT_FOR_METRICS_SECONDS", 300.0)
    target = await adapted(None, lambda target: len(reads) > 4)
    target.add_in_flight(0)
    assert target.limit >= 8
    assert target.load < 1


@pytest.mark.parametrize(
    "page",
    [
        "vllm:num_requests_running 1\nvllm:num_requests_waiting 0\n"
        "vllm:generation_tokens_total 5\nvllm:gpu_cache_usage_perc 0.5\n",
        "vllm:current_qps 3\n",
    ],
)
async def test_a_server_that_does_not_show_its_cache_gets_one_warning_with_its_version(
    monkeypatch, log, page
):
    async def get(url, api_key, seconds, proxied):
        if url.reveal().path == "/version":
            return Response(200, b'{"version":"0.6.3"}')
        return Response(200, page.encode())

    monkeypatch.setattr(host, "get", get)
    await host.count_ranks(HiddenUrl("http://127.0.0.1:1"), None, None)
    (said,) = log
    assert "does not show its KV cache" in said
    assert '{"version":"0.6.3"}' in said


# Documents in work: enough for the requests in flight, and few more ------------------------------


class Work:
    """Documents without end, whose requests take one turn of the event loop or a few.

    Attributes:
        documents: in work.
        requests: in flight, at their most.
    """

    def __init__(self, settings, rollout):
        self.router = Router(most_documents([settings]) * settings.rollouts_per_document)
        self.limit = DocumentLimit([settings], ByteBudget(1))
        self.sender = Sender(on_change=self.limit.changed)
        self.router.senders.append(self.sender)
        self.target = Target()
        self.target.limit = 16
        self.router.targets.append(self.target)
        self.documents = 0
        self.most = 0
        self._settings = settings
        self._rollout = rollout

    async def run(self, number):
        self._admitting = asyncio.create_task(self._admit())
        await turns(3)  # the server starts
        self.target.up = True
        self.router.admit()
        self.limit.follow(self._settings, self.router, self.sender)
        await self.go_on(number)

    async def go_on(self, number):
        self.most = 0
        for _ in range(number):
            self.most = max(self.most, self.router.in_flight)
            await asyncio.sleep(0)

    async def _admit(self):
        tasks = set()
        while True:
            await self.limit.acquire(0)
            self.documents += 1
            tasks.add(asyncio.create_task(self._process()))

    async def _process(self):
        await self._rollout(self._ask)
        self.documents -= 1
        self.limit.release(0)

    async def _ask(self):
        request = Request(self.sender)
        target = await self.router.acquire(request)
        await turns(4)
        self.router.release(target)


async def plain(ask):
    await ask()


async def with_other_work(ask):
    await turns(10)
    await ask()
    await turns(10)


async def test_documents_that_wait_for_each_other_before_they_ask_are_started(monkeypatch):
    monkeypatch.setattr(document_limit, "_IDLE_SECONDS", 0.0)
    arrived = []
    all_here = asyncio.Event()

    async def rollout(ask):
        arrived.append(ask)
        if len(arrived) == 50:
            all_here.set()
        await all_here.wait()
        await ask()

    work = Work(config(), rollout)
    await work.run(100)
    assert all_here.is_set()
    assert work.most > 0


@pytest.mark.matrix("rollout, fewest, most", [(plain, 16, 32), (with_other_work, 60, 170)])
async def test_documents_keep_the_requests_in_flight_and_are_not_many_more(rollout, fewest, most):
    work = Work(config(max_concurrent_generations="auto"), rollout)
    await work.run(500)
    assert work.most == 16
    assert fewest <= work.documents <= most
    work.target.limit = 40
    work.router.admit()
    await work.go_on(500)
    assert work.most == 40
    assert work.documents <= 40 * most / 16


async def test_a_server_that_runs_nothing_more_gets_no_more_documents():
    work = Work(config(max_concurrent_generations="auto"), lambda ask: asyncio.sleep(3600))
    await work.run(500)
    assert work.documents <= 17  # only an answer shows that a document more would help


@pytest.mark.parametrize(
    "settings, documents",
    [
        ({"max_concurrent_generations": 7, "rollouts_per_document": 2}, 3),
        ({"max_concurrent_generations": 7, "max_concurrent_documents": 9}, 9),
        ({"max_concurrent_generations": "auto", "max_concurrent_documents": 9}, 9),
    ],
)
async def test_a_number_is_kept(settings, documents):
    work = Work(config(**settings), with_other_work)
    await work.run(500)
    assert most_documents([config(**settings)]) == work.documents == documents


def following_four_places(settings):
    limit = DocumentLimit([settings], ByteBudget(1))
    router, sender = Router(4), Sender(on_change=limit.changed)
    router.senders.append(sender)
    target = router.add()
    target.limit = 4
    target.up = True
    limit.follow(settings, router, sender)
    return limit


async def test_a_document_with_more_rollouts_than_places_is_in_work_alone():
    settings = config(max_concurrent_generations=4, rollouts_per_document=8)
    limit = following_four_places(settings)  # before any document, as while a reader counts
    for _ in range(2):
        await asyncio.wait_for(limit.acquire(0), 60)
        waiting = asyncio.create_task(limit.acquire(0))
        await turns(3)
        assert not waiting.done()
        waiting.cancel()
        limit.release(0)


async def test_a_document_that_ends_while_no_request_is_in_flight_makes_room_for_one():
    limit = following_four_places(config())
    admitted = []

    async def admit():
        while True:
            await limit.acquire(0)
            admitted.append(True)

    admitting = asyncio.create_task(admit())
    await turns(3)
    before = len(admitted)
    limit.release(0)
    await turns(9)
    assert len(admitted) == before + 1
    admitting.cancel()


async def test_documents_whose_texts_share_a_request_are_in_work_together():
    settings = config(max_concurrent_generations=4, texts_per_request=8)
    limit = following_four_places(settings)
    for _ in range(4 * 8):
        await asyncio.wait_for(limit.acquire(0), 60)
