"""A rollout that asks two models."""

from datatrove_ckpt.testing import FakeServer
from tests import jobs
from tests.jobs import chat, config


async def generate_and_judge(document, generate):
    written = await generate(chat(f"Write {document.text}"))
    judged = await generate.judge(chat(f"Judge {written.text}"))
    return {"text": written.text, "score": judged.text}


def says(name):
    return FakeServer(lambda payload, times: f"{name} on {payload['messages'][-1]['content']}")


def runner(folder, writes, judges, rollout=generate_and_judge, **changes):
    """``writer`` and ``judge`` hold changes to their configs."""
    models = {
        "writer": config(writes, **changes.pop("writer", {})),
        "judge": config(judges, **changes.pop("judge", {})),
    }
    return jobs.runner(folder, models, rollout, **changes)
