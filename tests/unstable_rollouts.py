"""Rollouts of users that may not repeat themselves, and a command line that runs each of them.

Its arguments are a server's URL and a folder. It runs the half of 24 documents, or the rest where FOLDER holds the half, and prints what the run
has raised, as JSON by the rollout's name. Requests have the WORD of the environment.
"""

import asyncio
import datetime
import json
import os
import random
import sys
import tempfile
import time
import urllib.request
import uuid
from contextlib import suppress
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace

from datatrove_ckpt.errors import CheckpointMismatch, GoalReached
from datatrove_ckpt.generation import replay
from tests.jobs import chat, documents, runner

RUN = uuid.uuid4()
NOW = datetime.datetime.now().isoformat()
SECONDS = time.time()
FOLDER = tempfile.mkdtemp()
TAGS = {"alpha", "beta", "gamma", "delta", "epsilon"}
PEOPLE = ["doctor", "pilot", "cook", "judge", "smith", "nurse"]


class Thing:
    pass


THING = Thing()


def word(document):
    return f"{document.text} {os.environ['WORD']}"


def asks(prompt):
    """A rollout of one request."""

    async def rollout(document, generate):
        return await generate(chat(f"{prompt(document)} {word(document)}"))

    return rollout


def persona(document):
    return f"{random.choice(PEOPLE)} {random.sample(PEOPLE, 2)}"


async def once(document, generate):
    found = await generate.once("search", lambda: [document.text, random.random()])
    return await generate(chat(f"{found} {word(document)}"))


async def user(document, generate):
    return await generate(chat(word(document), user=str(os.getpid())))


async def gather(document, generate):
    payloads = [chat(f"{number} {word(document)}") for number in range(4)]
    answers = await asyncio.gather(*map(generate, payloads))
    return [answer.text for answer in answers]


async def mutates(document, generate):
    document.metadata["seen"] = os.environ["WORD"]
    document.text += "!"
    return await generate(chat(document.text))


async def turns(document, generate):
    messages = chat(word(document))["messages"]
    for number in range(3):
        answer = await generate({"messages": messages})
        messages = [
            *messages,
            {"role": "assistant", "content": answer.text},
            {"role": "user", "content": f"go on {number}"},
        ]
    return answer


def agent(url, text):
    body = json.dumps({"model": "any", **chat(text)}).encode()
    request = urllib.request.Request(
        f"{url}/chat/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]["content"]


async def url_agent(document, generate):
    async with generate.url() as url:
        return await asyncio.to_thread(agent, url, word(document))


async def of_the_result(document, generate):
    return f"{(await generate(chat(document.text))).text} {os.environ['WORD']}"


async def swallows(document, generate):
    try:
        return await generate(chat(word(document)))
    except Exception:
        return "failed"


async def two_models(document, generate):
    answer = await generate(chat(word(document), temperature=0.5))
    return await generate(chat(f"Judge: {answer.text}", temperature=0))


KINDS = {
    "plain": asks(lambda document: ""),
    "random": asks(lambda document: random.random()),
    "seeded by id": asks(lambda document: random.Random(document.id).random()),
    "persona": asks(persona),
    "uuid at import": asks(lambda document: RUN),
    "date": asks(lambda document: datetime.date.today()),
    "time at import": asks(lambda document: NOW),
    "seconds at import": asks(lambda document: SECONDS),
    "order of a set": asks(lambda document: list(TAGS)),
    "hash": asks(lambda document: hash(document.text)),
    "hash picks": asks(lambda document: ["long", "short", "mid"][hash(document.text) % 3]),
    "object": asks(lambda document: THING),
    "process": asks(lambda document: os.getpid()),
    "folder": asks(lambda document: FOLDER),
    "once": once,
    "user": user,
    "gather": gather,
    "mutates": mutates,
    "turns": turns,
    "agent": url_agent,
    "result": of_the_result,
    "swallows": swallows,
    "two models": two_models,
}


def main():
    url, name = sys.argv[1:]
    raised = {}
    # What is refused may not depend on how busy the machine is.
    replay.Replays.check = partialmethod(replay.Replays.check, 60.0)
    if os.environ["WORD"] == "NEW":  # a new process for each would find the same
        replay.repeats_itself = lambda step, root: True
    for kind, rollout in KINDS.items():
        folder = Path(name) / kind
        settings = {} if folder.exists() else {"until": 12}
        step = runner(
            folder,
            SimpleNamespace(url=url),
            rollout,
            records_per_chunk=4,
            config={"max_concurrent_generations": 8},
            **settings,
        )
        try:
            with suppress(GoalReached):
                step.run(documents(24))
        except CheckpointMismatch as error:
            raised[kind] = str(error)
    print(json.dumps(raised))
