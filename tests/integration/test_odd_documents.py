"""Documents and errors that cannot be printed, kept or written: each ends once, and no rank is
stuck on one.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datatrove.data import Document
from hypothesis import given, settings
from hypothesis import strategies as st

from datatrove_ckpt.errors import CkptError, DocumentFailed, DocumentNotSerializable
from datatrove_ckpt.testing import FakeServer
from tests.integration.test_whose_fault import all_of
from tests.jobs import ask, documents, ids, letters, rows, runner


class Mute(Exception):
    """An error, or a value, that cannot be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__

    def __hash__(self) -> int:
        return 7


def field(name, value):
    return lambda document: setattr(document, name, value)


def meta(key, value=1):
    return lambda document: document.metadata.update({key: value})


def raises(error):
    def fail(document):
        raise error

    return fail


def nested(depth):
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


RECURSIVE: list[Any] = []
RECURSIVE.append(RECURSIVE)
UNWRITABLE: dict[str, Callable[[Document], None]] = {
    "no text": field("text", None),
    "text with a surrogate": field("text", "a\ud800b"),
    "mute id": field("id", Mute()),
    "media of numbers": field("media", [1]),
    "set": meta("k", {1, 2}),
    "bytes": meta("k", b"x"),
    "recursive": meta("k", RECURSIVE),
    "deep": meta("k", nested(3000)),
    "beyond 64 bits": meta("k", 2**70),
    "mute error": raises(Mute()),
}


def spoils(spoil):
    async def rollout(document, generate):
        result = await ask(document, generate)
        if document.id == "id 1":
            spoil(document)
        return result

    return rollout


@pytest.mark.matrix
@pytest.mark.parametrize("name", UNWRITABLE)
def test_a_document_that_cannot_be_written_is_a_clear_stop_or_a_dead_letter(tmp_path, server, name):
    rollout = spoils(UNWRITABLE[name])
    with pytest.raises((DocumentFailed, DocumentNotSerializable)) as stopped:
        runner(tmp_path, server, rollout).run(documents(4))
    str(stopped.value).encode()
    for _ in range(2):  # the second time there is nothing to do
        runner(tmp_path, server, rollout, on_document_error="dead_letter").run(documents(4))
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


def odd_input(number):
    found = documents(number)
    found[1].text = "a\ud800b"
    found[2].metadata["image"] = object()
    found[3].metadata["k"] = {"\udfff": RECURSIVE}
    found[4].id = 7
    found[5].id = ""
    found[6].id = found[7].id
    return found


def test_odd_input_stops_or_is_dead_and_is_the_same_document_after_a_restart(tmp_path, server):
    with pytest.raises(CkptError):
        runner(tmp_path, server).run(odd_input(9))
    runner(tmp_path, server, on_document_error="dead_letter").run(odd_input(9))
    found = letters(tmp_path)
    assert [letter["ordinal"] for letter in found] == [1, 2, 3]
    assert len(rows(tmp_path)) == 9 - 3

    async def cleans(document, generate):
        assert document.text in ("a\ud800b", "text 2", "text 3"), (
            "a surrogate survives the dead letter"
        )
        document.text, document.metadata = document.text.replace("\ud800", ""), {}
        return await ask(document, generate)

    runner(tmp_path, server, cleans, retry_dead_letters=True, accept_changes=True).run([])
    assert len(rows(tmp_path)) == 9


# at random ---------------------------------------------------------------------------------------

_ODD = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.binary(max_size=3), st.complex_numbers(),
    st.text(st.characters(exclude_categories=[]), max_size=4), st.just(RECURSIVE), st.builds(object),
)  # fmt: skip
_VALUES = st.recursive(
    _ODD,
    lambda inner: st.one_of(
        st.lists(inner, max_size=2),
        st.dictionaries(
            st.one_of(st.text(st.characters(exclude_categories=[]), max_size=2), st.integers()),
            inner,
        ),
        st.frozensets(st.integers(), max_size=2),
    ),
    max_leaves=4,
)
_PLACES = st.sampled_from(
    ["text", "id", "metadata", "media", "result", "key", "value", "error", "exit", "answer"]
)


def _apply(place, value, document):
    if place in ("text", "id", "metadata", "media"):
        setattr(document, place, value)
    elif place == "key":
        document.metadata[repr(value) if isinstance(value, list | dict) else value] = value
    elif place == "value":
        document.metadata["k"] = value
    elif place == "error":
        raise ValueError(value)
    elif place == "exit":
        raise SystemExit(value)
    return value


_USAGE = [
    {"prompt_tokens": odd, "completion_tokens": odd}
    for odd in ("3", [1], {"a": 1}, 2**63, -1, 1e300, 0.5, None)
]


@pytest.mark.slow
@settings(max_examples=12)
@given(
    plan=st.lists(st.tuples(_PLACES, _VALUES), min_size=1, max_size=6),
    usage=st.sampled_from(_USAGE),
)
def test_whatever_a_rollout_does_each_document_ends_once(plan, usage):
    async def rollout(document, generate):
        place, value = plan[int(document.text.split()[1]) % len(plan)]
        result = await ask(document, generate)
        return (
            result if place == "answer" else _apply(place, copy.deepcopy(value), document) or result
        )

    number = 2 * len(plan)
    with tempfile.TemporaryDirectory() as folder, FakeServer() as server:
        server.usage = usage
        path = Path(folder)
        for _ in range(2):
            runner(path, server, rollout, on_document_error="dead_letter").run(documents(number))
            assert len(rows(path)) + len(letters(path)) == number
        assert sum(server.asked.values()) == number
