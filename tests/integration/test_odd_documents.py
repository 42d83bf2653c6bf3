"""Documents and errors that cannot be printed, kept or written: each ends once, and no rank is
stuck on one.
"""

import pickle

import pytest

from datatrove_ckpt.errors import CkptError, DocumentFailed, DocumentNotSerializable
from tests.jobs import all_of, ask, documents, ids, letters, rows, run_job, runner


class Mute(Exception):
    """An error, or a value, that cannot be shown."""

    def __str__(self):
        raise RuntimeError("no text")

    __repr__ = __str__

    def __hash__(self):
        return 7


def nested():
    value = []
    for _ in range(3000):
        value = [value]
    return value


RECURSIVE = []
RECURSIVE.append(RECURSIVE)
UNWRITABLE = [
    ("text", None),
    ("text", "a\ud800b"),
    ("id", Mute()),
    ("media", [1]),
    ("a set", {1, 2}),
    ("complex", 1j),
    ("recursive", RECURSIVE),
    ("nested", nested),  # the value would be a part of the rollout
    ("error", Mute()),
]


def spoils(name, value):
    async def rollout(document, generate):
        result = await ask(document, generate)
        if document.id == "id 1":
            if name == "error":
                raise value
            if hasattr(document, name):
                setattr(document, name, value)
            else:
                document.metadata[name] = value() if callable(value) else value
        return result

    return rollout


@pytest.mark.matrix(("name", "value"), UNWRITABLE)
def test_a_document_that_cannot_be_written_is_a_clear_stop_or_a_dead_letter(
    tmp_path, server, name, value
):
    rollout = spoils(name, value)
    with pytest.raises((DocumentFailed, DocumentNotSerializable)) as stopped:
        run_job(tmp_path, server, 4, rollout)
    str(stopped.value).encode()
    there = pickle.loads(pickle.dumps(stopped.value))  # as from a worker
    assert (type(there), str(there)) == (type(stopped.value), str(stopped.value))
    for _ in range(2):  # the second time there is nothing to do
        run_job(tmp_path, server, 4, rollout, on_document_error="dead_letter")
        assert ids(tmp_path) == ["id 0", "id 2", "id 3"]
        assert [letter["id"] for letter in letters(tmp_path)] == ["id 1"]
    assert letters(tmp_path)[0]["document"] == {
        "text": "text 1",
        "id": "id 1",
        "media": [],
        "metadata": {},
    }
    assert server.asked["text 1"] == 1
    runner(tmp_path, server, retry_dead_letters=True, accept_changes=True).run([])
    assert sorted(ids(tmp_path)) == all_of(4)


def odd_input():
    found = documents(9)
    found[1].text = "a\ud800b"
    found[2].metadata["image"] = object()
    found[3].metadata["k"] = {"\udfff": RECURSIVE}
    found[4].id = 7
    found[5].id = ""
    found[6].id = found[7].id
    return found


def test_odd_input_stops_or_is_dead_and_is_the_same_document_after_a_restart(tmp_path, server):
    with pytest.raises(CkptError):
        runner(tmp_path, server).run(odd_input())
    runner(tmp_path, server, on_document_error="dead_letter").run(odd_input())
    found = letters(tmp_path)
    assert sorted(letter["ordinal"] for letter in found) == [1, 2, 3]
    assert len(rows(tmp_path)) == 9 - 3

    async def cleans(document, generate):
        assert document.text in ("a\ud800b", "text 2", "text 3"), (
            "a surrogate survives the dead letter"
        )
        document.text, document.metadata = document.text.replace("\ud800", ""), {}
        return await ask(document, generate)

    runner(tmp_path, server, cleans, retry_dead_letters=True, accept_changes=True).run([])
    assert len(rows(tmp_path)) == 9


def test_an_id_that_is_the_number_0_and_a_document_without_media_are_written(tmp_path, server):
    found = documents(2)
    found[0].id = 0
    found[1].media = None
    runner(tmp_path, server).run(found)
    assert ids(tmp_path) == [0, "id 1"]
