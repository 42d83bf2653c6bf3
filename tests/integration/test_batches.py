"""``texts_per_request``: texts of several documents share requests, and each is its own document's
all the same.
"""

from collections import Counter
from itertools import count

import numpy as np
import pytest

from datatrove_ckpt import InferenceConfig, InferenceError
from datatrove_ckpt.errors import CkptError
from datatrove_ckpt.generation import embedding_batches
from datatrove_ckpt.testing import FakeServer, outputs
from tests.engines import ENGINE
from tests.jobs import Budget, documents, ids, letters, rows, run_job, runner
from tests.kept import commits
from tests.preempted import preempted
from tests.typed_answers import embeddings, vector_of


def texts_of(payload):
    texts = payload["input"]
    return [texts] if isinstance(texts, str) else texts


@pytest.fixture
def shared(server):
    server.paths = {"/v1/embeddings": embeddings}
    return server


@pytest.fixture
def gathered(monkeypatch):
    """Texts wait until a request is full, however late the reader's thread is."""
    monkeypatch.setattr(embedding_batches, "_LONGEST", 3600.0)


async def embed(document, generate):
    """A text alone, and two at once, one of which all documents have."""
    first = await generate.embed(document.text)
    both = await generate.embed([f"{document.text} again", "the same"])
    assert first.tolist() == np.array(vector_of(document.text), np.float32).tolist()
    assert both[1].tolist() == np.array(vector_of("the same"), np.float32).tolist()
    return {"first": first, "both": both}


def sizes(server):
    return [len(texts_of(payload)) for payload in server.payloads]


def asked(server):
    return Counter(text for payload in server.payloads for text in texts_of(payload))


def both_of(number):
    """The texts of so many documents, and those again."""
    return {f"text {i}{end}": 1 for i in range(number) for end in ("", " again")}


async def embed_text(document, generate):
    return await generate.embed(document.text)


def test_texts_of_several_documents_share_requests(shared, tmp_path, monkeypatch):
    monkeypatch.setattr(embedding_batches, "_LONGEST", 1.0)  # the last requests are not full
    run_job(tmp_path / "alone", shared, 10, embed)
    assert sizes(shared) == [1] * 30
    shared.payloads.clear()
    config = {"texts_per_request": 8, "default_generation_params": {"temperature": 0.5}, "seed": 1}
    run_job(tmp_path, shared, 10, embed, config=config)
    assert outputs(tmp_path / "output") == outputs(tmp_path / "alone" / "output")
    assert (sum(sizes(shared)), max(sizes(shared))) == (30, 8)
    assert len(shared.payloads) < 10
    assert asked(shared) == {"the same": 10} | both_of(10)
    assert {key for payload in shared.payloads for key in payload} == {
        "input",
        "model",
        "encoding_format",
    }


@pytest.mark.usefixtures("gathered")
def test_each_document_counts_its_texts_and_tokens_and_their_sum_is_right(shared, tmp_path):
    async def ask(document, generate):
        await generate.embed(["a" * int(document.id[3:]), "bb"])
        return "done"

    for number, texts in enumerate((1, 4)):
        config = {"texts_per_request": texts}
        step = runner(tmp_path / str(number), shared, ask, config=config, records_per_chunk=1)
        step.run(documents(5)[1:])
    one, many = (
        [(line["tally"], line["work"]) for line in commits(tmp_path / name)] for name in "01"
    )
    assert one == many
    assert [(tally["requests"], tally["prompt_tokens"]) for tally, _ in many] == [
        (2, 3),
        (2, 4),
        (2, 5),
        (2, 6),
    ]
    assert sorted(sizes(shared)) == [1] * 8 + [4, 4]


@pytest.mark.matrix("texts", [3, 1, 2, 8])
def test_killed_at_every_request_and_resumed_the_bytes_are_the_same(shared, tmp_path, texts):
    # One request at a time: of several in flight, some answers would be on their way at the kill.
    config = {"texts_per_request": texts, "max_concurrent_generations": 1}
    run_job(tmp_path / "other", shared, 6, embed, config=config)
    shared.payloads.clear()
    budget = Budget()
    answered = Counter()

    def status(payload, times):
        refused = budget(payload, times)
        if refused is None:
            answered.update(texts_of(payload))
        return refused

    shared._status = status
    for _ in range(30):
        budget.left = 1
        try:
            run_job(tmp_path, shared, 6, embed, config=config)
        except CkptError:
            continue
        break
    else:
        pytest.fail("it never ends")
    assert outputs(tmp_path / "output") == outputs(tmp_path / "other" / "output")
    assert answered == {"the same": 6} | both_of(6)


@pytest.mark.usefixtures("gathered")
@pytest.mark.parametrize("bad", [{3}, {0, 7}, set(range(8))])
def test_of_a_bad_text_among_eight_its_document_alone_fails(shared, tmp_path, bad):
    texts = {f"text {index}" for index in bad}
    shared._status = lambda payload, times: 400 if texts.intersection(texts_of(payload)) else None

    settings = {"on_document_error": "dead_letter", "records_per_chunk": 8}
    run_job(tmp_path, shared, 8, embed_text, config={"texts_per_request": 8}, **settings)
    assert sizes(shared)[0] == 8
    assert ids(tmp_path) == [f"id {i}" for i in range(8) if i not in bad]
    assert [letter["id"] for letter in letters(tmp_path)] == [f"id {i}" for i in sorted(bad)]
    assert all("HTTP 400" in str(letter) for letter in letters(tmp_path))
    assert all(f"text {letter['id'][3:]}" in str(letter) for letter in letters(tmp_path))


@pytest.mark.usefixtures("answers_between")
def test_a_text_that_fails_again_and_again_beside_others_is_named(shared, tmp_path):
    """A NaN, say. The others of its request are answered."""
    shared._status = lambda payload, times: 500 if "text 5" in texts_of(payload) else None

    async def ask(document, generate):
        if int(document.id[3:]) < 8:
            return await embed_text(document, generate)
        for turn in count():  # until the rank stops
            await generate.embed(f"{document.id} {turn}")
        return "done"

    config = {"texts_per_request": 8, "server_patience_seconds": 60.0, "request_max_attempts": 2}
    with pytest.raises(CkptError, match=r"id 5.*the server answers other requests"):
        run_job(tmp_path, shared, 10, ask, config=config)
    assert asked(shared)["text 4"] <= 16
    alone = [payload["input"] for payload in shared.payloads if texts_of(payload) == ["text 5"]]
    assert alone, "the bad text was never sent alone"


@pytest.mark.usefixtures("gathered")
def test_an_error_that_stops_the_rank_stops_it_once(shared, tmp_path):
    shared._status = lambda payload, times: 401

    async def ask(document, generate):
        try:
            return await embed_text(document, generate)
        except InferenceError:
            return None

    with pytest.raises(CkptError, match="HTTP 401"):
        run_job(tmp_path, shared, 4, ask, config={"texts_per_request": 4})
    assert sizes(shared) == [4]
    assert not rows(tmp_path)


# a stop, and servers that die --------------------------------------------------------------------


async def one_after_the_other(document, generate):
    return [await generate.embed(document.text), await generate.embed(f"{document.text} again")]


@pytest.mark.usefixtures("reraised", "gathered")
@pytest.mark.parametrize("texts", [2, 3])
def test_what_a_shared_request_in_flight_at_a_stop_answers_is_kept(tmp_path, texts):
    """Its documents need another request, so the rank stops with their answers, which nobody asks
    for again.
    """
    with FakeServer(hold_after=0) as server:
        server.paths = {"/v1/embeddings": embeddings}
        config = {"texts_per_request": texts}
        step = runner(tmp_path, server, one_after_the_other, drain_seconds=600, config=config)
        preempted(step, 6, server, 6 // texts, match="SIGTERM")
        assert asked(server) == {f"text {index}": 1 for index in range(6)}
        step.run(documents(6))
        assert asked(server) == both_of(6)
        run_job(tmp_path / "other", server, 6, one_after_the_other)
    assert outputs(tmp_path / "output") == outputs(tmp_path / "other" / "output")


# The engine of test_supervision, with embeddings. It dies of the text "die", and once of "die
# once".
EMBEDS = ENGINE.replace(
    '    question = payload["messages"][0]["content"]\n',
    """    texts = payload["input"] if isinstance(payload["input"], list) else [payload["input"]]
    question = next((text for text in texts if text.startswith("die")), "")
""",
).replace(
    '    message = {"content": f"{os.getpid()} says {question}"}\n',
    '    return 200, {"data": [{"index": at, "embedding": [len(text), 0.5]} for at, text in enumerate(texts)]}\n',
)


@pytest.mark.usefixtures("gathered")
@pytest.mark.matrix("text", ["die", "die once"])
def test_a_server_that_dies_of_a_text_fails_no_other_document(here, policy, text):
    policy("RELAUNCH", first=0.0)
    policy("RESTART", first=0.01)
    (here / "engine.py").write_text(EMBEDS)
    given = documents(8)
    given[3].text = text

    settings = {
        "texts_per_request": 8,
        "server_max_restarts": 6,
        "model_kwargs": {"server_script": "engine.py"},
    }
    config = InferenceConfig("custom", "m", reuse_servers=False, **settings)
    job = {"records_per_chunk": 8, "on_document_error": "dead_letter"}
    runner(here, config, embed_text, **job).run(given)
    dead = ["id 3"] if text == "die" else []
    assert ids(here) == [f"id {i}" for i in range(8) if f"id {i}" not in dead]
    assert [letter["id"] for letter in letters(here)] == dead
    starts = len((here / "engines").read_text().splitlines())
    # With the text in a group of quarantined ones, one more.
    assert starts in ((4, 5) if dead else (2,))
