"""The engine's own batch tool, without a server: `python offline.py JOB.json RESULT.json`.

    vllm      LLM.generate, which `vllm bench throughput` measures: all prompts at once, no HTTP, no
              JSON.
              `vllm run-batch` runs the server's layers in one process, so it is slower than this.
    sglang    Engine.generate, which `python -m sglang.benchmark.offline_throughput` measures
    llamacpp  the server object inside the wheel, called from one thread per slot, without HTTP.
              llama.cpp's own
              llama-batched-bench knows no prompts and no text: it decodes the same token
              everywhere.

Runs in the engine's environment, by its path, so it imports nothing of this repository, except for
llama.cpp, whose parameters are set by our own program for its server.
"""

import json
import os
import sys
import time
from pathlib import Path


class Clock:
    """The time, and the CPU seconds of this process and all below it, from the first request to the
    last answer.
    """

    def __init__(self):
        self.first = self.last = self._cpu = 0.0

    def start(self):
        self._cpu = _cpu_of_all()
        self.first = time.monotonic()

    def stop(self):
        self.last = time.monotonic()
        self._cpu = _cpu_of_all() - self._cpu

    def result(self):
        return {"first": self.first, "last": self.last, "cpu_of_all": self._cpu}


def _cpu_of_all():
    """CPU seconds of this process and its descendants that run."""
    parents, ticks = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            values = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        pid = int(path.parent.name)
        parents[pid], ticks[pid] = int(values[1]), int(values[11]) + int(values[12])
    family = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(ticks.get(pid, 0) for pid in family) / os.sysconf("SC_CLK_TCK")


def _vllm(job, prompts, clock):
    from vllm import LLM, SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(job["arguments"])
    llm = LLM.from_engine_args(EngineArgs.from_cli_args(parsed))
    parameters = SamplingParams(**job["parameters"])
    clock.start()
    outputs = llm.generate(prompts, parameters, use_tqdm=False)
    clock.stop()
    return [
        {
            "text": output.outputs[0].text,
            "prompt_tokens": len(output.prompt_token_ids),
            "completion_tokens": len(output.outputs[0].token_ids),
            "cached_tokens": output.num_cached_tokens or 0,
        }
        for output in outputs
    ]


def _sglang(job, prompts, clock):
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.server_args import prepare_server_args

    engine = Engine(server_args=prepare_server_args(job["arguments"]))
    given = dict(job["parameters"])
    given["max_new_tokens"] = given.pop("max_tokens")
    clock.start()
    outputs = engine.generate(prompt=prompts, sampling_params=given)
    clock.stop()
    engine.shutdown()
    return [{"text": output["text"], **_counts(output["meta_info"])} for output in outputs]


def _llamacpp(job, prompts, clock):
    from concurrent.futures import ThreadPoolExecutor

    import xllamacpp

    from datatrove_ckpt.inference.servers import llamacpp

    server = xllamacpp.Server(llamacpp.flags_set(xllamacpp.CommonParams(), job["arguments"]))

    def answer(prompt):
        got = server.handle_completions({"prompt": prompt, **job["parameters"]})
        usage = got["usage"]
        return {
            "text": got["choices"][0]["text"],
            **_counts(usage | (usage.get("prompt_tokens_details") or {})),
        }

    # As many requests at the server as a client of its HTTP keeps there.
    with ThreadPoolExecutor(job["in_flight"]) as threads:
        clock.start()
        answers = list(threads.map(answer, prompts))
        clock.stop()
    return answers


def _counts(usage):
    return {
        name: usage.get(name) or 0
        for name in ("prompt_tokens", "completion_tokens", "cached_tokens")
    }


_ENGINES = {"vllm": _vllm, "sglang": _sglang, "llamacpp": _llamacpp}


def main():
    job = json.loads(Path(sys.argv[1]).read_text())
    rows = [json.loads(line) for line in Path(job["prompts"]).read_text().splitlines()]
    clock = Clock()
    answers = _ENGINES[job["engine"]](job, [row["text"] for row in rows], clock)
    with Path(job["output"]).open("w") as file:
        for row, answer in zip(rows, answers, strict=True):
            file.write(json.dumps({**row, "answer": answer["text"]}) + "\n")
    counts = {name: sum(answer[name] for answer in answers) for name in _counts({})}
    Path(sys.argv[2]).write_text(json.dumps({**clock.result(), "answers": len(answers), **counts}))


if __name__ == "__main__":  # vLLM and SGLang may spawn processes, which import this file
    main()
