"""An element of a Slurm job array, in whose folder a test runs a job."""

import json
import time

from tests.processes import write_program

TASKS = 3
ROLLOUT = """
from pathlib import Path

async def ask(document, generate):
    if Path("bad").exists() and document.text == "text 1":
        raise ValueError("bad")
    return await generate({"messages": [{"role": "user", "content": document.text}]})
"""


def completed(folder):
    return sorted(int(path.name) for path in (folder / "logs/completions").iterdir())


def enter(folder, monkeypatch, answer, path):
    """The folder has input for each of TASKS tasks, and a rollout; scontrol notes what it is asked, and answers.

    Array 17 has 17 as its own job number, too.

    Args:
        answer: a command of the shell.
        path: where other programs are.
    """
    (folder / "input").mkdir()
    (folder / "my_rollout.py").write_text(ROLLOUT)
    write_program(folder / "tools/scontrol", f'#!/bin/sh\necho "$@" >> {folder}/asked\n{answer}\n')
    for rank in range(TASKS):
        (folder / f"input/{rank}.jsonl").write_text(
            json.dumps({"text": f"text {rank}", "id": f"{rank}"}) + "\n"
        )
    monkeypatch.setenv("PATH", f"{folder}/tools:{path}")
    for name, value in (
        ("JOB_ID", "17"),
        ("ARRAY_JOB_ID", "17"),
        ("ARRAY_TASK_ID", "0"),
        ("NODELIST", "here"),
        ("JOB_END_TIME", str(time.time() + 3600)),
    ):
        monkeypatch.setenv(f"SLURM_{name}", value)
