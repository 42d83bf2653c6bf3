"""A run that meets each kind of document, stops, and goes on: its last line, its card, its stats.

No time passes in it: the clocks of the package stand still.
"""

import json
import re
from pathlib import Path

from datatrove_ckpt.checkpoint import clock
from datatrove_ckpt.inference.client import client
from datatrove_ckpt.testing import FakeServer
from tests.golden import hold
from tests.jobs import Budget
from tests.yaml_jobs import endpoint, job_yaml, write_job

SETTINGS = (
    ", max_concurrent_generations: 1, max_concurrent_documents: 1, prices: {prompt: 1, completion: 2, cached: 0.5}"
    ", default_generation_params: {service_tier: flex}"
)
USAGE = {
    "prompt_tokens": 40,
    "completion_tokens": 25,
    "prompt_tokens_details": {"cached_tokens": 16},
    "completion_tokens_details": {"reasoning_tokens": 5},
}
STEP = """\
          records_per_chunk: 2
          on_document_error: dead_letter
"""
TEXTS = (("a", "b", "bad", "c", "loop", "d"), ("e", "empty", "f", "bad g"))
ANSWERS = {"Say loop": "again and again and " * 60, "Say empty": ""}


class Status(Budget):
    """Refuses texts that are bad, fails once at the others, and refuses the key after a while."""

    def __call__(self, payload, times):
        question = payload["messages"][-1]["content"]
        if "bad" in question:
            return 400
        if times == 0 and question in ("Say b", "Say f"):
            return 503
        return super().__call__(payload, times)


def answer(payload, times):
    return ANSWERS.get(payload["messages"][-1]["content"], "so be it")


def test_a_run_that_was_stopped_once(here, command, monkeypatch, sleeps):
    monkeypatch.setattr(clock, "_wall", lambda: 1_800_000_000.0)
    monkeypatch.setattr(clock, "_monotonic", lambda: 0.0)
    monkeypatch.setattr("time.time", lambda: 1_800_000_000.0)
    # A rejection is probed at once, whatever else is answered.
    monkeypatch.setattr(client, "_ANSWERS_WITHIN", 0.0)
    monkeypatch.setattr(client, "PROBE_INTERVAL", 0.0)
    status = Status()
    with FakeServer(answer, status) as server:
        server.usage = USAGE
        job = job_yaml(endpoint(server) + SETTINGS, 2).replace(
            "{data_folder: input}", "{data_folder: input, max_skipped: null}"
        )
        write_job(here, job + STEP, *TEXTS)
        with (here / "input/0.jsonl").open("a") as file:
            file.write('no JSON\n{"id": "x"}\n')
        names = {"URL": server.url}
        status.left = 2
        stopped = command("run", "job.yaml", code=1)
        assert "401" in stopped.err
        status.left = 99
        said = command("run", "job.yaml").out
        hold("numbers", "run: last line", said.splitlines()[-1], **names)
        hold("numbers", "run: card", Path("card.md").read_text(), **names)
        stats = json.loads(Path("logs/stats.json").read_text())
        shown = [
            step["stats"] for step in stats if "InferenceRunner" in step["name"] or step["stats"]
        ]
        hold("numbers", "run: stats", json.dumps(shown, indent=0), **names)
        log = "".join(path.read_text() for path in sorted(Path("logs/logs").glob("*.log")))
        ends = re.findall(r"Task \d: \d+ of .*", log)
        hold("numbers", "run: logs", "\n".join(ends), **names)
        hold("numbers", "run: status", command("status", "checkpoints"), **names)
        found = json.loads(command("status", "checkpoints", "--json"))
        for key in ("work", "counts"):
            hold("numbers", f"run: {key}", json.dumps(found["totals"][key], indent=0), **names)
        retried = command("run", "job.yaml", "--retry-dead-letters", code=None).out
        hold("numbers", "run: retry", retried.splitlines()[-1], **names)
