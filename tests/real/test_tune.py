"""``datatrove-ckpt tune`` with a real vLLM on a CPU.

pytest --override-ini addopts= tests/real/test_tune.py
"""

from pathlib import Path

import pytest
import yaml

from tests.real import environment
from tests.real.vllm_servers import ENVIRONMENT
from tests.yaml_jobs import write_rows

pytestmark = pytest.mark.timeout(900)


@pytest.mark.full
def test_of_two_candidates_that_with_more_places_wins(here, command, monkeypatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    write_rows("rows.jsonl", [{"id": str(n), "text": f"Row {n}."} for n in range(24)])
    flags = {"dtype": "bfloat16", "enforce-eager": True, "max-num-seqs": 1}
    settings = {
        "model": environment.model(),
        "server_type": "vllm",
        "server_python": environment.vllm_python(),
        "model_kwargs": flags,
        "model_max_context": 512,
        "use_chat": False,
        "rollout": "CompletionRollout",
        "input": "rows.jsonl",
        "prompt": "{text} Tell a story:",
        "max_tokens": 24,
        "run_folder": "run",
    }
    Path("job.yaml").write_text(yaml.safe_dump(settings))
    more = "--try={model_kwargs: {max_num_seqs: 16}}"
    said = command("tune", "job.yaml", "--sample=24", more).out
    found = yaml.safe_load(said.partition("The best settings of the model:\n")[2])
    del flags["max-num-seqs"]
    assert found == {"model_kwargs": {**flags, "max_num_seqs": 16}}
    Path("job.yaml").write_text(yaml.safe_dump({**settings, **found}))
    command("run", "job.yaml")
    assert command.json("status", "run")["totals"]["work"]["sent"] == 0
