"""FakeServer's count of questions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datatrove.data import Document

from datatrove_ckpt.testing import FakeServer
from tests.jobs import runner

_IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


@pytest.mark.parametrize(
    ("content", "question"),
    [
        ([{"type": "text", "text": "Say "}, {"type": "text", "text": "it"}], "Say it"),
        ([_IMAGE], '[{"image_url":{"url":"data:"},"type":"image_url"}]'),
        (None, "null"),
    ],
)
def test_content_may_be_a_list_of_parts(tmp_path: Path, content: object, question: str) -> None:
    async def rollout(document: Document, generate: Any) -> Any:
        return await generate({"messages": [{"role": "user", "content": content}]})

    with FakeServer() as server:
        runner(tmp_path, server, rollout).run([Document(text="text", id="id")])
        assert dict(server.asked) == {question: 1}
