"""FakeServer's count of questions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datatrove.data import Document

from datatrove_ckpt.testing import FakeServer
from tests.jobs import runner


def test_content_may_be_a_list_of_parts(tmp_path: Path) -> None:
    content = [{"type": "text", "text": "Say "}, {"type": "text", "text": "it"}]

    async def rollout(document: Document, generate: Any) -> Any:
        return await generate({"messages": [{"role": "user", "content": content}]})

    with FakeServer() as server:
        runner(tmp_path, server, rollout).run([Document(text="text", id="id")])
        assert dict(server.asked) == {"Say it": 1}
