"""Agents of others inside a rollout, killed after each of their requests: pip install openai
pydantic-ai-slim[openai] smolagents[openai].
"""

import asyncio
import gc

import pytest

from datatrove_ckpt.errors import CkptError
from datatrove_ckpt.testing import FakeServer
from tests.jobs import Budget, rows, run_job

openai = pytest.importorskip("openai")
pydantic_ai = pytest.importorskip("pydantic_ai")
models = pytest.importorskip("pydantic_ai.models.openai")
providers = pytest.importorskip("pydantic_ai.providers.openai")
smolagents = pytest.importorskip("smolagents")
tool = smolagents.tool  # it knows its decorator by this name

CALL = {"id": "c1", "type": "function"}


async def by_openai(document, url):
    async with openai.AsyncOpenAI(base_url=url, api_key="unused") as client:
        messages = [{"role": "user", "content": document.text}]
        (model,) = (await client.models.list()).data
        whole = await client.chat.completions.create(model=model.id, messages=messages)
        messages.append({"role": "assistant", "content": whole.choices[0].message.content})
        parts = []
        stream = await client.chat.completions.create(model="any", messages=messages, stream=True)
        async for chunk in stream:
            parts.append(chunk.choices[0].delta.content)
    return "".join(parts)


async def by_pydantic_ai(document, url):
    model = models.OpenAIChatModel(
        "any", provider=providers.OpenAIProvider(base_url=url, api_key="unused")
    )
    agent = pydantic_ai.Agent(model)

    @agent.tool_plain
    def look(word: str) -> str:
        """Looks up a word."""
        return f"found {word}"

    return (await agent.run(document.text)).output


@tool
def look(word: str) -> str:
    """Looks up a word.

    Args:
        word: the word.
    """
    return f"found {word}"


async def by_smolagents(document, url):
    model = smolagents.OpenAIServerModel("any", api_base=url, api_key="unused")
    agent = smolagents.ToolCallingAgent([look], model, max_steps=3, verbosity_level=0)
    return str(await asyncio.to_thread(agent.run, document.text))


class Model:
    """Calls ``look`` first, and answers when it was found."""

    def __init__(self):
        self.budget = Budget()
        self.server = FakeServer(self.answer, self.budget)
        self.server.usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}

    def answer(self, payload, times):
        names = [one["function"]["name"] for one in payload.get("tools", ())]
        found = "found rain" in str(payload["messages"])
        self.server.message = {}
        function = None
        if "look" in names and not found:
            function = {"name": "look", "arguments": '{"word": "rain"}'}
        elif "final_answer" in names:
            function = {"name": "final_answer", "arguments": '{"answer": "it rained"}'}
        if function is not None:
            self.server.message = {"tool_calls": [{**CALL, "function": function}]}
        return f"{len(payload['messages'])} messages"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("agent", [by_openai, by_pydantic_ai, by_smolagents])
def test_an_agent_is_killed_after_each_request_and_pays_none_twice(tmp_path, agent):
    async def rollout(document, generate):
        async with generate.url() as url:
            return await agent(document, url)

    model = Model()
    stops = 0
    with model.server as server:
        model.budget.left = 1000
        (tmp_path / "undisturbed").mkdir()
        run_job(tmp_path / "undisturbed", server, 1, rollout)
        expected = rows(tmp_path / "undisturbed")
        asked = server.asked.copy()
        server.asked.clear()
        for _ in range(asked.total()):
            model.budget.left = 1
            try:
                run_job(tmp_path, server, 1, rollout)
            except CkptError:
                stops += 1
    assert stops == asked.total() - 1 > 0  # each is answered once, and the one after it refused
    assert rows(tmp_path) == expected
    assert server.asked.total() == asked.total() + stops
    gc.collect()  # libraries leave connections open; another test would get their warnings
