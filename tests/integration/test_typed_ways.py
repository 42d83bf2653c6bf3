"""``generate.embed`` and its like, in runs: what each engine is asked, what comes back, what is
kept.
"""

import numpy as np
import pytest

from datatrove_ckpt.config.inference_config import ENGINES
from datatrove_ckpt.errors import CkptError, ConfigError
from tests.jobs import Budget, rows, run_job, texts_of
from tests.typed_answers import DIMENSIONS, PATHS, TEXTS, ranking, vector_of


@pytest.fixture
def numbers(server):
    server.paths = PATHS
    return server


def test_wrong_arguments_stop_the_rank_and_name_the_line(numbers, tmp_path):
    async def ask(document, generate):
        return await generate.embed(7)

    message = r"generate\.embed takes texts, and not a int, in .*test_typed_ways\.py, line"
    with pytest.raises(ConfigError, match=message):
        run_job(tmp_path, numbers, 1, ask)
    assert not numbers.payloads


def engine_config(server, name, monkeypatch):
    """The endpoint's ways are those of another engine."""
    monkeypatch.setattr(type(ENGINES["endpoint"]), "ways", ENGINES[name].ways)


def test_a_way_that_an_engine_lacks_stops_the_rank(numbers, tmp_path, monkeypatch):
    async def ask(document, generate):
        return await generate.classify(document.text)

    engine_config(numbers, "llamacpp", monkeypatch)
    with pytest.raises(
        ConfigError, match=r"has no generate\.classify; these have: vllm, sglang, .*, in "
    ):
        run_job(tmp_path, numbers, 1, ask)
    assert not numbers.payloads


def sglang_ranking(payload):
    assert payload["return_documents"] is False
    return [
        {
            "index": row["index"],
            "score": row["relevance_score"],
            "meta_info": {"prompt_tokens": 1, "id": "x"},
        }
        for row in ranking(payload)["results"]
    ]


@pytest.mark.parametrize("name", [name for name in ENGINES if "score" in ENGINES[name].ways])
def test_each_engine_is_asked_in_its_form(numbers, tmp_path, monkeypatch, name):
    async def ask(document, generate):
        assert (await generate.embed(document.text)).tolist() == np.array(
            vector_of("text 0"), np.float32
        ).tolist()
        assert len(await generate.score(document.text, TEXTS)) == 3
        if "classify" in ENGINES[name].ways:
            assert (await generate.classify(document.text)).label == "good"
        return "done"

    engine_config(numbers, name, monkeypatch)
    if name == "sglang":
        numbers.paths = {**PATHS, "/v1/rerank": sglang_ranking}
        del numbers.paths["/score"], numbers.paths["/classify"]
    run_job(tmp_path, numbers, 1, ask)
    assert len(rows(tmp_path)) == 1


def test_an_array_is_a_list_in_jsonl_that_reads_back_to_the_same_float32(numbers, tmp_path):
    """Its shortest digits: 0.1, and not the 0.10000000149011612 of the double that is nearest to
    it.
    """

    async def ask(document, generate):
        document.metadata["deep"] = {"vectors": [np.array([0.1, 1e-45, 3.4028235e38], np.float32)]}
        return np.array([[1, 2], [3, 4]], np.int16)

    run_job(tmp_path, numbers, 1, ask)
    line = (tmp_path / "output/00000_chunk_00000.jsonl").read_bytes()
    assert (
        b'{"deep":{"vectors":[[0.1,1e-45,3.4028235e+38]]},"rollout_results":[[[1,2],[3,4]]]}'
        in line
    )


@pytest.mark.parametrize("texts_per_request", [1, 2])
def test_a_vector_of_another_length_stops_the_rank_and_is_not_kept(
    numbers, tmp_path, texts_per_request
):
    """As one of several servers gives it that has another model."""
    others = True

    async def ask(document, generate):
        shorter = await generate.embed(document.text, dimensions=2)  # with params of its own
        return [shorter, await generate.embed([document.text, document.id])]

    def answer(payload):
        texts = texts_of(payload)
        length = 3 if others and "text 1" in texts else DIMENSIONS
        vectors = [vector_of(text)[: payload.get("dimensions", length)] for text in texts]
        return {"data": [{"index": at, "embedding": vector} for at, vector in enumerate(vectors)]}

    numbers.paths = {"/v1/embeddings": answer}
    config = {"max_concurrent_documents": 1, "texts_per_request": texts_per_request}
    with pytest.raises(CkptError, match=r"3 numbers, and before with 4, .* run again"):
        run_job(tmp_path, numbers, 2, ask, config=config)
    others = False
    run_job(tmp_path, numbers, 2, ask, config=config)
    for row in rows(tmp_path):
        ((shorter, both),) = row["metadata"]["rollout_results"]
        assert [len(shorter), *map(len, both)] == [2, DIMENSIONS, DIMENSIONS]


def test_a_vector_of_another_length_than_that_of_an_earlier_attempt_stops_the_rank(
    numbers, tmp_path
):
    async def ask(document, generate):
        return await generate.embed([document.text, "other"])

    numbers._status = budget = Budget()
    budget.left = 1
    config = {"max_concurrent_documents": 1}
    with pytest.raises(CkptError, match="401"):
        run_job(tmp_path, numbers, 1, ask, config=config)
    budget.left = 9
    numbers.paths = {"/v1/embeddings": lambda payload: {"data": [{"index": 0, "embedding": [0.5]}]}}
    with pytest.raises(CkptError, match="1 number, and before with 4"):
        run_job(tmp_path, numbers, 1, ask, config=config)
    assert budget.left == 8
