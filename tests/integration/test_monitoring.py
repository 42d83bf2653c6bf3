"""What a run tells others while it works: metrics at a port, and nothing that could hold it up."""

import asyncio

from datatrove_ckpt.config import MonitoringConfig
from tests.jobs import ask, documents, runner
from tests.metrics import PORT, get, host, samples, waited_for

__all__ = ["host"]


def test_a_run_shows_its_numbers_while_it_works_and_at_its_end(tmp_path, host, server):
    seen = {}

    async def rollout(document, generate):
        if document.id == "id 5":
            seen.update(await asyncio.to_thread(waited_for, lambda: running(host)))
        return await ask(document, generate)

    def running(host):
        found = samples(get(host))
        return found if found.get("documents_total") == 5 else None

    settings = MonitoringConfig(run_name="books", metrics_port=PORT, metrics_host=host)
    job = runner(
        tmp_path,
        server,
        rollout,
        config={
            "max_concurrent_generations": 1,
            "max_concurrent_documents": 2,
            "prices": {"prompt": 0, "completion": 1_000_000},
        },
        monitoring=settings,
    )
    job.run(documents(6), 3, 7)
    assert seen["rank_state running"] == 1
    assert seen["requests_total answered"] == 5
    assert seen["rank_cost"] == seen["tokens_total completion"] > 0
    found = samples(get(host), run="books", rank="3")
    assert found["rank_state done"] == 1
    assert found["rank_documents written"] == found["requests_total answered"] == 6
    assert found["rank_tokens completion"] == found["tokens_total completion"] > 0
    assert found["rank_cost"] == found["tokens_total completion"]
    assert found["requests_in_flight"] == 0
