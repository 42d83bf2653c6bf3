"""The parts of supervision, without a server: what a lease contains, what metrics say."""

import asyncio
import errno
import itertools
import subprocess
import sys
from contextlib import asynccontextmanager

import pytest

from datatrove_ckpt.config import InferenceConfig, inference_config
from datatrove_ckpt.config.inference_config import ENGINES, models_of, visible_gpus
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.inference.client.client import ExchangeFailed
from datatrove_ckpt.inference.client.http1 import Response
from datatrove_ckpt.inference.client.routing import Target
from datatrove_ckpt.inference.client.urls import HiddenUrl
from datatrove_ckpt.inference.servers import host
from datatrove_ckpt.inference.servers import server as gpu_leases
from datatrove_ckpt.inference.servers.host import RankModels, parse_metrics, read_metrics
from datatrove_ckpt.inference.servers.server import InferenceServer
from tests import golden
from tests.clients import config
from tests.jobs import leased_gpus

# leases ------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _own_folders(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(gpu_leases, "_LEASE_TIMEOUT", 0.0)
    for name in ("DATATROVE_EXECUTOR", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def four_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")


async def gpus(**settings):
    async with leased_gpus(config(**settings)) as leases:
        return [gpus_of(lease) for lease in leases]


def gpus_of(lease):
    return tuple(filter(None, lease.env.get("CUDA_VISIBLE_DEVICES", "").split(",")))


def test_gpus_are_counted_and_a_machine_without_divides_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert asyncio.run(gpus(replicas=3)) == [(), (), ()]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(inference_config, "_DEV", tmp_path)
    assert visible_gpus() == []
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_gpus() == ["0", "1"]


def test_ranks_that_lock_at_the_same_moment_do_not_take_every_other_gpu(monkeypatch, tmp_path):
    """A second rank comes while the first one has locked one of its two GPUs."""
    between = []
    visible = ["a", "b", "c", "d"]
    try_lock = gpu_leases._try_lock

    def lock_two():
        locked = gpu_leases._try_lock_gpus(tmp_path, visible, 2)
        return locked and [name for name, _ in locked]

    def another_rank_comes(path):
        if path.name == "gpu_b.lock":
            monkeypatch.setattr(gpu_leases, "_try_lock", try_lock)
            between.append(lock_two())
        return try_lock(path)

    monkeypatch.setattr(gpu_leases, "_try_lock", another_rank_comes)
    assert lock_two() == ["a", "b"]
    assert between == [None]
    assert lock_two() == ["c", "d"]


def named(**models):
    return [
        *models_of(
            {name: InferenceConfig("vllm", "m", **settings) for name, settings in models.items()}
        ).values()
    ]


@asynccontextmanager
async def leased(configs, without=()):
    found = await gpu_leases.lease_gpus(configs, without)
    try:
        yield {
            name: [lease.env["CUDA_VISIBLE_DEVICES"] for lease in leases]
            for name, leases in found.items()
        }
    finally:
        for lease in itertools.chain(*found.values()):
            lease.close()


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize("executor", ["LOCAL", "SLURM"])
@pytest.mark.parametrize("models", golden.sections("shares_of_gpus"))
async def test_models_divide_the_gpus(executor, models, monkeypatch):
    monkeypatch.setenv("DATATROVE_EXECUTOR", executor)
    async with leased(named(**eval(models))) as found:
        golden.hold("shares_of_gpus", models, str({**found}))


@pytest.mark.usefixtures("four_gpus")
async def test_a_model_whose_servers_run_keeps_its_gpus(monkeypatch):
    models = named(writer={"tp": 2}, judge={"tp": 2})
    monkeypatch.setenv("DATATROVE_EXECUTOR", "SLURM")
    async with leased(models, {"writer"}) as found:
        assert found == {"judge": ["2,3"]}
    monkeypatch.setenv("DATATROVE_EXECUTOR", "LOCAL")
    async with leased(models[:1]) as first, leased(models, {"writer"}) as second:
        assert (first, second) == ({"writer": ["0,1"]}, {"judge": ["2,3"]})


@pytest.mark.usefixtures("four_gpus")
async def test_a_rank_takes_the_gpus_of_all_its_models_or_none():
    """Two ranks that each held one model's share while they wait for the other's would wait for
    each other.
    """
    async with leased(named(writer={"tp": 2})) as first:
        with pytest.raises(ConfigError, match="workers: this task needs 3 of the GPUs 0,1,2,3"):
            await gpu_leases.lease_gpus(named(writer={"tp": 2}, judge={}))
        async with leased(named(writer={"tp": 2})) as second:
            assert (first, second) == ({"": ["0,1"]}, {"": ["2,3"]})


@pytest.mark.usefixtures("four_gpus")
async def test_a_lease_that_no_model_came_for_is_given_back():
    models = named(writer={"tp": 2}, judge={"tp": 2})
    rank = RankModels(models, keeps=False)
    _, leases = await rank.get(models[0])
    with pytest.raises(ConfigError):
        await gpus(tp=2)
    rank.close()
    assert await gpus(tp=2) == [("2", "3")]
    for lease in leases:
        lease.close()
    assert await gpus(tp=4) == [("0", "1", "2", "3")]


def start_process_with(descriptors):
    script = "import sys; print(flush=True); sys.stdin.read()"
    pipe = subprocess.PIPE
    server = subprocess.Popen(
        [sys.executable, "-c", script], pass_fds=descriptors, stdin=pipe, stdout=pipe
    )
    server.stdout.readline()
    return server


@pytest.mark.usefixtures("four_gpus")
async def test_gpus_are_taken_until_the_last_process_of_the_server_is_gone():
    async with leased_gpus(config(tp=4)) as leases:
        server = start_process_with(leases[0].locks)
    with server, pytest.raises(ConfigError):
        await gpus(tp=1)
    assert await gpus(tp=1) == [("0",)]


def test_a_server_needs_as_many_gpus_as_it_will_use():
    def needed(**settings):
        return config(**settings).engine.gpus_per_server(config(**settings))

    assert needed(tp=2, dp=3, pp=2) == 12
    assert needed(tp=2, model_kwargs={"tensor_parallel_size": 4}) == 4
    assert needed(server_type="sglang", tp=4, dp=2, model_kwargs={"enable-dp-attention": True}) == 4


# metrics -----------------------------------------------------------------------------------------

VLLM_METRICS = """
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a {b} c"} 16.0
vllm:num_requests_running{engine="1",model_name="a {b} c"} 2.0
vllm:num_requests_waiting{engine="0",model_name="a {b} c"} 3.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 16.0
vllm:generation_tokens_total{engine="0"} 2.561e+03
vllm:prompt_tokens_total{engine="0"} 39.0
vllm:cache_config_info{block_size="16",engine="0",kv_cache_size_tokens="64000",num_gpu_blocks="4096"} 1.0
vllm:cache_config_info{block_size="16",engine="1",mamba_block_size="8",num_gpu_blocks="1000"} 1.0
vllm:cache_config_info{block_size="16",engine="2",kv_cache_size_tokens="None",num_gpu_blocks="None"} 1.0
"""
HYBRID_METRICS = """
vllm:kv_cache_usage_perc{engine="0",group="0"} 0.8
vllm:kv_cache_usage_perc{engine="0",group="1"} 0.2
vllm:kv_cache_usage_perc{engine="1",group="0"} 0.4
vllm:num_requests_running{engine="0"} 1.0
"""
SGLANG_METRICS = """
sglang:num_running_reqs{dp_rank="0",priority="",engine_type="unified"} 5.0
sglang:num_running_reqs{dp_rank="0",engine_type="unified",priority="3"} 4.0
sglang:num_running_reqs{dp_rank="0",engine_type="unified",priority="None"} 1.0
sglang:num_queue_reqs{priority="",model_name="a,priority=\\"1\\""} 2.0
sglang:num_queue_reqs{priority="3"} 2.0
sglang:generation_tokens_total{priority="3"} 10.0
sglang:generation_tokens_total{priority="4"} 30.0
sglang:token_usage{dp_rank="0",pp_rank="0"} 0.5
sglang:token_usage{dp_rank="0",pp_rank="1"} 0.75
"""
LLAMACPP_METRICS = "llamacpp:requests_processing 4\nllamacpp:requests_deferred 1\nllamacpp:tokens_predicted_total 12\n"


test_metrics_of_all_engines_of_a_server_are_added_up = golden.shows(
    "metrics_of_engines", globals(), {"parse_metrics": parse_metrics, "ENGINES": ENGINES}
)


RESTRICTED = [("/metrics/", "name[]")]
WHOLE = [("/metrics", "")]


@pytest.mark.parametrize(
    "shown, status, asked",
    golden.values("pages_of_metrics", globals()),
)
async def test_only_the_metrics_with_our_names_are_asked_for_where_the_server_can(
    monkeypatch, shown, status, asked
):
    requests = []

    async def get(url, api_key, seconds, proxied):
        path, query = url.reveal().path, url.reveal().query
        requests.append((path, "".join({*query})))
        assert not any(url.secrets)  # else no message could name these metrics
        if not query:
            return Response(200, VLLM_METRICS.encode())
        assert "vllm:cache_config_info" in query.getall("name[]")
        return Response(status, shown.encode())

    monkeypatch.setattr(host, "get", get)
    target = Target(url=HiddenUrl("http://127.0.0.1:1/v1"))
    for _ in range(2):
        (metrics,) = await read_metrics(target, ENGINES["vllm"].metrics, 1.0)
        assert metrics.running == 18
    assert requests == asked


async def test_a_server_whose_metrics_hang_is_asked_once(monkeypatch):
    requests = []

    async def get(url, api_key, seconds, proxied):
        requests.append(url.reveal().path)
        raise ExchangeFailed("", "TimeoutError")

    monkeypatch.setattr(host, "get", get)
    assert await host.count_ranks(HiddenUrl("http://127.0.0.1:1"), None, None) == 1
    assert requests == ["/metrics/"]


# keys --------------------------------------------------------------------------------------------


async def test_a_probe_for_which_no_file_is_left_says_nothing_about_its_server(
    monkeypatch,
):
    def at_the_limit(*_, **__):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", at_the_limit)
    server = InferenceServer(config(), 0)
    server.url = "http://127.0.0.1:1"
    assert await server.problem(1.0) is None
    target = Target(url=HiddenUrl(server.url))
    assert await read_metrics(target, ENGINES["vllm"].metrics, 1.0) == []
