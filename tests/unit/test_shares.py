"""Shares: parts of files, divided at any document, are the whole input; how ``reshard`` deals them out."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from datatrove.data import Document
from hypothesis import given
from hypothesis import strategies as st

from datatrove_ckpt.checkpoint.lines import seal, unseal
from datatrove_ckpt.checkpoint.shares import Part, Place, Share, Shares, names_hash
from datatrove_ckpt.errors import CheckpointCorrupt, CheckpointMismatch
from datatrove_ckpt.preflight.reshard.run import deal, fill_level
from datatrove_ckpt.readers import Reading, SeekingReader, jsonl, position_state, tables
from datatrove_ckpt.readers.inputs import between, divide, joined
from tests.unit.test_readers import FEW_KINDS, plain, reader, rows, write, write_jsonl

SEEDS = [None, 7]


@pytest.fixture(autouse=True)
def _tiny_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "_BLOCK", 256)
    monkeypatch.setattr(tables, "_CONVERTED_ROWS", 3)


def whole(read: SeekingReader) -> list[Part]:
    return [Part(name) for name in read._list_inputs(0, 1, None).names]


def share_of(read: SeekingReader, parts: list[Part]) -> Share:
    """A share with the facts of each file that ``reshard`` keeps."""
    known = [part if part.is_whole else _known(read, part) for part in parts]
    return Share(1, names_hash(read._list_inputs(0, 1, None).names), known)


def _known(read: SeekingReader, part: Part) -> Part:
    inputs = read._list_inputs(0, 1, None)
    index = list(inputs.names).index(part.name)
    size = inputs.size(index)
    return part._replace(size=size, hash="" if read._may_grow(part.name) else inputs.fingerprint(index, size, True))


def read_share(read: SeekingReader, share: Share, state: Any = None) -> list[Document]:
    reading = Reading(state, share=share)
    with reading:
        found = list(read.run(rank=3, world_size=5))
    reading.check_share()
    return found


def places(documents: list[Document]) -> list[Place]:
    states = [json.loads(json.dumps(position_state(document))) for document in documents]
    return [Place(state["before"]["files"], tuple(state["at"])) for state in states]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", FEW_KINDS)
def test_what_is_divided_at_a_document_is_the_whole(tmp_path: Path, kind: str, seed: int | None) -> None:
    write(tmp_path, kind)
    read = reader(str(tmp_path), kind, shuffle_seed=seed)
    expected = list(read.run())
    parts, ends = whole(read), places(expected)
    for number in range(0, len(expected), max(1, len(expected) // 7)):
        first = between(parts, Place(0, ()), ends[number])
        second = between(parts, ends[number], None)
        found = [read_share(read, share_of(read, share)) for share in (first, second)]
        assert [plain(each) for each in found] == [plain(expected[: number + 1]), plain(expected[number + 1 :])]
        assert joined([*first, *second]) == parts


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", FEW_KINDS)
def test_a_share_resumes_after_each_of_its_documents(tmp_path: Path, kind: str, seed: int | None) -> None:
    write(tmp_path, kind)
    read = reader(str(tmp_path), kind, shuffle_seed=seed)
    all_documents = list(read.run())
    ends = places(all_documents)
    third = len(ends) // 3
    pieces = [between(whole(read), ends[third], ends[2 * third]), between(whole(read), Place(0, ()), ends[third // 2])]
    share = share_of(read, pieces[0] + pieces[1])
    expected = read_share(read, share)
    assert plain(expected) == plain(all_documents[third + 1 : 2 * third + 1] + all_documents[: third // 2 + 1])
    for number, document in enumerate(expected):
        state = json.loads(json.dumps(position_state(document)))
        assert plain(read_share(read, share, state)) == plain(expected[number + 1 :])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow"])
def test_a_file_is_divided_by_bytes_into_pieces_that_are_the_whole(tmp_path: Path, kind: str, seed: int | None) -> None:
    write(tmp_path, kind)
    read = reader(str(tmp_path), kind, shuffle_seed=seed)
    inputs = read._list_inputs(0, 1, None)
    for index, part in enumerate(whole(read)):
        size = inputs.size(index)
        part = part._replace(bytes=size)
        expected = plain(read_share(read, share_of(read, [part])))
        for count in (2, 3, 50):
            pieces = divide(read, inputs, index, part, [size * number // count for number in range(1, count)])
            found = [plain(read_share(read, share_of(read, [piece]))) for piece in pieces]
            assert [one for piece in found for one in piece] == expected
            assert sum(piece.bytes for piece in pieces) == size
            assert len(pieces) <= count


def test_a_position_that_datatroves_dealing_gave_is_one_in_the_share_that_begins_with_it(tmp_path: Path) -> None:
    write_jsonl(tmp_path)
    read = reader(str(tmp_path), "jsonl")
    mine = list(read.run(rank=0, world_size=2))
    parts = [Part(name) for name in read._list_inputs(0, 2, None).names]
    state = json.loads(json.dumps(position_state(mine[2])))
    share = share_of(read, between(parts, Place(0, ()), places(mine)[4]))
    with Reading(state, share=share):
        assert plain(read.run(rank=0, world_size=7)) == plain(mine[3:5])
    with pytest.raises(CheckpointMismatch, match="shard"), Reading(state, share=share):
        list(read.run(rank=2, world_size=7))


def test_files_that_come_or_go_after_the_input_was_dealt_out_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "jsonl")
    read = reader(str(tmp_path), "jsonl")
    share = share_of(read, whole(read))
    (tmp_path / "zzz.jsonl").write_text('{"text": "late"}\n')
    with pytest.raises(CheckpointMismatch, match="files were added, removed or renamed since"):
        read_share(read, share)


@pytest.mark.parametrize("change", ["the line of the cut", "the line after it", "shorter"])
def test_a_file_that_has_changed_where_it_was_divided_is_refused(tmp_path: Path, change: str) -> None:
    lines = [json.dumps(row) + "\n" for row in rows(6)]
    path = tmp_path / "0.jsonl"
    path.write_text("".join(lines))
    read = reader(str(tmp_path), "jsonl")
    end = places(list(read.run()))[2]
    shares = [share_of(read, between(whole(read), Place(0, ()), end)), share_of(read, between(whole(read), end, None))]
    if change == "shorter":
        path.write_text("".join(lines[:2]))
    else:
        number = 3 if change == "the line of the cut" else 4  # the first row has no text
        lines[number] = lines[number].replace("text", "TEXT", 1)
        path.write_text("".join(lines))
    refused = 0
    for share in shares:
        try:
            read_share(read, share)
        except CheckpointMismatch as error:
            assert "0.jsonl" in str(error)
            refused += 1
    assert refused == (0 if change == "the line after it" else 2)


def test_a_file_may_grow_behind_the_part_of_this_rank(tmp_path: Path) -> None:
    path = tmp_path / "0.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(6)))
    read = reader(str(tmp_path), "jsonl")
    documents = list(read.run())
    end = places(documents)[2]
    first, second = (
        share_of(read, between(whole(read), Place(0, ()), end)),
        share_of(read, between(whole(read), end, None)),
    )
    state = json.loads(json.dumps(position_state(read_share(read, first)[1])))
    with path.open("a") as file:
        file.write(json.dumps(rows(1, 1)[0]) + "\n")
    assert plain(read_share(read, first, state)) == plain(documents[2:3])
    assert len(read_share(read, second)) == 3


def test_a_pipeline_without_one_reader_of_ours_is_refused(tmp_path: Path) -> None:
    reading = Reading(share=Share(1, "", []))
    with pytest.raises(CheckpointMismatch, match="only one reader of"):
        reading.check_share()


PARTS = {
    0: [Part("a", bytes=3), Part("b", (), (6, 7), 100, "hash", 9)],
    1: [Part("b", (6, 7), (9, 0), 100, "hash", 2), Part("b", (9, 0), None, 100, "hash", 4)],
    5: [Part("c", (), (1,), 7), Part("c", (1,), None, 7)],
}
SHARES = Shares(2, 3, names_hash(["a", "b", "c"]), PARTS)


def test_shares_come_back_from_their_bytes() -> None:
    assert Shares.from_bytes(SHARES.to_bytes(), "x") == SHARES
    assert SHARES.of(2).parts == []
    assert [*SHARES.retired] == [5]


def test_every_damaged_byte_of_shares_is_seen() -> None:
    data = SHARES.to_bytes()
    for place in range(len(data)):
        with pytest.raises(CheckpointCorrupt, match=r"^shares\.json cannot be read"):
            Shares.from_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :], "shares.json")
        with pytest.raises(CheckpointCorrupt, match=r"^shares\.json cannot be read"):
            Shares.from_bytes(data[:place], "shares.json")


def edited(ranks: dict[int, list[Part]]) -> dict[str, dict[int, list[Part]]]:
    """What somebody may do to the shares who makes the checksum right again."""
    first, second = ranks[0], ranks[1]
    part = first[1]
    return {
        "a rank is gone": {0: first, 1: second},
        "a share is empty": ranks | {0: []},
        "a file is gone": ranks | {0: first[1:]},
        "the last part is gone": ranks | {1: second[:1]},
        "a part is there twice in one share": ranks | {1: [*second, second[1]]},
        "a share is there twice": ranks | {2: first},
        "a part ends earlier": ranks | {0: [first[0], part._replace(end=(5, 7))]},
        "a part begins later": ranks | {1: [second[0]._replace(begin=(7, 7)), second[1]]},
        "a whole file ends": ranks | {0: [Part("a", end=(1,)), part]},
        "another name": ranks | {0: [Part("d"), part]},
        "a part of another file": ranks | {0: [first[0], part._replace(name="a")]},
    }


@pytest.mark.parametrize("what", edited(PARTS))
def test_shares_that_lose_or_repeat_a_document_are_refused(what: str) -> None:
    data = Shares(2, 3, SHARES.input, edited(PARTS)[what]).to_bytes()
    with pytest.raises(CheckpointCorrupt, match=r"^shares\.json cannot be read \(the shares (do not )?hold "):
        Shares.from_bytes(data, "shares.json")


@pytest.mark.parametrize("change", [{"version": 9}, {"ranks": {"0": [["a"]]}}, {"ranks": []}, {"round": "x"}, None])
def test_what_are_no_shares_is_refused(change: dict[str, Any] | None) -> None:
    content = [] if change is None else json.loads(unseal(SHARES.to_bytes())) | change
    with pytest.raises(CheckpointCorrupt, match=r"^shares\.json cannot be read"):
        Shares.from_bytes(seal(json.dumps(content).encode()) if change else b"[]", "shares.json")


# How ``reshard`` deals parts of an input out to tasks: everything once, and to each about the same -------------------


def cut(part: Part, ends: Sequence[int]) -> list[Part]:
    """Exactly there; a piece is its range of bytes."""
    start = part.begin[0] if part.begin else 0
    edges = [start, *(start + end for end in ends), start + part.bytes]
    return [Part(part.name, (a,), (b,), bytes=b - a) for a, b in itertools.pairwise(edges)]


def ranges(dealt: list[list[Part]]) -> dict[str, list[tuple[int, int]]]:
    found: dict[str, list[tuple[int, int]]] = {}
    for part in (part for mine in dealt for part in mine):
        begin = part.begin[0] if part.begin else 0
        found.setdefault(part.name, []).append((begin, begin + part.bytes))
    return {name: sorted(pairs) for name, pairs in found.items()}


@given(
    st.lists(st.integers(1, 10**6), min_size=1, max_size=40),
    st.lists(st.just(0) | st.integers(0, 10**5), min_size=1, max_size=60),
)
def test_everything_is_dealt_out_once_and_about_evenly(sizes: list[int], loads: list[int]) -> None:
    parts = [Part(str(number), bytes=size) for number, size in enumerate(sizes)]
    dealt = deal(parts, loads, cut, lambda part: True)
    for part in parts:
        pairs = ranges(dealt)[part.name]
        assert (pairs[0][0], pairs[-1][1]) == (0, part.bytes)
        assert all(before[1] == after[0] for before, after in itertools.pairwise(pairs))
    done = [load + sum(part.bytes for part in mine) for load, mine in zip(loads, dealt, strict=True)]
    level = fill_level(list(map(float, loads)), sum(part.bytes for part in parts))
    assert max(done) <= max(1.12 * level + len(parts), max(loads))
    assert sum(len(pairs) for pairs in ranges(dealt).values()) < len(parts) + len(loads)


def test_files_that_cannot_be_entered_in_the_middle_stay_whole() -> None:
    parts = [Part("large", bytes=100), Part("b", bytes=40), Part("c", bytes=30), Part("divisible", bytes=60)]
    dealt = deal(parts, [0, 0, 0], cut, lambda part: part.name == "divisible")
    assert [sum(part.bytes for part in mine) for mine in dealt] == [100, 65, 65]
    assert {name: len(pairs) for name, pairs in ranges(dealt).items()} == {"large": 1, "b": 1, "c": 1, "divisible": 2}


def test_the_parts_of_a_task_are_in_the_order_of_the_input() -> None:
    parts = [Part(str(number), bytes=10) for number in range(20)]
    for mine in deal(parts, [0, 0, 0], cut, lambda part: int(part.name) % 2 == 0):
        assert [int(part.name) for part in mine] == sorted(int(part.name) for part in mine)


def test_a_level_is_that_of_water_poured_over_the_loads() -> None:
    assert fill_level([0, 0], 10) == 5
    assert fill_level([0, 6], 4) == 4
    assert fill_level([0, 6], 10) == 8
    assert fill_level([3], 0) == 3


def test_very_many_tasks_are_dealt_out_in_no_time() -> None:
    """Not a bound on seconds: at a cost that grows with the square, this would take minutes."""
    dealt = deal([Part("a", bytes=20_000)], [0] * 20_000, cut, lambda part: True)
    assert {sum(part.bytes for part in mine) for mine in dealt} == {1}
