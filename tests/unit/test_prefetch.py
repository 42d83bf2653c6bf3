"""The documents of a rank, as the event loop gets them from the reader's thread."""

import asyncio
import threading

import pytest
from datatrove.data import Document

from datatrove_ckpt.checkpoint.recovery import ResumePoint
from datatrove_ckpt.errors import CheckpointMismatch
from datatrove_ckpt.generation import prefetch
from datatrove_ckpt.generation.prefetch import DocumentSource
from datatrove_ckpt.output.document_codec import as_read, fingerprint


@pytest.mark.parametrize(
    "limit, text, held",
    [(("_BUFFER_DOCUMENTS", 10), "", 10), (("_BUFFER_BYTES", 1000), "x" * 600, 2)],
)
async def test_the_reader_is_ahead_by_what_the_buffer_holds_and_no_further(
    monkeypatch, limit, text, held
):
    """All that it holds is taken at once: a change of threads for each document would cost more
    than its reading.
    """
    monkeypatch.setattr(prefetch, *limit)
    is_full = threading.Event()

    def documents():
        for index in range(100):
            if index == held:
                is_full.set()
            yield Document(text=text, id=f"{index}")

    batches = DocumentSource(documents()).batches(ResumePoint())
    first = asyncio.create_task(anext(batches))
    await asyncio.sleep(0)
    assert is_full.wait(60)
    sizes = [len(await first)]
    async for batch in batches:
        sizes.append(len(batch))
    assert sum(sizes) == 100
    assert max(sizes) == held


async def test_a_rank_that_ends_while_its_reader_finds_the_buffer_full_leaves_no_thread(
    monkeypatch,
):
    has_looked = threading.Event()

    class ClosedMeanwhile(threading.Event):
        def clear(self):
            has_looked.wait(60)
            source.close()
            super().clear()

    monkeypatch.setattr(prefetch, "_BUFFER_DOCUMENTS", 0)
    source = DocumentSource([Document(text="", id="0")])
    source._room = ClosedMeanwhile()
    before = {*threading.enumerate()}
    reading = asyncio.create_task(anext(source.batches(ResumePoint())))
    await asyncio.sleep(0)
    has_looked.set()
    for thread in {*threading.enumerate()} - before:
        thread.join(5)
        assert not thread.is_alive()
    reading.cancel()


@pytest.mark.parametrize("is_changed", [False, True])
async def test_a_reader_that_cannot_seek_compares_the_last_document_of_each_chunk(is_changed):
    documents = [Document(text=f"text {index}", id=f"{index}") for index in range(6)]
    milestones = {ordinal: fingerprint(as_read(documents[ordinal]).data) for ordinal in (1, 3)}
    if is_changed:
        documents[1].text = "another text"
    source = DocumentSource(documents)
    point = ResumePoint(next_chunk=2, next_ordinal=4, milestones=milestones)
    left = [one.id async for batch in source.batches(point) for one in batch]
    if is_changed:
        assert isinstance(source.error, CheckpointMismatch)
        assert "Document 1 of" in str(source.error)
    else:
        assert left == ["4", "5"]
