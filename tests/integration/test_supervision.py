"""Servers that die, hang and restart while requests run: no answer is lost, none is wrong, no
process is left.
"""

import asyncio
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections import defaultdict
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.errors import ServerDied, ServerStartFailed
from datatrove_ckpt.inference.client import routing
from datatrove_ckpt.inference.servers import host, server
from datatrove_ckpt.inference.servers.host import RankModels, launched_servers
from datatrove_ckpt.process.shutdown import Shutdown
from tests.clients import client_of, lent_client
from tests.engines import ENGINE, TWO_PART_VLLM, asked, engines, lines
from tests.patience import until, until_async
from tests.processes import is_alive, is_stopped, write_program


@pytest.fixture(autouse=True)
def _quick(here, monkeypatch, policy):
    monkeypatch.setattr("tempfile.tempdir", str(here))
    policy("RELAUNCH", first=0.0)
    policy("RESTART", first=0.01)
    # A client that asks its dead server again must not meet the engine of another test process at
    # that port.
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    monkeypatch.setattr(server, "_PORTS", server._PORTS[worker::64])
    monkeypatch.setattr(host, "_PROBE_INTERVAL", 0.1)
    monkeypatch.setattr(host, "_PROBE_PAUSE", 0.02)
    monkeypatch.setattr(host, "_DRAIN_MARGIN", 0.0)
    (here / "engine.py").write_text(ENGINE)


def config(**settings):
    """One attempt per request: a request that is sent again because its server died must use up
    none.
    """
    settings = {"server_start_max_retries": 0, "server_stop_timeout_sec": 2.0, **settings}
    return InferenceConfig("custom", "m", model_kwargs={"server_script": "engine.py"}, **settings)


class Run:
    """A pool of servers, and its client."""

    def __init__(self, client, watch):
        self.client = client
        self.target = client.servers.router.targets[0]
        self.supervisor = self.target.probe.__self__
        self.watch = watch

    def ask(self, question):
        body = json.dumps({"messages": [{"role": "user", "content": question}]}).encode()
        return asyncio.create_task(self.client.complete(body))

    async def waiting(self, number):
        """So many requests that wait at the gate."""
        tasks = [self.ask(f"wait {n}") for n in range(number)]
        await until_async(lambda: sum(asked().values()) == number)
        return tasks

    async def texts(self, tasks):
        return [
            completion.text.partition(" says ")[2] for completion in await asyncio.gather(*tasks)
        ]


@asynccontextmanager
async def running(settings):
    async with client_of(settings) as client:
        models = RankModels([settings], keeps=False)
        async with launched_servers(0, client.servers, Shutdown(), models) as watch:
            yield Run(client, watch)


def open_gate():
    """Let the engines answer prompts that begin with "wait"."""
    Path("gate").touch()


def break_engine():
    Path("engine.py").write_text("import sys; sys.exit('out of luck')")


async def test_a_server_that_dies_is_restarted_and_everything_is_answered():
    happened = []
    async with running(config()) as run:
        run.client.sender.on_server = lambda what, name, url, why: (
            happened.append((what, name, bool(url))) or None
        )
        tasks = await run.waiting(3)
        os.kill(engines()[0], signal.SIGKILL)
        await until_async(lambda: not run.target.up)
        late = run.ask("late")  # waits while there is no server
        await until_async(lambda: len(engines()) == 2)
        open_gate()
        assert await run.texts([*tasks, late]) == ["wait 0", "wait 1", "wait 2", "late"]
        assert asked() == {"wait 0": 2, "wait 1": 2, "wait 2": 2, "late": 1}
        work = run.client.sender.work
        assert (run.supervisor.restarts, work.resent, work.retries) == (1, 3, 0)
    assert happened == [("death", "0", False), ("restart", "0", False), ("ready", "0", True)]


class Clock:
    """The time that supervision sees.

    It passes only when a test says so, so a busy machine never looks like a hang.
    """

    def __init__(self):
        self.now = 1000.0
        self.passes = lambda: False
        """Whether it has passed by a second since the last look."""

    def monotonic(self):
        self.now += self.passes()
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    for module in (host, routing):
        monkeypatch.setattr(module, "time", made)
    return made


async def test_a_server_that_is_stopped_hangs_and_is_restarted(clock, log):
    async with running(config(hang_timeout=0.8)) as run:
        tasks = await run.waiting(3)
        os.kill(engines()[0], signal.SIGSTOP)
        # An answer to a probe may still be on its way.
        clock.passes = lambda: is_stopped(engines()[0])
        await until_async(clock.passes)
        open_gate()
        assert await run.texts(tasks) == ["wait 0", "wait 1", "wait 2"]
        assert run.supervisor.restarts == 1
        assert not is_alive(engines()[0])
    assert log.said("hangs: it has 3 requests, and answered none")


def stand_in_for_vllm(program, monkeypatch):
    write_program(Path("bin/vllm"), program)
    monkeypatch.setenv("PATH", f"{Path('bin').absolute()}:{os.environ['PATH']}")


@pytest.fixture
def idle_vllm(monkeypatch):
    """A program named vllm that does nothing."""
    stand_in_for_vllm("#!/bin/sh\nexec sleep 600\n", monkeypatch)


@asynccontextmanager
async def vllm_here(routes, monkeypatch, **settings):
    """Serves ``routes`` at the port of the ``idle_vllm``, which serves nothing."""

    async def well(request):
        return web.json_response({})

    app = web.Application()
    app.router.add_routes([*routes, web.get("/health", well), web.get("/v1/models", well)])
    # 0 waits forever for open requests.
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        monkeypatch.setattr(server, "free_port", lambda: port)
        async with running(InferenceConfig("vllm", "m", **settings)) as started:
            yield started
    finally:
        await runner.cleanup()


@pytest.mark.usefixtures("idle_vllm")
async def test_a_server_is_ready_when_it_lists_its_models_and_its_health_path_answers_200(
    monkeypatch, policy
):
    """As SGLang, which lists them while it warms up."""
    statuses = [503, 500]

    async def health(request):
        return web.Response(status=statuses.pop() if statuses else 200)

    policy("READY", first=0.0)
    async with vllm_here([web.get("/health", health), web.get("/", health)], monkeypatch):
        assert not statuses


class MuteVllm:
    """A vLLM that gets one request, answers it only when the test says so, and counts tokens.

    Attributes:
        asked: set when the request has arrived.
        answers: set by the test, to let it answer.
        tokens: counted so far.
    """

    def __init__(self):
        self.asked = asyncio.Event()
        self.answers = asyncio.Event()
        self.tokens = 5

    def routes(self):
        return [
            web.post("/v1/chat/completions", self._complete),
            web.get("/metrics", self._metrics),
        ]

    async def _complete(self, request):
        self.asked.set()
        await self.answers.wait()
        return web.json_response(
            {"choices": [{"message": {"content": "x"}, "finish_reason": "stop"}]}
        )

    async def _metrics(self, request):
        return web.Response(
            text=f"vllm:num_requests_running 1\nvllm:generation_tokens_total {self.tokens}\n"
        )


class TwoRanks(MuteVllm):
    """A vLLM of two data-parallel ranks, which notes the rank that each request names.

    Args:
        first: number of its first rank.
    """

    def __init__(self, first):
        super().__init__()
        self.answers.set()
        self.ranks = defaultdict(list)  # by the text of the request
        self._numbers = (first, first + 1)

    async def _complete(self, request):
        text = (await request.json())["messages"][0]["content"][:3]
        self.ranks[text].append(request.headers.get("X-data-parallel-rank"))
        return await super()._complete(request)

    async def _metrics(self, request):
        lines = [f'vllm:num_requests_running{{engine="{number}"}} 1\n' for number in self._numbers]
        return web.Response(text="".join(lines))


@pytest.mark.usefixtures("idle_vllm")
@pytest.mark.parametrize(
    "first, ranks", [(0, ["0", "1"]), (4, [None, None])], ids=["whole", "one of two nodes"]
)
@pytest.mark.parametrize("is_launched", [True, False], ids=["launched", "endpoint"])
async def test_a_request_goes_to_the_rank_that_has_its_text(first, ranks, is_launched, monkeypatch):
    engine = TwoRanks(first)
    bodies = [
        json.dumps({"messages": [{"role": "user", "content": text * 1000}]}).encode()
        for text in ("one", "two")
    ]
    async with vllm_here(engine.routes(), monkeypatch) as started:
        endpoint = InferenceConfig("endpoint", "m", endpoint_url=started.supervisor.server.url)
        async with lent_client(endpoint) as lent:
            client = started.client if is_launched else lent
            for _ in range(3):
                await asyncio.gather(*map(client.complete, bodies))
    assert engine.ranks == {"one": [ranks[0]] * 3, "two": [ranks[1]] * 3}


@pytest.mark.usefixtures("idle_vllm")
@pytest.mark.parametrize("counted, restarts", [(7, 0), (0, 1)])
async def test_a_server_that_answers_nothing_hangs_unless_it_counts_tokens(
    counted, restarts, clock, monkeypatch
):
    engine = MuteVllm()
    async with vllm_here(engine.routes(), monkeypatch, hang_timeout=60) as started:
        watched = started.supervisor
        answer = started.ask("a long text")
        await engine.asked.wait()
        metrics = None
        for _ in range(10):
            metrics = await watched._check_progress(metrics, 600)
            clock.now += 15
            engine.tokens += counted
        assert watched.target.up == (restarts == 0)
        engine.answers.set()
        assert (await answer).text == "x"
        assert watched.restarts == restarts


@pytest.mark.matrix
# The latter keeps its old connections open.
@pytest.mark.parametrize("what", ["sick once", "stop listening once"])
async def test_a_dead_engine_behind_a_running_process_is_restarted(what):
    async with running(config()) as run:
        assert await run.texts([run.ask(what)]) == [what]
        assert (run.supervisor.restarts, run.client.sender.work.resent) == (1, 1)


async def test_a_server_that_dies_too_often_ends_the_run_with_its_last_words():
    async with running(config(server_max_restarts=2)) as run:
        break_engine()
        waiting = run.ask("die once")
        with pytest.raises(ServerDied) as caught:
            await run.watch()
        text = str(caught.value)
        assert "was restarted 2 times within 3600 s, and died again (server_max_restarts=2)" in text
        assert "out of luck" in text
        for task in (waiting, run.ask("too late")):
            with pytest.raises(ServerDied, match="out of luck"):
                await task


# replicas ----------------------------------------------------------------------------------------


async def test_the_work_of_a_dead_replica_goes_to_the_others_meanwhile(
    policy,
):
    policy("RESTART", first=60.0)  # longer than the test
    async with running(config(replicas=2)) as run:
        tasks = await run.waiting(4)
        dead, alive = engines()
        os.kill(dead, signal.SIGKILL)
        await until_async(lambda: sum(asked().values()) == 6)
        open_gate()
        assert {(await task).text.split()[0] for task in tasks} == {str(alive)}
        assert run.client.sender.work.resent == 2


@pytest.mark.slow
async def test_the_run_goes_on_with_the_servers_that_are_left(log):
    async with running(config(replicas=2, server_max_restarts=0)) as run:
        for pid in engines():
            os.kill(pid, signal.SIGKILL)
            if pid == engines()[0]:
                await until_async(lambda: log.said("continues without this server, with 1 of 2"))
                await run.ask("still here")
        with pytest.raises(ServerDied):
            await run.watch()


# several nodes -----------------------------------------------------------------------------------


NODE = """
import json, pathlib, tempfile
from datatrove.data import Document
from datatrove.pipeline.writers import JsonlWriter
from datatrove_ckpt import InferenceConfig, InferenceRunner
tempfile.tempdir = "."
async def rollout(document, generate):
    result = await generate({"messages": [{"role": "user", "content": document.text}]})
    if document.text == "fail":
        raise ValueError("an error of the user's")
    with open("done", "a") as done:
        done.write(document.text + "\\n")
    return result
job = json.loads(pathlib.Path("job.json").read_text())
config = InferenceConfig(
    "vllm", "m", master_port=job["port"], server_stop_timeout_sec=2.0, tp=2, **job["settings"]
)
writer = JsonlWriter("output", "${rank}_${chunk_index}.jsonl", compression=None)
runner = InferenceRunner(rollout, config, writer, checkpoints_local_dir="checkpoints")
runner.run(iter([Document(text=text, id=str(n)) for n, text in enumerate(job["texts"])]))
"""


def master_port():
    """One that is free, and so is the next, until they are used: servers choose below 32768, the
    kernel below 61000.
    """
    while True:
        port = secrets.choice(range(61_000, 65_000, 2))
        claim = socket.socket(socket.AF_UNIX)
        try:
            with (
                socket.create_server(("127.0.0.1", port)),
                socket.create_server(("127.0.0.1", port + 1)),
            ):
                # As no other session can, while this process lives.
                claim.bind(f"\0datatrove-ckpt tests: port {port}")
        except OSError:
            claim.close()
        else:
            claim.detach()
            return port


class TwoNodes:
    """A task on two nodes, both of them this machine, which has answered the first text.

    ``start``: the nodes that start at first.
    """

    def __init__(self, monkeypatch, *texts, start=(0, 1), **settings):
        stand_in_for_vllm(TWO_PART_VLLM, monkeypatch)
        Path("node.py").write_text(NODE)
        self.job = {"port": master_port(), "texts": texts, "settings": settings}
        Path("job.json").write_text(json.dumps(self.job))
        monkeypatch.setenv("DATATROVE_NODE_IPS", "127.0.0.1,localhost")
        self.nodes = {}
        self._first = start

    def __enter__(self):
        for rank in self._first:
            self.start(rank)
        if len(self._first) == 2:
            until(Path("done").exists)
        return self

    def start(self, rank):
        with Path(f"node-{rank}.log").open("wb") as log:
            environment = {**os.environ, "DATATROVE_NODE_RANK": str(rank)}
            self.nodes[rank] = subprocess.Popen(
                [sys.executable, "node.py"], env=environment, stdout=log, stderr=log
            )

    def __exit__(self, *_):
        for node in self.nodes.values():
            node.kill()
            node.wait()

    def ends_with(self, *codes):
        """Both nodes must end with these codes.

        No process of the engine may be left two minutes later.
        """
        found = [self.nodes[rank].wait(timeout=400) for rank in (0, 1)]
        until(lambda: not any(is_alive(pid) for pid in self.parts(0) + self.parts(1)), 120)
        assert found == list(codes), self.log(0)

    def is_done(self):
        self.ends_with(0, 0)
        assert lines("done") == [*self.job["texts"]]
        assert [path.name for path in Path("output").iterdir()] == ["00000_00000.jsonl"]

    def parts(self, rank):
        """Process ids of the engine's part on a node, one for each of its starts."""
        found = [line.split() for line in lines("parts")] if Path("parts").exists() else []
        return [int(pid) for pid, part in found if part == str(rank)]

    def log(self, rank):
        return Path(f"node-{rank}.log").read_text()


@pytest.mark.slow
def test_the_worker_node_ends_when_the_head_node_is_killed(monkeypatch):
    with TwoNodes(monkeypatch, "a", "wait") as task:
        task.nodes[0].kill()
        task.ends_with(-signal.SIGKILL, 0)


@pytest.mark.slow
def test_a_task_that_gets_sigterm_is_served_by_all_its_nodes_until_its_requests_are_answered(
    monkeypatch,
):
    with TwoNodes(monkeypatch, "a", "wait") as task:
        for node in task.nodes.values():
            node.terminate()
        until(lambda: "1 requests in flight have" in task.log(0))
        open_gate()
        task.ends_with(128 + signal.SIGTERM, 128 + signal.SIGTERM)
    assert lines("done") == ["a", "wait"]
    assert "saved: 2 documents of this run and every answer" in task.log(0)


def test_a_part_that_dies_is_restarted_on_all_nodes_and_only_the_head_node_writes(
    monkeypatch,
):
    with TwoNodes(monkeypatch, "a", "wait") as task:
        os.kill(task.parts(1)[0], signal.SIGKILL)
        until(lambda: len(task.parts(1)) == 2)
        open_gate()
        task.is_done()
        assert (len(task.parts(0)), len(task.parts(1))) == (2, 2)


@pytest.mark.slow
def test_a_worker_node_that_is_late_serves_too(monkeypatch):
    with TwoNodes(monkeypatch, "a", start=[0]) as task:
        until(lambda: task.parts(0))
        task.start(1)
        task.is_done()


def test_a_task_that_has_lost_a_node_ends_with_an_error_and_the_same_command_resumes(
    monkeypatch,
):
    with TwoNodes(monkeypatch, "a", "wait", server_max_restarts=0) as task:
        task.nodes[1].kill()
        task.ends_with(1, -signal.SIGKILL)
        assert "died again (server_max_restarts=0)" in task.log(0)
        open_gate()
        task.start(0)
        task.start(1)
        task.is_done()


async def test_one_replica_that_does_not_start_ends_the_others(tmp_path):
    first = (
        "import os\ntry: os.mkdir('first')\nexcept FileExistsError: raise SystemExit('second')\n"
    )
    (tmp_path / "engine.py").write_text(first + ENGINE)
    with pytest.raises(ServerStartFailed, match="second"):
        async with running(config(replicas=2)):
            pass
    assert not any(is_alive(pid) for pid in engines())
