"""Kills in the middle of long answers: they go on with their next token, and the output is the one
of a run that nothing interrupted.

The server of these tests counts tokens, and waits before chosen ones. A piece has 4 tokens here.
"""

import asyncio
import os
import random
import shutil
import signal
import sys
import threading
from pathlib import Path

import orjson
import pytest

from datatrove_ckpt import InferenceConfig
from datatrove_ckpt.checkpoint.request_cache import RequestCache
from datatrove_ckpt.generation import requests
from datatrove_ckpt.inference.client import half_answers
from datatrove_ckpt.inference.client.half_answers import HalfAnswer
from datatrove_ckpt.inference.client.routing import Request
from datatrove_ckpt.inference.servers import continuation, host
from datatrove_ckpt.inference.servers.continuation import find_continuation
from datatrove_ckpt.inference.servers.host import close_warm_servers
from tests import processes
from tests.clients import Sleeps, client_of
from tests.clients import config as client_config
from tests.half_answers import JOB, answered, tokens_in
from tests.jobs import chat, run_job
from tests.token_server import TokenServer, write_vllm

INTERVAL = 4
PLACES = 2
LENGTHS = {"text 0": 11, "text 1": 6, "text 2": 14}
SETTINGS = {"half_answers": True, "max_concurrent_generations": PLACES}


async def ask_long(document, generate):
    return await generate(chat(document.text, max_tokens=2048, temperature=0))


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    monkeypatch.setattr(half_answers, "STREAM_INTERVAL", INTERVAL)


class HeldServer(TokenServer):
    """Waits before its ``hold``-th token since ``begin``, until its client has gone or it is
    released; and after each event until ``is_saved``.
    """

    def __init__(self, hold=sys.maxsize, lengths=LENGTHS):
        super().__init__(lengths)
        self.hold = hold
        self.begin = 0
        self.held = threading.Event()
        self.is_saved = lambda ids: True
        self.at_token = lambda: None

    async def token(self, request):
        if self.count("/v1/chat/completions/derender"):  # after the probe of the server
            self.begin = self.begin or self.generated
            self.at_token()
            if self.generated - self.begin >= self.hold:
                self.held.set()
                while self.generated - self.begin >= self.hold and request.transport:
                    await asyncio.sleep(0.001)

    async def sent(self, ids):
        if self.begin:
            while not self.is_saved(ids):
                await asyncio.sleep(0.001)


def job(folder, server, **changes):
    settings = {**SETTINGS, **changes.pop("config", {})}
    run_job(folder, server, 3, ask_long, config=settings, records_per_chunk=9, **changes)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    with TokenServer(LENGTHS) as server:
        job(folder, server, config={"half_answers": False})
        assert server.count("/v1/chat/completions") == 3
        assert server.generated == sum(LENGTHS.values())
    return answered(folder)


def test_a_kill_before_each_token_loses_at_most_a_piece_of_each_answer(
    tmp_path, expected, monkeypatch
):
    """The checkpoint is copied before each token, when what was sent is saved."""
    saved = {}
    put = RequestCache.put

    def noted(cache, group):
        group = list(group)
        put(cache, group)
        for row in group:
            if row.key.is_piece:
                ids = orjson.loads(row.answer.result)["half"]
                saved[row.doc_id] = saved.get(row.doc_id, []) + ids

    monkeypatch.setattr(RequestCache, "put", noted)
    left = []
    with HeldServer() as server:

        def copy():
            number = server.generated - server.begin
            folder = tmp_path / f"killed at {number}"
            if not folder.exists():
                shutil.copytree(tmp_path / "job", folder)
                left.append((folder, number))

        server.at_token = copy
        server.is_saved = lambda ids: ids in saved.values()
        job(tmp_path / "job", server)
    assert answered(tmp_path / "job") == expected
    needed = sum(LENGTHS.values())
    assert [number for _, number in left] == [*range(needed)]
    monkeypatch.undo()
    monkeypatch.setattr(half_answers, "STREAM_INTERVAL", INTERVAL)
    for folder, before in left:
        kept = sum(tokens_in(folder).values())
        assert before - kept < PLACES * INTERVAL
        with TokenServer(LENGTHS) as server:
            job(folder, server)
            of_probe = sum(ids for ids in [2 * server.length] if kept < needed)
            assert server.generated - of_probe == needed - kept
        assert answered(folder) == expected


class HeldStep(HeldServer):
    """Never answers one of the steps, except to its probe."""

    def __init__(self, step):
        super().__init__()
        self.step = step

    async def _hold(self, step, request):
        if step == self.step and self.count(f"/v1/chat/completions/{step}") > 1:
            self.held.set()
            while request.transport:
                await asyncio.sleep(0.001)

    async def _render(self, request, payload):
        await self._hold("render", request)
        return await super()._render(request, payload)

    async def _derender(self, request, payload):
        await self._hold("derender", request)
        return await super()._derender(request, payload)


def stopped(command, server):
    """Stops a job while its server holds a request; it does not wait for the answer."""
    process = processes.start([*command, server.url])
    assert server.held.wait(100)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=100)[0]
    assert process.returncode in (-signal.SIGTERM, 128 + signal.SIGTERM), output
    return sum(tokens_in(Path(command[-1])).values())


def go_on(command, kept, expected):
    with TokenServer(LENGTHS) as server:
        done = processes.run([*command, server.url])
        assert done.returncode == 0, done.stderr
        assert server.generated == sum(LENGTHS.values()) - kept + 2 * server.length
    assert answered(Path(command[-1])) == expected


def job_of(folder, **settings):
    """The command of a job, but for its server's URL."""
    code = JOB.replace("drain_seconds=600", f"drain_seconds=600, **{settings}")
    (folder / "job.py").write_text(code)
    return [sys.executable, str(folder / "job.py"), str(folder / "job")]


@pytest.mark.parametrize("step", ["render", "derender"])
def test_a_stop_does_not_wait_for_the_other_steps(tmp_path, expected, step):
    command = job_of(tmp_path)
    with HeldStep(step) as server:
        kept = stopped(command, server)
    assert (kept > 0) == (step == "derender")
    go_on(command, kept, expected)


# servers that the run launches -------------------------------------------------------------------


@pytest.fixture
def vllm(tmp_path, here, monkeypatch):
    """Runs a job with servers of a version, and returns their command lines and tokens."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")

    def run(version, folder="job", seconds=0.0, **config):
        python = write_vllm(tmp_path / f"vllm {version} {folder}", version, LENGTHS, seconds)
        settings = {"server_python": python, "max_concurrent_generations": PLACES, **config}
        config = InferenceConfig("vllm", "fake", **settings)
        run_job(tmp_path / folder, config, 3, ask_long, records_per_chunk=9)
        place = Path(python).parents[1]
        lines = (place / "started").read_text().splitlines()
        return lines, len((place / "tokens").read_text())

    return run


@pytest.mark.parametrize(
    "version, config, continues",
    [
        ("0.32.0", {}, True),
        ("1.0.0rc1", {}, True),
        ("0.31.9", {}, False),
        ("0.33.0", {"half_answers": False}, False),
        ("0.32.0", {"seed": 5}, False),
        ("0.32.0", {"model_kwargs": {"runner": "pooling"}}, False),
    ],
)
def test_vllm_gets_the_flag_and_the_requests_that_its_version_knows(
    vllm, tmp_path, expected, version, config, continues, log
):
    ((command,), tokens) = vllm(version, **config)
    assert ("--enable-scale-out" in command) == continues
    assert len(log.said("continues half-written answers")) == continues
    assert tokens == sum(LENGTHS.values()) + 2 * 10 * continues
    assert answered(tmp_path / "job") == expected


@pytest.mark.parametrize("setting, number", [("auto", 1), (True, 3)])
def test_answers_that_are_short_in_fact_are_requested_as_usual(
    vllm, tmp_path, expected, setting, number, monkeypatch
):
    monkeypatch.setattr(requests, "_ENOUGH", 1)
    put = RequestCache.put
    halves = set()

    def noted(cache, group):
        put(cache, group := list(group))
        halves.update(row.doc_id for row in group if row.key.is_piece)

    monkeypatch.setattr(RequestCache, "put", noted)
    vllm("0.32.0", half_answers=setting, max_concurrent_generations=1)
    assert len(halves) == number
    assert answered(tmp_path / "job") == expected


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_server_that_is_killed_costs_a_piece_of_each_answer(
    vllm, tmp_path, expected, log, replicas, monkeypatch
):
    """The other one, or the one that replaces it, continues."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(replicas))))
    put = RequestCache.put
    started = tmp_path / "vllm 0.32.0 job/started"
    saved = []
    killed = []

    def killing(cache, group):
        put(cache, group := list(group))
        saved.extend(row for row in group if row.key.is_piece)
        if len(saved) >= 4 and not killed:
            killed.append(True)
            os.kill(int(started.read_text().split()[0]), signal.SIGKILL)

    monkeypatch.setattr(RequestCache, "put", killing)
    commands, tokens = vllm("0.32.0", seconds=0.02, replicas=replicas)
    probes = 2 * 10 * len(commands)
    assert log.said("is given up")
    # A token that is generated while the last piece is written is lost, too.
    assert tokens - probes <= sum(LENGTHS.values()) + PLACES * replicas * (INTERVAL + 1)
    assert answered(tmp_path / "job") == expected


# what is kept ------------------------------------------------------------------------------------


@pytest.mark.parametrize("half", [True, False])
def test_kills_do_not_make_kept_answers_shorter(half, monkeypatch):
    """The server breaks each connection before a token with probability 1/20, which is as often as
    an answer ends. Answers that begin again are kept if they are short: half as long, on average.
    """
    draw = random.Random(1)
    lengths = []
    with TokenServer() as server:
        server.draw = lambda number: draw.random() < 1 / 20

        async def token(request):
            if server.count("/v1/chat/completions/derender") and draw.random() < 1 / 20:
                request.transport.abort()

        server.token = token
        more = {"half_answers": True, "request_max_attempts": 8 if half else 1000}
        config_of_test = client_config("endpoint", endpoint_url=server.url, **more)

        async def ask():
            async with client_of(config_of_test, [server.url], sleep=Sleeps()) as client:
                (target,) = client.servers.router.targets
                found = await find_continuation(config_of_test, target.url, None, "m")
                assert found is not None
                client.servers.set_continuation(target, found if half else None)
                for number in range(300):
                    body = orjson.dumps(chat(f"text {number}", model="m", temperature=1))
                    request = Request(client.sender, body=body)
                    request.half = HalfAnswer({}, client.sender.work)
                    target.cooldown_until = 0.0
                    answer = await client.complete(body, request=request)
                    lengths.append(answer.usage["completion_tokens"])

        asyncio.run(ask())
    mean = sum(lengths) / len(lengths)
    # The standard error is 1, or 0.5.
    assert (17 < mean < 23) if half else (8.5 < mean < 11.5)


def test_a_mirror_gives_another_node_the_pieces(tmp_path, expected):
    mirror = {"checkpoints_remote_dir": str(tmp_path / "mirror"), "mirror_seconds": 0.05}
    command = job_of(tmp_path, **mirror)
    with HeldServer(hold=15) as server:
        kept = stopped(command, server)  # the last upload has what was in flight
    assert kept > 15 - PLACES * INTERVAL
    shutil.rmtree(tmp_path / "job/checkpoints")
    go_on(command, kept, expected)


def test_a_server_is_tested_once_for_all_tasks_that_use_it(tmp_path, here, monkeypatch, log):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    place = tmp_path / "vllm"
    python = write_vllm(place, "0.32.0", LENGTHS)
    config = InferenceConfig("vllm", "fake", server_python=python)
    for name in ("one", "two"):
        run_job(tmp_path / name, config, 3, ask_long, records_per_chunk=9)
    assert len((place / "started").read_text().splitlines()) == 1
    assert len(log.said("continues half-written answers")) == 1
    assert len((place / "tokens").read_text()) == 2 * sum(LENGTHS.values()) + 2 * 10
    close_warm_servers()


def test_a_server_that_continues_nothing_is_tested_once(tmp_path, here, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    tested = []

    async def find(config, url, api_key, model):
        tested.append(model)

    monkeypatch.setattr(host, "find_continuation", find)
    config = InferenceConfig(
        "vllm", "fake", server_python=write_vllm(tmp_path / "vllm", "0.32.0", LENGTHS)
    )
    for name in ("one", "two"):
        run_job(tmp_path / name, config, 3, ask_long, records_per_chunk=9)
    assert len((tmp_path / "vllm/started").read_text().splitlines()) == 1
    assert tested == ["fake"]
    close_warm_servers()


def test_endpoints_are_tested_at_once(tmp_path, monkeypatch, log):
    """Each answers its test while the other one is tested."""
    monkeypatch.setattr(continuation, "_SECONDS", 5.0)
    with TokenServer(LENGTHS) as first, TokenServer(LENGTHS) as second:

        async def token(request):
            while not (first.requested and second.requested):
                await asyncio.sleep(0.001)

        first.token = second.token = token
        urls = [first.url, second.url]
        config = InferenceConfig("endpoint", "fake", endpoint_url=urls, half_answers=True)
        run_job(tmp_path / "job", config, 3, ask_long, records_per_chunk=9)
    assert len(log.said("continues half-written answers")) == 2
