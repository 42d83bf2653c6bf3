"""InferenceRunner against a real server on a real socket, with real files: what a user relies
on.
"""

import asyncio
import copy
import tempfile
from contextlib import contextmanager

import pytest
from datatrove.data import Document
from datatrove.pipeline.writers import JsonlWriter

from datatrove_ckpt import InferenceRunner
from datatrove_ckpt.errors import (
    CheckpointMismatch,
    DocumentFailed,
)
from datatrove_ckpt.testing import FakeServer, outputs
from tests.jobs import (
    FailsFirst,
    ask,
    chat,
    config,
    documents,
    fails_at,
    ids,
    rejects,
    results,
    run_job,
    runner,
)
from tests.kept import commits
from tests.patience import until_async


async def until_journaled(folder, number):
    """Until that many documents of chunk 0 are finished."""
    journal = folder / "checkpoints/00000/chunk_00000.jsonl"
    await until_async(lambda: journal.exists() and journal.read_bytes().count(b"\n") >= number)


# chunks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number, chunks", [(0, []), (3, [2, 1]), (4, [2, 2])])
def test_one_file_per_chunk_holds_the_documents_in_input_order(tmp_path, server, number, chunks):
    run_job(tmp_path, server, number)
    assert ids(tmp_path) == [f"id {index}" for index in range(number)]
    names = [f"00000_chunk_{index:05d}.jsonl" for index in range(len(chunks))]
    assert sorted(outputs(tmp_path / "output")) == names
    assert [len((tmp_path / "output" / name).read_text().splitlines()) for name in names] == chunks


def test_a_finished_rank_keeps_what_proves_it_and_nothing_else(tmp_path, server):
    run_job(tmp_path, server, 5)
    files = sorted(outputs(tmp_path / "checkpoints"))
    assert sum(name.startswith("recorded/") for name in files) == 5
    assert [name for name in files if not name.startswith("recorded/")] == [
        "00000/commits.jsonl",
        "00000/history.jsonl",
        "00000/publishing.jsonl",
        "00000/run.json",
        "00000/shard.json",
        "home",
        "job.json",
        "last_chunk/00000.txt",
    ]
    assert (tmp_path / "checkpoints/last_chunk/00000.txt").read_text() == "2\n"
    assert not [path for path in (tmp_path / "output").iterdir() if path.name.startswith(".")]


# rollouts ----------------------------------------------------------------------------------------


def test_results_of_several_rollouts_are_listed_and_none_is_left_out(tmp_path, server):
    turns = []

    async def rollout(document, generate):
        turns.append(len(turns))
        return {"turn": 1} if document.id == "id 0" and len(turns) == 1 else None

    run_job(tmp_path, server, 2, rollout, config={"rollouts_per_document": 3})
    assert results(tmp_path) == [[{"turn": 1}]], (
        "a document all of whose rollouts are None is dropped"
    )
    (commit,) = commits(tmp_path)
    assert commit["tally"].items() >= {"read": 2, "written": 1, "dropped": 1}.items()
    assert commit["work"]["failed_rollouts"][:2] == [2, 5]


@contextmanager
def as_manager():
    yield {"word": "from a manager"}


@pytest.mark.matrix(
    "context, word",
    [
        ({"word": "from a dict"}, "from a dict"),
        (lambda: {"word": "from a callable"}, "from a callable"),
        (as_manager, "from a manager"),
        (None, "default"),
    ],
)
def test_shared_context_reaches_the_rollout_in_all_its_forms(tmp_path, server, context, word):
    async def rollout(document, generate, word="default"):
        return word

    run_job(tmp_path, server, 1, rollout, shared_context=context)
    assert results(tmp_path) == [[word]]


def test_two_documents_with_one_id_are_two_documents(tmp_path):
    """They may even be equal: each keeps its own sample, also when the answers are all that was
    saved of them.
    """
    drawn = {}
    fails = FailsFirst()

    async def rollout(document, generate):
        result = await ask(document, generate)
        number = document.metadata["number"]
        assert drawn.setdefault(number, result.text) == result.text
        await until_async(lambda: len(drawn) >= 3)
        fails()
        return result.text

    twins = [Document("same", "same", metadata={"number": number}) for number in range(3)]
    with FakeServer(lambda payload, times: f"sample {times}") as server:
        step = runner(tmp_path, server, rollout, records_per_chunk=10)
        with pytest.raises(DocumentFailed, match="not yet"):
            step.run(copy.deepcopy(twins))
        assert not (tmp_path / "checkpoints/00000/chunk_00000.jsonl").exists()
        fails.now = False
        step.run(twins)
    assert server.asked == {"same": 3}
    assert sorted(drawn.values()) == ["sample 0", "sample 1", "sample 2"]
    assert results(tmp_path) == [[drawn[n]] for n in range(3)]


def test_equal_sampling_calls_differ_and_stay_as_they_were_after_a_resume(tmp_path):
    drawn = []

    def answer(payload, times):
        drawn.append(f"sample {len(drawn)}")
        return drawn[-1]

    fails = FailsFirst()

    async def rollout(document, generate):
        payload = chat(document.text, temperature=1.0)
        texts = [(await generate(payload)).text for _ in range(3)]
        fails()
        return texts

    with FakeServer(answer) as server:
        fails.run_twice(tmp_path, server, rollout)
    assert results(tmp_path) == [[["sample 0", "sample 1", "sample 2"]]]
    assert len(drawn) == 3


# errors a rollout sees, and what becomes of its document -----------------------------------------


def test_a_rejection_is_remembered_until_retry_errors_forgets_it(tmp_path):
    bad = ["text 1"]
    in_turn = {"max_concurrent_generations": 1}  # the rejection cuts no other request off
    with FakeServer(status=rejects(bad)) as server:
        for says in (
            "'id 1'.*HTTP 400",
            "The request was not sent this time; to send the request again, set retry_errors",
        ):
            with pytest.raises(DocumentFailed, match=says):
                run_job(tmp_path, server, 2, config=in_turn)
        assert server.asked["text 1"] == 1, "a permanent error is an answer"
        bad.clear()
        run_job(tmp_path, server, 2, retry_errors=True, config=in_turn)
    assert ids(tmp_path) == ["id 0", "id 1"]
    assert server.asked == {"text 0": 2, "text 1": 2}, "the first is also the probe"


def test_one_rollout_that_raises_ends_its_siblings_and_keeps_what_they_were_answered(
    tmp_path, server
):
    fails = FailsFirst()
    turns = iter(range(100))

    async def rollout(document, generate):
        turn = next(turns)
        result = await generate(chat(f"rollout {turn % 2}"))
        if turn % 2:
            fails()
        return result

    fails.run_twice(tmp_path, server, rollout, config={"rollouts_per_document": 2})
    assert server.asked["rollout 1"] == 1
    assert len(results(tmp_path)[0]) == 2


def test_a_rollout_beside_one_that_raised_has_ended_before_the_next_document_begins(
    tmp_path, server
):
    seen = []

    async def rollout(document, generate):
        seen.append(document.id)
        if len(seen) == 2:
            try:
                await asyncio.Event().wait()
            finally:
                seen.append("ended")
        raise RuntimeError("bad")

    config = {"rollouts_per_document": 2, "max_concurrent_documents": 1}
    run_job(tmp_path, server, 2, rollout, config=config, on_document_error="dead_letter")
    assert seen[:4] == ["id 0", "id 0", "ended", "id 1"]


# without checkpoints -----------------------------------------------------------------------------


@pytest.fixture
def step_without(tmp_path, server, monkeypatch):
    """A step that writes its files by a template, and its temporary ones beside them."""

    def step(template, rollout=ask):
        output = JsonlWriter(str(tmp_path / "output"), template, compression=None)
        return InferenceRunner(rollout, config(server), output, records_per_chunk=3)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return step


@pytest.mark.parametrize("template", ["${rank}.jsonl", "${rank}_${chunk_index}.jsonl"])
def test_without_checkpoints_everything_is_written_and_nothing_is_kept(
    tmp_path, step_without, template
):
    for number in (7, 5, 6):  # started again, it starts over
        step_without(template).run(documents(number))
        found = ids(tmp_path)
        if "chunk" in template:  # the files of the first run that the later ones do not write
            found = found[:number]
        assert found == [f"id {index}" for index in range(number)], "in the order of the input"
    assert [path.name for path in tmp_path.iterdir()] == ["output"]


def test_a_failure_without_checkpoints_leaves_whole_files_and_no_temporary_ones(
    tmp_path, step_without
):
    with pytest.raises(DocumentFailed) as failed:
        step_without("${chunk_index}.jsonl", fails_at({"id 5"})).run(documents(7))
    assert failed.value.__notes__ == [
        "There is no checkpoint (checkpoints_local_dir): the same command starts over."
    ]
    assert ids(tmp_path) in ([], ["id 0", "id 1", "id 2"])
    assert {path.name for path in tmp_path.iterdir()} <= {"output"}


# refusals ----------------------------------------------------------------------------------------


def test_an_input_that_changed_under_finished_documents_is_refused(tmp_path, server):
    bad = ["id 4"]

    async def rollout(document, generate):
        if document.id in bad:
            await until_journaled(tmp_path, 4)
            raise RuntimeError("as asked")
        return await ask(document, generate)

    step = runner(tmp_path, server, rollout, records_per_chunk=10)
    with pytest.raises(DocumentFailed):
        step.run(documents(5))
    bad.clear()
    text = documents(5)
    text[1].text = "changed"
    metadata = documents(5)
    metadata[1].metadata["x"] = 1
    for changed in (text, metadata, documents(2)):
        with pytest.raises(CheckpointMismatch, match="input"):
            step.run(changed)
    assert not list((tmp_path / "output").glob("*.jsonl"))


def test_all_requests_of_a_document_go_to_one_replica(tmp_path):
    """Its prompt is in that replica's cache."""

    async def turns(document, generate):
        start = f"{document.text}," * 200
        texts = [start, f"{start} 0", f"{start} 1"]
        return [await ask(Document(text, ""), generate) for text in texts]

    with FakeServer() as one, FakeServer() as other:
        step = runner(tmp_path, one, turns, config={"max_concurrent_documents": 2})
        step.config.endpoint_url = [one.url, other.url]
        step.run(documents(20))
    found = [{text.partition(",")[0] for text in server.asked} for server in (one, other)]
    assert all(found)
    assert not found[0] & found[1]
