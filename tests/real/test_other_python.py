"""A run goes on after an upgrade of Python: started by this one, continued by others, and finished
by this one again.

    pytest tests/real/test_other_python.py

Installs the other interpreters with the package's dependencies once (see ``environment.py``), and
fails without them.
"""

import json
import os
import sys
from pathlib import Path

import pytest

from datatrove_ckpt.testing import FakeServer
from tests import processes
from tests.jobs import Budget, ids
from tests.real import environment
from tests.user_modules import check_hashes, python
from tests.yaml_jobs import write_input

ROOT = Path(__file__).parents[2]
OTHERS = [minor for minor in (12, 13) if minor != sys.version_info[1]]
DOCUMENTS = 9
# What differs between the trees and the bytecode of the versions: f-strings, comprehensions,
# annotations, docstrings.
SCRIPT = '''
import functools
import json
import sys
from pathlib import Path

from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter

from datatrove_ckpt import InferenceConfig, InferenceRunner, LocalPipelineExecutor

PROMPT = "Rewrite"
WORDS = {"one", "two"}


def payload(text: str, style: "str | None" = None, width: int = 3) -> dict:
    """
    Asks.

        As it is indented here.
    """
    parts = [f"{PROMPT!r:>{width}} {{{text}}} {', '.join(f'{word=}' for word in sorted(WORDS))}"]
    return {"messages": [{"role": "user", "content": "".join(part for part in parts) + f"{style}"}]}


def twice(function):
    @functools.wraps(function)
    async def wrapper(document, generate, **shared):
        return await function(document, generate, **shared)

    return wrapper


@twice
async def rollout(document, generate, style):
    answer = await generate(payload(document.text, style))
    match answer.text:
        case str(text) if text:
            return {"answer": text}


runner = InferenceRunner(
    functools.partial(rollout, style="plainly"),
    InferenceConfig("endpoint", "m", endpoint_url=sys.argv[1], max_concurrent_documents=1),
    JsonlWriter("output", "${rank}_${chunk_index}.jsonl", compression=None),
    shared_context={},
    checkpoints_local_dir="checkpoints",
    records_per_chunk=2,
)
LocalPipelineExecutor([JsonlReader("input"), runner], logging_dir="logs", workers=1).run()
'''

pytestmark = pytest.mark.timeout(900)  # the first run also installs


def test_a_run_continues_on_other_pythons(tmp_path):
    others = [environment.other_python(f"3.{minor}", python(minor)) for minor in OTHERS]
    for minor, other in zip(OTHERS, others, strict=True):
        check_hashes(minor, other)
    pythons = [sys.executable, *others, sys.executable]
    write_input(tmp_path, [f"text {number}" for number in range(DOCUMENTS)])
    (tmp_path / "script.py").write_text(SCRIPT)
    budget = Budget()
    with FakeServer(status=budget) as server:
        for number, path in enumerate(pythons, 1):
            last = number == len(pythons)
            budget.left = DOCUMENTS if last else 2
            there = {**os.environ, "PYTHONPATH": str(ROOT)}
            done = processes.run(
                [path, "script.py", server.url], cwd=tmp_path, env=there, timeout=400
            )
            assert done.returncode == (0 if last else 1), f"{path}: {done.stderr[-3000:]}"
            assert last or "ServerRefused" in done.stderr, f"{path}: {done.stderr[-3000:]}"
            answered = server.asked.total() - number + last  # one refusal each
            assert answered == (DOCUMENTS if last else 2 * number)
    assert ids(tmp_path) == [f"id {number}" for number in range(DOCUMENTS)]
    assert "accepted_changes" not in json.loads(
        (tmp_path / "checkpoints/00000/run.json").read_bytes()
    )
