"""The modules of a job whose tasks wait in a queue: what executor.pik names, and the task imports."""

STYLES = {"plain": "plainly"}


def shared():
    return {"style": "plain"}


def keep(data, rank=0, world_size=1):
    for document in data:
        if document.text != "no":
            yield document


async def rollout(document, generate, style):
    return await generate({"messages": [{"role": "user", "content": f"Say {document.text} {STYLES[style]}"}]})


class Asker:
    def __init__(self, times):
        self.times = times

    async def __call__(self, document, generate):
        return [await generate({"prompt": document.text}) for _ in range(self.times)]
