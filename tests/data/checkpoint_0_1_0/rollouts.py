"""The rollouts of the checkpoints in this folder, which release 0.1.0 made. A change of code here breaks them."""

from __future__ import annotations

import functools
from typing import Any

PROMPT = "Rewrite: {}"
SEEN: list[str] = []


def payload(prompt: str, text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt.format(text)}]}


def make(times: int) -> Any:
    async def rollout(document: Any, generate: Any, style: str = "plain") -> Any:
        """Asks twice: what the document says, and for another style."""
        first = await generate(payload(PROMPT, document.text * times))
        second = await generate(payload("Again, %s: {}" % style, first.text))  # noqa: UP031
        return [first.text, second.text]

    return rollout


class Asker:
    def __init__(self, words: int) -> None:
        self.words = words
        self.clean = payload

    async def __call__(self, document: Any, generate: Any) -> Any:
        first = await generate(self.clean(PROMPT, document.text[: self.words]))
        second = await generate(self.clean("Again: {}", first.text))
        return [first.text, second.text]


function = make(2)
partial = functools.partial(make(2), style="fancy")
instance = Asker(40)
