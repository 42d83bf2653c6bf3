"""The replay check: finished documents are recorded, and the rollout of a later start runs on them."""

import asyncio
import os
import random
import socket
import stat
import subprocess
import sys
import threading
import urllib.request
import uuid
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import orjson
import pytest
from datatrove.pipeline.writers import JsonlWriter
from loguru import logger
from xxhash import xxh3_64_intdigest

from datatrove_ckpt import LocalPipelineExecutor
from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.checksummed_lines import checksummed_json, read_checksummed_json
from datatrove_ckpt.checkpoint.history import ReplayResult, parse_line
from datatrove_ckpt.common import redaction
from datatrove_ckpt.errors import CheckpointMismatch, DocumentFailed, GoalReached
from datatrove_ckpt.generation import provider_passes, recorded_documents, replay
from datatrove_ckpt.generation.recorded_documents import RecordedDocuments
from datatrove_ckpt.readers import JsonlReader
from tests.jobs import chat, documents, results, run_job, runner
from tests.provider import FakeProvider
from tests.replays import ONE, first_then, go_on, recorded, says_word, start


@pytest.fixture
def lines():
    found = []
    number = logger.add(lambda message: found.append(str(message)), level="DEBUG")
    yield found
    logger.remove(number)


def void(folder):
    return RecordedDocuments(folder / "checkpoints").void


def content(path):
    return read_checksummed_json(path.read_bytes(), (1,))


def test_finished_documents_are_recorded_for_their_owner_only(tmp_path, server):
    run_job(tmp_path, server, 5, says_word)
    paths = recorded(tmp_path)
    assert sorted(content(path)["ordinal"] for path in paths) == [0, 1, 2, 3, 4]
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths} == {0o600}
    assert stat.S_IMODE(paths[0].parent.stat().st_mode) == 0o700


def test_the_output_is_that_of_a_run_without_the_check(tmp_path, server):
    run_job(tmp_path / "with", server, 5, says_word)
    run_job(tmp_path / "without", server, 5, says_word, replay_check=False)
    assert recorded(tmp_path / "without") == []
    assert results(tmp_path / "with") == results(tmp_path / "without")


def test_of_many_documents_those_with_the_smallest_hashes_stay(tmp_path, server):
    run_job(tmp_path, server, 300, says_word, records_per_chunk=100)
    rank = 0
    hashes = [xxh3_64_intdigest(ordinal.to_bytes(8), rank) for ordinal in range(300)]
    every = sorted(f"{number:016x}.json" for number in hashes)
    assert [path.name for path in recorded(tmp_path)] == every[:64]


def test_a_task_replays_nothing_for_a_record_that_others_have_filled(tmp_path, server, monkeypatch):
    folder = tmp_path / "checkpoints" / "recorded"
    folder.mkdir(parents=True)
    for number in range(64):
        (folder / f"{number:016x}.json").touch()
    written = []
    monkeypatch.setattr(RecordedDocuments, "put", lambda self, documents: written.extend(documents))
    run_job(tmp_path, server, 5, says_word)
    assert written == []


def test_recording_ends_in_the_middle_of_a_batch_when_its_time_is_over(
    tmp_path, server, monkeypatch
):
    monkeypatch.setattr(replay, "_RECORDING_SECONDS", 0.0)
    run_job(tmp_path, server, 40, says_word)
    assert len(recorded(tmp_path)) == 1


def test_a_secret_of_a_payload_is_not_recorded(tmp_path, server):
    async def rollout(document, generate):
        return await generate(
            chat("hello", extra_headers={"Authorization": "Bearer s3cr3t-token-1"})
        )

    run_job(tmp_path, server, 1, rollout)
    assert b"s3cr3t" not in recorded(tmp_path)[0].read_bytes()


def test_a_payload_is_searched_for_secrets_beside_the_event_loop(tmp_path, server, monkeypatch):
    loops = []

    async def rollout(document, generate):
        loops.append(threading.current_thread())
        return await generate(chat(document.text))

    def masked(name, value, is_hashed):
        assert threading.current_thread() not in loops
        return redaction.without_secrets(name, value, is_hashed=is_hashed)

    monkeypatch.setattr(recorded_documents, "without_secrets", masked)
    run_job(tmp_path, server, 3, rollout)
    assert len(recorded(tmp_path)) == 3


def test_another_request_is_refused_with_what_differs(tmp_path, server, monkeypatch):
    monkeypatch.setenv("WORD", "OLD")
    start(tmp_path, server, says_word, monkeypatch)
    sent = len(server.payloads)
    monkeypatch.setenv("WORD", "NEW")
    monkeypatch.setattr(replay, "repeats_itself", lambda step, root: True)
    with pytest.raises(CheckpointMismatch) as refused:
        go_on(tmp_path, server, says_word)
    assert "messages[0].content: 'text " in str(refused.value)
    assert "OLD' -> 'text " in str(refused.value)
    assert "(5 of 5 recorded documents)" in str(refused.value)
    assert len(server.payloads) == sent
    monkeypatch.setenv("WORD", "OLD")
    go_on(tmp_path, server, says_word)


def test_another_result_is_refused(tmp_path, server, monkeypatch):
    async def rollout(document, generate):
        result = await generate(chat(document.text))
        return f"{result.text} {os.environ['WORD']}"

    monkeypatch.setenv("WORD", "OLD")
    start(tmp_path, server, rollout, monkeypatch)
    monkeypatch.setenv("WORD", "NEW")
    monkeypatch.setattr(replay, "repeats_itself", lambda step, root: True)
    with pytest.raises(CheckpointMismatch, match=r"result\.metadata"):
        go_on(tmp_path, server, rollout)


def test_an_accepted_difference_is_in_history_and_job(tmp_path, server, monkeypatch):
    monkeypatch.setenv("WORD", "OLD")
    start(tmp_path, server, says_word, monkeypatch)
    monkeypatch.setenv("WORD", "NEW")
    go_on(tmp_path, server, says_word, accept_changes=True)
    job = content(tmp_path / "checkpoints" / "job.json")
    [change] = job["accepted_changes"]
    assert change["path"] == "messages[0].content"
    assert "field" not in change  # it is no setting
    assert "NEW" in change["new"]
    history = (tmp_path / "checkpoints" / "00000" / "history.jsonl").read_bytes()
    records = [parse_line(line) for line in history.splitlines(keepends=True)]
    [result] = [record for record in records if isinstance(record, ReplayResult)]
    assert "OLD" in result.what
    # The text of the code is the same: it may depend on its process, and is not refused again.
    assert void(tmp_path).startswith("accept_changes is set (document ")


class Effect:
    """What a rollout does besides its requests, and how often it happened."""

    def __init__(self, folder):
        self.path = folder / "effects"
        self.server = socket.create_server(("127.0.0.1", 0))
        weakref.finalize(self, self.server.close)
        self.address = self.server.getsockname()

    @property
    def number(self):
        self.server.setblocking(False)
        connections = 0
        while True:
            try:
                self.server.accept()[0].close()
                connections += 1
            except BlockingIOError:
                break
        written = self.path.read_text().count("x") if self.path.exists() else 0
        return connections + written

    async def connect(self):
        _, writer = await asyncio.open_connection(*self.address)
        writer.close()

    async def write(self):
        with self.path.open("a") as file:
            file.write("x")

    async def run(self):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", f"open({str(self.path)!r}, 'a').write('x')"
        )
        await process.wait()

    async def in_thread(self):
        await asyncio.to_thread(subprocess.run, ["sh", "-c", f"printf x >> {self.path}"])

    async def in_pool_of_threads(self):
        loop = asyncio.get_running_loop()
        connection = await loop.run_in_executor(None, socket.create_connection, self.address)
        connection.close()


@pytest.mark.parametrize("kind", ["connect", "write", "run", "in_thread", "in_pool_of_threads"])
def test_no_side_effect_happens_twice(tmp_path, server, monkeypatch, lines, kind):
    effect = Effect(tmp_path)

    async def rollout(document, generate):
        await getattr(effect, kind)()
        return await generate(chat(document.text))

    start(tmp_path, server, rollout, monkeypatch)
    go_on(tmp_path, server, rollout)
    assert effect.number == 6
    assert void(tmp_path)
    assert recorded(tmp_path) == []
    said = [line for line in lines if "finished documents are not replayed" in line]
    assert len(said) == 1


def test_a_connection_on_a_loop_of_the_user_is_made_once(tmp_path, server, over):
    """uvloop raises no audit events, unless this package makes the loop."""
    effect = Effect(tmp_path)

    async def rollout(document, generate):
        await effect.connect()
        return await generate(chat(document.text))

    with pytest.raises(GoalReached):
        over(runner(tmp_path, server, rollout, until=3).run_async(documents(6)))
    over(runner(tmp_path, server, rollout).run_async(documents(6)))
    assert effect.number == 6


def test_a_rare_side_effect_ends_the_record(tmp_path, server, monkeypatch):
    effect = Effect(tmp_path)

    async def rollout(document, generate):
        if document.id == "id 3":
            await effect.write()
        return await generate(chat(document.text))

    start(tmp_path, server, rollout, monkeypatch)
    assert void(tmp_path).startswith("it was seen to write")


@pytest.mark.parametrize("kind", ["connect", "write", "run", "in_thread"])
def test_a_new_side_effect_does_not_happen_for_documents_that_are_done(
    tmp_path, server, monkeypatch, kind
):
    effect = Effect(tmp_path)

    async def rollout(document, generate):
        if "ACT" in os.environ:
            await getattr(effect, kind)()
        return await generate(chat(document.text))

    start(tmp_path, server, rollout, monkeypatch)
    monkeypatch.setenv("ACT", "1")
    go_on(tmp_path, server, rollout)
    assert effect.number == 1
    assert void(tmp_path)


def test_what_once_does_is_no_side_effect(tmp_path, server, monkeypatch):
    effect = Effect(tmp_path)

    async def rollout(document, generate):
        await generate.once("write", effect.write)
        await generate.once("thread", effect.in_thread)
        return await generate(chat(document.text))

    start(tmp_path, server, rollout, monkeypatch)
    assert len(recorded(tmp_path)) == 5
    go_on(tmp_path, server, rollout)
    assert effect.number == 12
    assert not void(tmp_path)


def test_what_the_trial_of_the_writer_does_is_no_side_effect(tmp_path, server):
    effect = Effect(tmp_path)

    def logged(writer, document):
        with effect.path.open("a") as file:
            file.write("x")
        return {"text": document.text}

    async def rollout(document, generate):
        document.metadata["value"] = np.float32(1)  # which the writer tries
        return await generate(chat(document.text))

    writer = JsonlWriter(str(tmp_path / "output"), "${chunk_index}.jsonl", None, logged)
    run_job(tmp_path, server, 5, rollout, output_writer=writer)
    assert effect.number > 5
    assert not void(tmp_path)


@pytest.mark.parametrize("kind", ["file", "program", "connection"])
def test_what_shared_context_keeps_open_may_be_used_without_being_seen(tmp_path, server, kind):
    @contextmanager
    def context():
        if kind == "file":
            with (tmp_path / "log").open("wb", buffering=0) as file:
                yield {"use": file.write}
        elif kind == "program":
            with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as cat:
                yield {"use": cat.stdin.write}
        else:
            effect = Effect(tmp_path)
            with socket.create_connection(effect.address) as connection:
                yield {"use": connection.send}

    async def rollout(document, generate, use):
        use(b"x")
        return await generate(chat(document.text))

    run_job(tmp_path, server, 3, rollout, shared_context=context)
    expected = {"program": "a program", "connection": "a connection"}.get(kind, tmp_path / "log")
    assert void(tmp_path) == f"it was seen to keep {expected} open"


def test_a_request_of_an_agent_is_no_side_effect(tmp_path, server):
    def agent(url, text):
        body = orjson.dumps({"model": "any", **chat(text)})
        request = urllib.request.Request(
            f"{url}/chat/completions", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as response:
            return orjson.loads(response.read())["choices"][0]["message"]["content"]

    async def rollout(document, generate):
        async with generate.url() as url:
            return await asyncio.to_thread(agent, url, document.text)

    run_job(tmp_path, server, 3, rollout)
    assert len(recorded(tmp_path)) == 3


COUNTED = [0]
WAITING = []


async def draws(document, generate):
    return await generate(chat(f"{random.random()} {random.choice('abc')} {document.text}"))


async def of_its_own(document, generate):
    return await generate(chat(f"{uuid.uuid4()} {document.text}"))


async def counts(document, generate):
    COUNTED[0] += 1
    return await generate(chat(f"{COUNTED[0]} {document.text}"))


async def waits_for_another(document, generate):
    """A batch of two, as a rollout may make it."""
    future = asyncio.get_running_loop().create_future()
    WAITING.append(future)
    if len(WAITING) == 2:
        for each in WAITING:
            each.set_result(None)
        WAITING.clear()
    await future
    return await generate(chat(document.text))


@pytest.mark.parametrize(
    "rollout, why",
    [
        (draws, ""),
        (of_its_own, "it does not repeat itself for equal answers"),
        (counts, "it does not repeat itself for equal answers"),
        (waits_for_another, "it was seen to wait for other documents"),
    ],
)
def test_unedited_code_is_not_refused(tmp_path, server, rollout, why):
    WAITING.clear()
    run_job(tmp_path, server, 6, rollout)
    assert void(tmp_path).startswith(why)
    assert bool(void(tmp_path)) == bool(why)
    verdict = replay.replay_all(runner(tmp_path, server, rollout), tmp_path / "checkpoints")
    assert not verdict.real
    assert verdict.same == (0 if why else 6)
    # A state of ``random`` is long.
    assert all(content(path)["draws"] for path in recorded(tmp_path))


def test_a_rollout_that_draws_no_random_number_keeps_no_state_of_them(tmp_path, server):
    run_job(tmp_path, server, 1, says_word)
    (path,) = recorded(tmp_path)
    assert content(path)["draws"] == []


def test_an_edit_that_begins_to_draw_is_the_same_at_each_start(tmp_path, server):
    run_job(tmp_path, server, 3, says_word)
    state = random.getstate()
    step = runner(tmp_path, server, draws)
    verdicts = [replay.replay_all(step, tmp_path / "checkpoints") for _ in range(2)]
    words = [[each.new_words for each in verdict.real] for verdict in verdicts]
    assert words[0] == words[1]
    assert len(words[0]) == 3
    assert random.getstate() == state


def test_a_run_is_recorded_after_a_run_whose_documents_wait(tmp_path, server):
    WAITING.clear()
    run_job(tmp_path / "waits", server, 2, waits_for_another)
    run_job(tmp_path / "other", server, 2, says_word)
    assert recorded(tmp_path / "waits") == []
    assert len(recorded(tmp_path / "other")) == 2


def test_code_without_a_module_may_wait(tmp_path, server):
    code = """
async def rollout(document, generate):
    event = asyncio.Event()
    asyncio.get_running_loop().call_soon(event.set)
    await event.wait()
    return await generate(chat(document.text))
"""
    names = {"asyncio": asyncio, "chat": chat}
    exec(code, names)
    run_job(tmp_path, server, 2, names["rollout"])
    assert len(results(tmp_path)) == 2


def test_requests_that_wait_for_a_batch_wait_for_no_other_documents(tmp_path, monkeypatch):
    for name in ("POLL_SECONDS", "LOOK_SECONDS"):
        monkeypatch.setattr(provider_passes, name, 0.01)
    with FakeProvider() as provider:
        run_job(tmp_path, provider, 3, says_word, config={"provider_batches": True})
    assert not void(tmp_path)
    assert len(recorded(tmp_path)) == 3


def test_what_depends_on_its_process_is_not_refused(tmp_path, server, monkeypatch, lines):
    monkeypatch.setenv("WORD", "OLD")
    start(tmp_path, server, says_word, monkeypatch)
    monkeypatch.setenv("WORD", "NEW")
    monkeypatch.setattr(replay, "repeats_itself", lambda step, root: False)
    go_on(tmp_path, server, says_word)
    assert void(tmp_path).startswith("it sends other requests in each process")


def test_an_order_that_no_new_process_can_judge_is_not_refused(tmp_path, server, monkeypatch):
    monkeypatch.setattr(replay, "_FRESH_SECONDS", 0.0)
    monkeypatch.setenv("WORD", "red green")
    start(tmp_path, server, says_word, monkeypatch)
    monkeypatch.setenv("WORD", "green red")
    go_on(tmp_path, server, says_word)
    assert void(tmp_path).startswith("it sends other requests in each process")


async def says_process(document, generate):
    return await generate(chat(f"{hash('a')} {os.environ.get('WORD')} {document.text}"))


def prints():
    """A program that the context starts writes past ``sys.stdout``."""
    os.write(1, f"process {os.getpid()}\n".encode())
    return {}


@pytest.mark.slow
def test_a_new_process_tells_what_depends_on_its_process(tmp_path, server, monkeypatch):
    monkeypatch.setenv("WORD", "OLD")
    run_job(tmp_path / "word", server, 3, says_word)
    run_job(tmp_path / "pid", server, 3, says_process)
    monkeypatch.setenv("WORD", "NEW")
    for name, rollout in (("word", says_word), ("pid", says_process)):
        step = runner(tmp_path / name, server, rollout, shared_context=prints)
        assert replay.repeats_itself(step, tmp_path / name / "checkpoints") is (name == "word")


@pytest.mark.parametrize(
    "old, new, kind",
    [
        ("At 12:30:01", "At 12:31:59", "changing"),
        ("On 2026-01-01, OLD", "On 2026-01-02, NEW", "real"),
        ("<a.K object at 0x7f00aa00>", "<a.K object at 0x7f00bb00>", "changing"),
        ("red, green", "green, red", "order"),
        ("/tmp/a1 OLD", "/tmp/b2 OLD", "changing"),
        ("5", "6", "real"),
    ],
)
def test_what_differs_at_each_start_is_told_apart(tmp_path, old, new, kind):
    document = replay.RecordedDocument("0", 0, 0, "id", "", "", [], "", "", [])
    assert replay.compared(document, "", {"a": [old]}, {"a": [new]}).kind == kind


def test_times_are_no_difference(tmp_path, server, monkeypatch, lines):
    monkeypatch.setenv("WORD", "12:30:01")
    start(tmp_path, server, says_word, monkeypatch)
    monkeypatch.setenv("WORD", "12:30:02")
    go_on(tmp_path, server, says_word)
    assert any("only in what differs at each start" in line for line in lines)


def test_a_slow_check_decides_nothing(tmp_path, server, monkeypatch, lines):
    async def rollout(document, generate):
        if "SLOW" in os.environ:
            await asyncio.sleep(600)
        return await generate(chat(document.text))

    start(tmp_path, server, rollout, monkeypatch)
    monkeypatch.setattr(replay, "SECONDS", 0.01)
    monkeypatch.setenv("SLOW", "1")
    step = runner(tmp_path, server, first_then(5, rollout))
    verdict = replay.replay_all(step, tmp_path / "checkpoints", 0.01)
    assert "takes longer than" in verdict.undecided
    assert not verdict.real
    # uvloop's clock counts milliseconds: its timeout may end before this one has passed.
    monkeypatch.setattr(replay, "time", SimpleNamespace(monotonic=lambda: 0.0))
    verdict = replay.replay_all(step, tmp_path / "checkpoints", 0.01)
    assert "takes longer than" in verdict.undecided
    assert not verdict.real
    assert len(recorded(tmp_path)) == 5


def test_torn_and_newer_records_count_as_missing(tmp_path, server, monkeypatch):
    monkeypatch.setenv("WORD", "OLD")
    start(tmp_path, server, says_word, monkeypatch)
    torn, newer, *others = recorded(tmp_path)
    torn.write_bytes(torn.read_bytes()[:-20])
    newer.write_bytes(checksummed_json({**content(newer), "version": 2, "more": 1}))
    (torn.parent / "0123456789abcdef.json.new").write_bytes(b"{")
    verdict = replay.replay_all(runner(tmp_path, server, says_word), tmp_path / "checkpoints")
    assert verdict.same == len(others) == 3
    go_on(tmp_path, server, says_word)


def test_a_kill_between_write_and_rename_costs_nothing(tmp_path, server, monkeypatch):
    rename = files.Disk.rename

    def killed(disk, source, target):
        if target.parent.name == "recorded":
            raise files.StorageFailed("killed")
        rename(disk, source, target)

    with monkeypatch.context() as patch:
        patch.setattr(files.Disk, "rename", killed)
        start(tmp_path, server, says_word, monkeypatch)
    assert recorded(tmp_path) == []
    go_on(tmp_path, server, says_word)
    assert len(recorded(tmp_path)) == 1


def test_a_disk_without_room_for_the_record_stops_no_rank(tmp_path, server, monkeypatch, lines):
    effect = Effect(tmp_path)
    create = files.Disk.create

    def full(disk, path, mode):
        if path.parent.name == "recorded":
            raise files.StorageFailed("No space left on device")
        return create(disk, path, mode)

    async def acts(document, generate):
        if "ACT" in os.environ:
            await effect.write()
        return await generate(chat(document.text))

    start(tmp_path, server, acts, monkeypatch)
    assert len(recorded(tmp_path)) == 5
    run_job(tmp_path / "before", server, 4, says_word)
    monkeypatch.setattr(files.Disk, "create", full)
    run_job(tmp_path / "full", server, 4, says_word)
    assert any("no more documents are recorded" in line for line in lines)
    assert results(tmp_path / "full") == results(tmp_path / "before")
    monkeypatch.setenv("ACT", "1")
    go_on(tmp_path, server, acts)
    assert effect.number == 1
    assert any("its end cannot be recorded" in line for line in lines)
    assert recorded(tmp_path) == []  # nothing is left that a start would replay


def test_a_rank_that_has_not_begun_is_checked(tmp_path, server, monkeypatch):
    monkeypatch.setenv("WORD", "OLD")
    writes = {"records_per_chunk": 2}
    step = runner(tmp_path, server, says_word, **writes)
    step.run(documents(3), 0, 2)
    monkeypatch.setenv("WORD", "NEW")
    monkeypatch.setattr(replay, "repeats_itself", lambda step, root: True)
    with pytest.raises(CheckpointMismatch, match="OLD"):
        runner(tmp_path, server, says_word, **writes).run(documents(3), 1, 2)


def test_ranks_of_one_process_each_check_the_record_of_the_run(tmp_path, server, monkeypatch):
    (tmp_path / "input").mkdir()
    for task in range(8):
        rows = [orjson.dumps({"id": f"{task}/{number}", "text": "t"}) for number in range(4)]
        (tmp_path / "input" / f"{task}.jsonl").write_bytes(b"\n".join(rows))

    async def rollout(document, generate):
        if "stop" in os.environ and document.id.endswith("/3"):
            raise RuntimeError("not yet")
        return await says_word(document, generate)

    def run():
        step = runner(tmp_path, server, rollout, config=ONE)
        LocalPipelineExecutor(
            [JsonlReader(str(tmp_path / "input")), step],
            tasks=8,
            workers=1,
            logging_dir=str(tmp_path / "logs"),
            ranks_at_once=8,
        ).run()

    monkeypatch.setenv("WORD", "OLD")
    monkeypatch.setenv("stop", "1")
    with pytest.raises(DocumentFailed, match="not yet"):
        run()
    monkeypatch.delenv("stop")
    before = len(recorded(tmp_path))
    assert before >= 3, void(tmp_path)
    verdicts = []
    check = replay.Replays.check

    async def checked(replays):
        verdicts.append(await check(replays))
        return verdicts[-1]

    monkeypatch.setattr(replay.Replays, "check", checked)
    monkeypatch.setattr(replay, "repeats_itself", lambda step, root: True)
    monkeypatch.setenv("WORD", "NEW")
    with pytest.raises(CheckpointMismatch, match="OLD' -> 't NEW"):
        run()
    assert {len(verdict.real) for verdict in verdicts} == {before}
    assert "NEW" not in str(server.payloads)
    monkeypatch.setenv("WORD", "OLD")
    verdicts.clear()
    run()
    assert sum(bool(verdict.same) for verdict in verdicts) == len(verdicts) >= 4
    assert len(recorded(tmp_path)) == 32


def test_a_restored_mirror_has_the_record(tmp_path, server, monkeypatch):
    monkeypatch.setenv("WORD", "OLD")
    mirror = {"checkpoints_remote_dir": str(tmp_path / "mirror")}
    start(tmp_path, server, says_word, monkeypatch, **mirror)
    assert len(list((tmp_path / "mirror" / "recorded").iterdir())) == 5
    (tmp_path / "checkpoints").rename(tmp_path / "lost")
    monkeypatch.setenv("WORD", "NEW")
    monkeypatch.setattr(replay, "repeats_itself", lambda step, root: True)
    with pytest.raises(CheckpointMismatch, match="OLD"):
        go_on(tmp_path, server, says_word, **mirror)


def test_a_document_that_blocks_is_tried_three_times(tmp_path, server, monkeypatch):
    monkeypatch.setattr(replay, "SECONDS", 0.0)
    run_job(tmp_path, server, 8, says_word)
    assert recorded(tmp_path) == []
    assert not void(tmp_path)


def test_replays_that_keep_the_event_loop_are_few(tmp_path, server, monkeypatch):
    monkeypatch.setattr(replay, "_RECORDING_SECONDS", 0.0)
    run_job(tmp_path, server, 8, says_word, config=ONE)
    assert len(recorded(tmp_path)) == 1
    assert not void(tmp_path)


def test_a_step_without_need_is_not_replayed(tmp_path, server):
    run_job(tmp_path, server, 3)  # the rollout of the tests
    assert len(recorded(tmp_path)) == 3
    run_job(tmp_path / "version", server, 3, says_word, rollout_version="1")
    assert recorded(tmp_path / "version") == []


SCRIPT = """from words import clean
async def rollout(document, generate):
    return await generate({"messages": [{"role": "user", "content": clean(document.text)}]})
"""


@pytest.fixture
def command(tmp_path, server, monkeypatch):
    """A command line in a process of its own, as after an edit."""
    (tmp_path / "asking.py").write_text(SCRIPT)
    (tmp_path / "words.py").write_text("\n\ndef clean(text):\n    return text + ' OLD'\n")
    rows = [orjson.dumps({"id": f"d{number}", "text": f"t{number}"}) for number in range(8)]
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(rows))

    def run(name, *more, source="in.jsonl"):
        flags = ["--input", source, "--rollout", "asking.rollout", "--endpoint", server.url]
        flags += ["--model", "fake", "--run-folder", "run", "--records-per-chunk", "2", *more]
        return subprocess.run(
            [sys.executable, "-m", "datatrove_ckpt", name, *flags],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )

    return run


def test_a_change_of_code_is_refused_with_what_it_does(tmp_path, server, command):
    assert command("run", "--until", "4").returncode == 0
    sent = len(server.payloads)
    words = tmp_path / "words.py"
    words.write_text("\n\ndef clean(text):\n    same = text\n    return same + ' OLD'\n")
    refused = command("run")
    assert refused.returncode == 1
    assert "words.py, line 3 changed; " in refused.stderr
    assert "recorded documents get the same requests and results" in refused.stderr
    assert "recorded documents get the same" in command("doctor").stdout
    words.write_text("\n\ndef clean(text):\n    return text + ' NEW'\n")
    refused = command("run")
    assert refused.returncode == 1
    assert "code gives finished documents other requests or results: document" in refused.stderr
    assert "messages[0].content: 't" in refused.stderr
    assert " OLD' -> 't" in refused.stderr
    assert len(server.payloads) == sent
    assert command("run", "--accept-changes", "true").returncode == 0
    assert "changed in the middle" in (tmp_path / "run" / "card.md").read_text()


def test_doctor_and_verify_look_at_the_record(tmp_path, command):
    assert command("run", "--until", "4").returncode == 0
    assert "get the same requests and results" in command("doctor", "--all").stdout
    path = next((tmp_path / "run" / "checkpoints" / "recorded").glob("*.json"))
    path.write_bytes(path.read_bytes()[:-9])
    found = subprocess.run(
        [sys.executable, "-m", "datatrove_ckpt", "verify", "run"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert f"{path.name} holds no recorded document" in found.stdout
