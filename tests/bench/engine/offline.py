"""The engine's own batch tool, without a server: `python offline.py JOB.json RESULT.json`.

    vllm      LLM.generate, which `vllm bench throughput` measures: all prompts at once, no HTTP, no
              JSON.
              `vllm run-batch` runs the server's layers in one process, so it is slower than this.
    llamacpp  the server object inside the wheel, called from one thread per slot, without HTTP.
              llama.cpp's own
              llama-batched-bench knows no prompts and no text: it decodes the same token
              everywhere.

Runs in the engine's environment, by its path, so it imports nothing of this repository, except for
llama.cpp, whose parameters are set by our own program for its server.
"""

import json
import sys
import time
from pathlib import Path


def _vllm(job, prompts):
    """When the first request left, and the tokens of each prompt and its answer."""
    from vllm import LLM, SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(job["arguments"])
    llm = LLM.from_engine_args(EngineArgs.from_cli_args(parsed))
    parameters = SamplingParams(**job["parameters"])
    began = time.monotonic()
    outputs = llm.generate(prompts, parameters, use_tqdm=False)
    return began, [
        (len(output.prompt_token_ids), len(output.outputs[0].token_ids)) for output in outputs
    ]


def _llamacpp(job, prompts):
    from concurrent.futures import ThreadPoolExecutor

    import xllamacpp

    from datatrove_ckpt.inference.servers import llamacpp

    server = xllamacpp.Server(llamacpp.flags_set(xllamacpp.CommonParams(), job["arguments"]))

    def answer(prompt):
        usage = server.handle_completions({"prompt": prompt, **job["parameters"]})["usage"]
        return usage["prompt_tokens"], usage["completion_tokens"]

    # As many requests at the server as a client of its HTTP keeps there.
    with ThreadPoolExecutor(job["in_flight"]) as threads:
        began = time.monotonic()
        return began, list(threads.map(answer, prompts))


def main():
    job = json.loads(Path(sys.argv[1]).read_text())
    rows = [json.loads(line) for line in Path(job["prompts"]).read_text().splitlines()]
    run = _vllm if job["engine"] == "vllm" else _llamacpp
    began, tokens = run(job, [row["text"] for row in rows])
    seconds = time.monotonic() - began
    prompt, completion = map(sum, zip(*tokens, strict=True))
    result = {"seconds": seconds, "answers": len(tokens), "prompt": prompt}
    Path(sys.argv[2]).write_text(json.dumps({**result, "completion": completion}))


if __name__ == "__main__":  # vLLM may spawn processes, which import this file
    main()
