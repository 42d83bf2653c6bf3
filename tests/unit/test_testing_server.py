"""FakeServer's count of questions."""

from datatrove.data import Document

from tests.jobs import runner


def test_content_may_be_a_list_of_parts(tmp_path, server):
    content = [{"type": "text", "text": "Say "}, {"type": "text", "text": "it"}]

    async def rollout(document, generate):
        return await generate({"messages": [{"role": "user", "content": content}]})

    runner(tmp_path, server, rollout).run([Document(text="text", id="id")])
    assert dict(server.asked) == {"Say it": 1}
