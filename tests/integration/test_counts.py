"""What a run does, counted: no figure here depends on how fast the machine is."""

import asyncio
import gc
import os
import threading
import tracemalloc
from collections import Counter
from contextlib import nullcontext, suppress

import pytest
from datatrove.data import Document

from datatrove_ckpt.checkpoint import open_checkpoint
from datatrove_ckpt.checkpoint.chunks import ChunkSlot
from datatrove_ckpt.checkpoint.journal import FinishedDocument
from datatrove_ckpt.checkpoint.open_checkpoint import OpenCheckpoint, RankFiles
from datatrove_ckpt.checkpoint.request_cache import CachedRequest
from datatrove_ckpt.errors import DocumentFailed
from datatrove_ckpt.generation.prefetch import SourceDocument
from datatrove_ckpt.generation.requests import DocumentAnswers, RolloutRequests
from datatrove_ckpt.output.chunk_writing import ChunkOutput
from datatrove_ckpt.testing import FakeServer
from tests.crashes import WatchedDisk, disk_in_place
from tests.jobs import ask, chat, documents, ids, runner
from tests.patience import until, until_async

# The disk --------------------------------------------------------------------------------------

COMMIT = """
1: sync chunk_00000.jsonl
2: create 00000_chunk_00000.jsonl, write 00000_chunk_00000.jsonl, sync 00000_chunk_00000.jsonl
3: write publishing.jsonl, sync publishing.jsonl, link 00000_chunk_00000.jsonl, sync output
4: write dead_letters.jsonl, sync dead_letters.jsonl, write commits.jsonl, sync commits.jsonl
5: create 00000.txt.new, write 00000.txt.new, sync 00000.txt.new, rename 00000.txt, sync last_chunk
5: remove chunk_00000.jsonl, commit replay.sqlite3
6: remove replay.sqlite3
"""
"""The steps in docs/internals/recovery.md, and the end of the task."""


def test_a_chunk_is_committed_by_these_effects_in_this_order(tmp_path, server):
    """A sync that is missing would be found after a power loss only."""

    async def one_of_two(document, generate):
        if document.id == "id 0":
            raise ValueError("no answer")
        return await ask(document, generate)

    step = runner(
        tmp_path, server, one_of_two, sync_seconds=3600.0, on_document_error="dead_letter"
    )
    with disk_in_place(disk := WatchedDisk()):
        step.run(documents(2))
    steps = [effect for line in COMMIT.strip().splitlines() for effect in line[3:].split(", ")]
    began = disk.happened.index(steps[0])
    names = {effect.split(" ")[1] for effect in steps} - {"output"}
    happened = [
        effect
        for effect in disk.happened[began:]
        if effect == "sync output" or effect.split(" ")[1] in names
    ]
    assert happened == steps


# Memory ----------------------------------------------------------------------------------------

OF_A_DOCUMENT = (
    Document,
    SourceDocument,
    DocumentAnswers,
    RolloutRequests,
    FinishedDocument,
    CachedRequest,
    ChunkSlot,
)


@pytest.fixture
def no_collector():
    """Whatever only the garbage collector would free or close stays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_documents_that_are_done_leave_nothing_in_memory(tmp_path):
    """Measured while the last document is in work, and all chunks before it are committed."""
    number = 100
    size = 60_000
    commits = tmp_path / "checkpoints/00000/commits.jsonl"

    def read():
        for index in range(number + 1):
            yield Document(text=f"{index:06d}" * (size // 6), id=f"id {index}")

    def chunks():
        return commits.read_bytes().count(b"\n") if commits.exists() else 0

    async def rollout(document, generate):
        if document.id == "id 0":
            tracemalloc.start()  # all is imported
        answer = await generate(chat(document.id))
        if document.id == f"id {number}":
            await until_async(lambda: chunks() == 5)
            found = (type(one) for one in gc.get_objects() if isinstance(one, OF_A_DOCUMENT))
            left.append((Counter(found), tracemalloc.get_traced_memory()[0]))
        return answer

    left = []
    settings = {"max_concurrent_documents": 4}
    try:
        with FakeServer() as server:
            step = runner(
                tmp_path,
                server,
                rollout,
                records_per_chunk=20,
                config=settings,
                replay_check=False,  # it keeps up to 64 documents until they are recorded
            )
            step.run(read())
    finally:
        tracemalloc.stop()
    ((objects, memory),) = left
    assert max(objects.values()) < 5, objects  # local variables of threads hold the newest
    assert memory < 0.3 * number * size


# A slow disk, a slow output ---------------------------------------------------------------------


async def asks_sixty_times(document, generate):
    answers = [await generate(chat(f"question {number}")) for number in range(60)]
    return [answer.text for answer in answers]


@pytest.mark.parametrize(
    "slow, limit, rollout, per_chunk",
    [
        ((RankFiles, "write"), ("MAX_BACKLOG_BYTES", 3000), ask, 60),
        ((RankFiles, "write"), ("MAX_BACKLOG_BYTES", 3000), asks_sixty_times, 60),
        ((ChunkOutput, "write_chunk"), ("MAX_PUBLISHING", 4), ask, 1),
    ],
)
def test_no_document_is_begun_and_no_request_sent_while_too_much_waits_to_be_saved(
    tmp_path, monkeypatch, server, slow, limit, rollout, per_chunk
):
    """Else memory, or the disk with its journals, would fill.

    What is slow stands still until the run waits for it, or has read all its input.
    """
    may_go_on = threading.Event()
    asked = []

    def release():
        if not may_go_on.is_set():
            asked.append(len(server.payloads))
            may_go_on.set()

    def before(owner, name, action):
        plain = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given: action(*given) or plain(*given))

    def before_waits(name):
        plain = getattr(OpenCheckpoint, name).fget

        def look(checkpoint):
            is_behind = plain(checkpoint)
            if is_behind:
                release()
            return is_behind

        monkeypatch.setattr(OpenCheckpoint, name, property(look))

    before(*slow, lambda *given: may_go_on.wait(60) and None)
    before_waits("congested")
    before_waits("publishing_behind")
    before(OpenCheckpoint, "end_of_input", lambda *given: release())
    monkeypatch.setattr(open_checkpoint, *limit)
    settings = {"max_concurrent_documents": 4}
    number = 60 if rollout is ask else 1
    step = runner(tmp_path, server, rollout, records_per_chunk=per_chunk, config=settings)
    step.run(documents(number))
    assert asked[0] <= 10
    assert (len(server.payloads), len(ids(tmp_path))) == (60, number)


# Requests in flight ----------------------------------------------------------------------------


class GatedServer(FakeServer):
    """Answers nothing until so many requests are in flight, and counts the most that ever were.

    A client that sends fewer gets its answers after a minute, and the count shows it.
    """

    def __init__(self, opens_at):
        super().__init__()
        self.in_flight = 0
        self.most = 0
        self._opens_at = opens_at
        self._is_open = asyncio.Event()

    async def _answered(self, request):
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        if self.in_flight == self._opens_at:
            self._is_open.set()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(60):
                    await self._is_open.wait()
            self._is_open.set()
            return await super()._answered(request)
        finally:
            self.in_flight -= 1


async def asks_four_times(document, generate):
    answers = [generate(chat(f"{document.text} {number}")) for number in range(4)]
    return [answer.text for answer in await asyncio.gather(*answers)]


@pytest.mark.parametrize(
    "settings, rollout, in_flight",
    [
        ({"max_concurrent_generations": 8}, ask, 8),
        ({"max_concurrent_documents": 3}, ask, 3),
        ({"max_concurrent_documents": 2}, asks_four_times, 8),
        ({"max_concurrent_documents": 2, "rollouts_per_document": 4}, ask, 8),
        ({"max_concurrent_generations": 6}, asks_four_times, 6),
    ],
)
def test_as_many_requests_are_in_flight_as_the_settings_say(tmp_path, settings, rollout, in_flight):
    with GatedServer(in_flight) as server:
        runner(tmp_path, server, rollout, records_per_chunk=50, config=settings).run(documents(40))
    assert server.most == in_flight


# What a task leaves to the next one of its process ---------------------------------------------


async def fails(document, generate):
    raise ValueError("stops the task")


@pytest.mark.parametrize("rollout, why", [(ask, ""), (fails, "stops the task")])
@pytest.mark.usefixtures("no_collector")
def test_a_task_that_has_ended_leaves_no_open_file_and_no_thread(tmp_path, server, rollout, why):
    """A worker runs thousands of tasks. A task that fails has not read all its documents."""

    def run_task(number):
        with pytest.raises(DocumentFailed, match=why) if why else nullcontext():
            runner(tmp_path / f"{number}", server, rollout).run(documents(500 if why else 4))

    def left():
        threads = [thread.name for thread in threading.enumerate()]
        return Counter(threads) + Counter(open_files=sum(1 for _ in os.scandir("/dev/fd")))

    run_task(0)
    before = left()
    for number in range(1, 4):
        run_task(number)
    until(lambda: left() <= before, 60)  # the server closes its side later
