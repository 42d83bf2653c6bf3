"""``seed``: each request has its own, and the same one when it is sent again."""

import asyncio

from datatrove.data import Document

from datatrove_ckpt.generation.requests import request_seed
from tests.jobs import ask, chat, documents, run_job, runner


async def twice(document, generate):
    """Two equal requests, and one that differs."""
    same = chat(document.text)
    return [
        answer.text
        for answer in await asyncio.gather(generate(same), generate(same), generate(chat("other")))
    ]


def seeds(server):
    return [one["seed"] for one in server.payloads]


def test_each_request_has_a_seed_of_its_own_also_of_equal_documents(tmp_path, server):
    given = [*documents(2), Document(text="a", id="same"), Document(text="a", id="same")]
    runner(tmp_path, server, twice, config={"seed": 7, "rollouts_per_document": 2}).run(given)
    assert len(seeds(server)) == 24 == len(set(seeds(server)))
    assert all(0 <= seed < 2**31 for seed in seeds(server))


def test_a_payloads_own_seed_is_left_as_it_is(tmp_path, server):
    async def rollout(document, generate):
        return await generate(chat(document.text, seed=1))

    run_job(tmp_path / "a", server, 2, rollout, config={"seed": 7})
    run_job(
        tmp_path / "b", server, 2, ask, config={"seed": 7, "default_generation_params": {"seed": 1}}
    )
    assert seeds(server) == [1, 1, 1, 1]


def test_seeds_do_not_change_between_releases():
    """Or an upgrade in the middle of a run would ask for other samples, and pay twice."""
    assert request_seed(7, 3, "id", 1, "0123abcd", 2) == 1125260363
