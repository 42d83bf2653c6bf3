"""EmbedRollout, ClassifyRollout and JudgeRollout in runs: killed, resumed, from YAML, and in the
short form.
"""

import gzip
import json
from itertools import count
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from datatrove.pipeline.writers import ParquetWriter

from datatrove_ckpt.config.inference_config import ENGINES
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.generation.run_identity import answering_flags
from datatrove_ckpt.rollouts import ChunkedRollout, ClassifyRollout, EmbedRollout, JudgeRollout
from datatrove_ckpt.testing import FakeServer
from tests.jobs import in_pieces, rows, run_job, runner
from tests.pages import ROOT, blocks, write_documents
from tests.typed_answers import PATHS, all_ways

pytestmark = pytest.mark.usefixtures("code_described_once")

ROLLOUTS = [
    (ClassifyRollout(labels=["bad", "good"], threshold=0.5), 1),
    (JudgeRollout("Sum up {text}", judge_prompt="Rate {answer}", score_pattern="[0-9]+"), 2),
    (all_ways, 6),
    (EmbedRollout(column="vector"), 1),
    (ChunkedRollout("Q {text}", max_chars_per_part=4, carry="conversation"), 2),
]


@pytest.fixture
def ways(server):
    server.paths = PATHS
    return server


def parquet(folder):
    return ParquetWriter(
        str(folder / "output"), "${rank}_${chunk_index}.parquet", expand_metadata=True
    )


@pytest.mark.matrix(("rollout", "requests"), ROLLOUTS)
def test_killed_after_each_answer_it_ends_the_same_and_nothing_is_asked_twice(
    ways, tmp_path, rollout, requests
):
    alone = {"config": {"max_concurrent_documents": 1}}
    run_job(tmp_path / "other", ways, 2, rollout, **alone)
    assert len(ways.payloads) == 2 * requests
    before = len(ways.payloads)
    refused = in_pieces(tmp_path, ways, rollout, **alone)
    assert refused > 0
    assert len(ways.payloads) - before - refused == 2 * requests
    assert rows(tmp_path) == rows(tmp_path / "other")


def test_a_metadata_key_of_a_field_loses_nothing_in_json_lines(ways, tmp_path):
    runner(tmp_path, ways, EmbedRollout(), metadata_key="text")


def test_labels_in_another_order_than_the_models_stop_the_run(ways, tmp_path):
    with pytest.raises(ConfigError, match=r"label 1 is 'bad', but the model's label is 'good'"):
        run_job(tmp_path, ways, 1, ClassifyRollout(labels=["good", "bad"]))


# configs -----------------------------------------------------------------------------------------


def at(server, name=""):
    """Flags with which a config's model, or one of its models, is this server."""
    path = f"--pipeline.1.config{name and '.' + name}"
    settings = {
        "server_type": "endpoint",
        "endpoint_url": server.url,
        "model_kwargs": "null",
        "gpus": "null",
        "tp": 1,
    }
    return [f"{path}.{key}={value}" for key, value in settings.items()]


def test_configs_embed_yaml_runs_as_it_is(ways, here, command):
    write_documents(here)
    command("run", ROOT / "configs/embed.yaml", *at(ways))
    table = pq.read_table("embed_run/output")
    vectors = np.array(table["embedding"].to_pylist())
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(np.ones(3))
    asked = [payload["input"] for payload in ways.payloads]
    assert all(text.startswith("passage: ") and len(text) <= 1500 for text in asked)


def test_configs_judge_yaml_runs_as_it_is(server, here, command):
    write_documents(here)
    server._answer = lambda payload, times: f"Summary of {payload['messages'][-1]['content'][-9:]}"
    scores = iter(["Score: 3", "Fine. Score: 9", "**Score:** 4"])

    def judged(payload, times):
        again = len(payload["messages"]) > 1
        return "Score: 5" if again else next(scores)

    with FakeServer(judged) as judges:
        command("run", ROOT / "configs/judge.yaml", *at(server, "writer"), *at(judges, "judge"))
        assert [len(one.payloads) for one in (server, judges)] == [3, 4]
        assert {payload["temperature"] for payload in judges.payloads} == {0}
        for one, most in ((server, 200), (judges, 100)):
            assert {payload["max_tokens"] for payload in one.payloads} == {most}
    (path,) = Path("judge_run/output").iterdir()
    lines = gzip.decompress(path.read_bytes()).splitlines()
    results = [json.loads(line)["metadata"]["rollout_results"][0] for line in lines]
    assert sorted(result["score"] for result in results) == [4, 5]
    assert all(result["text"].startswith("Summary of") for result in results)


def test_a_model_that_calls_tools_is_asked_each_turn_once(server, tmp_path):
    """The loop of docs/recipes.md. Ids of calls differ in each answer, as servers make them."""
    (block,) = [
        one for one in blocks("python", "docs/recipes.md") if one.text.startswith("# tools.py")
    ]
    names = {}
    exec(block.text, names)
    ids = count()

    def turn(payload, times):
        results = [
            message["content"] for message in payload["messages"] if message["role"] == "tool"
        ]
        call = {
            "id": f"call {next(ids)}",
            "function": {"name": "count", "arguments": '{"word": "text"}'},
        }
        server.message = {} if len(results) == 2 else {"tool_calls": [call]}
        return f"It says so {results[-1]} times." if len(results) == 2 else ""

    server._answer = turn
    refused = in_pieces(tmp_path, server, names["rollout"], config={"max_concurrent_documents": 1})
    assert len(server.payloads) == 2 * 3 + refused
    assert refused == 5
    assert [row["metadata"]["rollout_results"][0]["text"] for row in rows(tmp_path)] == [
        "It says so 1 times."
    ] * 2


def test_another_pooling_is_another_run():
    """What it changes is every vector."""
    given = {"embedding": True, "pooling_type": "cls", "threads": 2}
    assert answering_flags(ENGINES["llamacpp"], given) == {"pooling-type": "cls"}
    given = {"runner": "pooling", "convert": "embed", "pooler-config": {"pooling_type": "MEAN"}}
    assert list(answering_flags(ENGINES["vllm"], given)) == ["convert", "pooler-config"]
