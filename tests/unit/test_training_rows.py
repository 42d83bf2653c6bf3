"""What a worker of a training loop reads: files, plan and rows together, without torch."""

import copy
import itertools
import json
import pickle
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datatrove.io import DataFolder

from datatrove_ckpt.errors import CheckpointMismatch, ConfigError, InputError
from datatrove_ckpt.readers import JsonlReader, ParquetReader
from datatrove_ckpt.torch.dataset import (
    Batched,
    Epoch,
    InputIndex,
    ReaderDataset,
    RowSource,
    parse_window,
)
from datatrove_ckpt.torch.mixing import Mix
from datatrove_ckpt.torch.order import order_by_rows
from datatrove_ckpt.torch.states import DatasetState, Slot
from tests import golden
from tests.training_rows import merge, rows_of
from tests.unit.tables import reader_of, write_table

SIZES = [40, 7, 25, 31]
ROWS = [{"text": f"text {i}", "id": f"id {i}", "n": i} for i in range(sum(SIZES))]


def write(folder, kind):
    """Four files."""
    folder.mkdir()
    for number, last in enumerate(itertools.accumulate(SIZES)):
        write_table(
            folder / f"{number}.{kind}", pa.Table.from_pylist(ROWS[last - SIZES[number] : last]), 6
        )
    return reader_of(folder, kind)


@pytest.fixture(
    params=[
        "parquet",
        "jsonl.zst",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("arrow", "jsonl")),
    ]
)
def reader(request, tmp_path):
    return write(tmp_path / "input", request.param)


def made(reader, **changes):
    return rows_of(reader, **({"seed": 1, "window": 20} | changes))


def epoch(dataset, slot, then=None, number=0):
    return Epoch(dataset, slot, number, then and DatasetState.from_json(then))


ALONE = Slot(0, 1, 0, 1)


def slots(ranks, workers):
    return [
        Slot(rank, ranks, worker, workers) for rank in range(ranks) for worker in range(workers)
    ]


@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_each_row_is_read_once(reader, ranks):
    options = [
        {},
        {"seed": None},
        {"batch_size": 4},
        {"seed": None, "batch_size": 3},
    ]
    for changes, workers in itertools.product(options, (1, 2, 3)):
        dataset = made(reader, **changes)
        read = [[sample["id"] for sample in epoch(dataset, slot)] for slot in slots(ranks, workers)]
        assert sorted(itertools.chain(*read)) == sorted(row["id"] for row in ROWS)
        lengths = [len(ids) for ids in read]
        assert max(lengths) - min(lengths) <= changes.get("batch_size", 1)
        if (ranks, workers, changes.get("seed", 1)) == (1, 1, None):
            assert read[0] == [row["id"] for row in ROWS]


def test_the_states_of_all_ranks_continue_with_any_other_number(reader):
    datasets = itertools.cycle([made(reader), made(reader, seed=None)])
    changed = itertools.permutations([(1, 1), (2, 2), (3, 1)], 2)
    for (before, after), dataset in zip(changed, datasets, strict=False):
        read, states = Counter[str](), []
        for slot in slots(*before):
            running = epoch(dataset, slot)
            read.update(sample["id"] for sample in itertools.islice(running, 5 + slot.worker))
            states.append(running.state())
        merged = merge(states)
        for slot in slots(*after):
            read.update(sample["id"] for sample in epoch(dataset, slot, merged))
        assert len(read) == len(ROWS)
        assert set(read.values()) == {1}


# Damaged lines -----------------------------------------------------------------------------------


def write_holes(folder):
    """12 lines, of which every third is damaged."""
    folder.mkdir()
    lines = [
        ("{", "7", "[1]")[i // 3 % 3] if i % 3 == 1 else f'{{"text": "{i}"}}' for i in range(12)
    ]
    (folder / "a.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return JsonlReader(folder.as_posix())


def test_damaged_lines_are_left_out_and_named_once(tmp_path, log):
    found = [sample["text"] for sample in made(write_holes(tmp_path / "input"))]
    assert sorted(found, key=int) == [str(i) for i in range(12) if i % 3 != 1]
    assert len([line for line in log if "A row is damaged" in line]) == 1
    assert len([line for line in log if "`a.jsonl`, the line at byte" in line]) == 4


def test_even_ranks_get_another_row_instead_also_after_a_stop(tmp_path):
    dataset = made(write_holes(tmp_path / "input"), drop_last=True)
    for slot in slots(2, 1):
        whole = list(epoch(dataset, slot))
        assert len(whole) == 6
        for stop in range(6):
            running = epoch(dataset, slot)
            assert list(itertools.islice(running, stop)) == whole[:stop]
            assert list(epoch(dataset, slot, running.state())) == whole[stop:]


def test_even_ranks_without_any_row_are_an_error(tmp_path):
    (tmp_path / "a.jsonl").write_text("[1]\n" * 5)
    with pytest.raises(InputError, match=r"None of the 5 rows .*JSON object"):
        next(iter(made(JsonlReader(tmp_path.as_posix()), drop_last=True)))


# Batches ----------------------------------------------------------------------------------------


def columns_of(number):
    """Of each kind of value, and of some rows only."""
    row = {"text": f"text {number}", "n": number, "x": number / 2, "odd": bool(number % 2)}
    row |= {"ids": [number] * (1 + number % 3), "pair": [number, 1], "maybe": number or None}
    return row | {"words": [f"{number}"]}


def write_columns(folder, kind, files):
    """The third file has another column, and for JSONL other keys and a damaged line."""
    folder.mkdir()
    for number in range(files):
        rows = [columns_of(each) for each in range(10 * number, 10 * number + 10)]
        if number == 2:
            rows = [{"last": each, **row} for each, row in enumerate(rows)]
        path = folder / f"{number}.{kind}"
        if kind != "jsonl":
            write_table(path, pa.Table.from_pylist(rows), 4)
            continue
        lines = [*map(json.dumps, rows)]
        if number == 2:
            lines[4:7] = [json.dumps(dict(reversed(rows[4].items()))), '{"text": "alone"}', "{"]
        path.write_text("\n".join(lines))
    return reader_of(folder, kind)


def content(batch):
    """Names in their order, types, shapes and bytes."""
    return [
        (name, type(values), getattr(values, "dtype", None), [described(each) for each in values])
        for name, values in batch.items()
    ]


def described(value):
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    return type(value), value


@pytest.mark.parametrize("kind", ["parquet", "arrow", "jsonl"])
@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("size, drops", [(1, False), (4, True), (7, False), (99, False)])
def test_batches_of_columns_are_those_of_rows(tmp_path, kind, seed, size, drops):
    rows = ReaderDataset(write_columns(tmp_path / "input", kind, 2 if seed else 3))
    if seed:
        rows = rows.shuffle(seed, window=12)
    by_row, by_column = (epoch(each.batch(size, drops), ALONE) for each in (rows.map(dict), rows))
    for expected in by_row:
        assert content(next(by_column)) == content(expected)
        assert by_column.state()["samples"] == by_row.state()["samples"]
    assert next(by_column, None) is None
    assert DatasetState.from_json(by_column.state()).has_ended()


@pytest.mark.parametrize("seed", [None, 1])
def test_lines_of_text_cost_no_call_each(tmp_path, seed):
    lines = [json.dumps({"id": f"{number}", "text": "a text"}) for number in range(600)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    rows = ReaderDataset.from_folder(tmp_path)
    if seed:
        rows = rows.shuffle(seed)
    batches = iter(rows.batch(100))
    calls = []
    sys.setprofile(lambda frame, event, value: calls.append(event))
    try:
        assert sum(len(batch["text"]) for batch in batches) == 600
    finally:
        sys.setprofile(None)
    assert calls.count("call") < 600


# States ------------------------------------------------------------------------------------------


def states_of(reader, topology, samples=3, number=0, **changes):
    found = []
    dataset = made(reader, **changes)
    for slot in slots(*topology):
        running = epoch(dataset, slot, number=number)
        list(itertools.islice(running, samples))
        found.append(running.state())
    return found


@pytest.fixture
def parquet(tmp_path):
    return write(tmp_path / "input", "parquet")


def test_a_state_belongs_to_its_worker(parquet):
    (state, *_) = states_of(parquet, (2, 2))
    for slot in (*slots(2, 2)[1:], *slots(2, 1), ALONE):
        with pytest.raises(
            CheckpointMismatch, match=r"rank 0 of world_size=2, worker 0 of num_workers=2.*restore"
        ):
            epoch(made(parquet), slot, state)
    for changes in ({"batch_size": 2}, {"drop_last": True}):
        with pytest.raises(CheckpointMismatch, match="batch_size=1, even=None"):
            epoch(made(parquet, **changes), Slot(0, 2, 0, 2), state)


def test_what_cannot_be_merged_or_loaded_is_named(parquet):
    states = states_of(parquet, (2, 2))
    merged = merge(states)
    names = {"states": states, "merged": merged, "parquet": parquet}
    names["earlier"] = states_of(parquet, (2, 2), samples=2)[1]
    (names["one"],) = states_of(parquet, (1, 1))
    for code in golden.sections("merges"):
        golden.refuse("merges", code, {**globals(), **names})
    assert merge([*states, states[1]]) == merged  # ranks of one slot read the same rows
    assert merge([{"loader": [states]}]) == merge(reversed(states)) == merge([merged]) == merged


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow"])
def test_other_content_of_the_same_size_is_noticed(tmp_path, kind):
    reader = write(tmp_path / "input", kind)
    (state,) = states_of(reader, (1, 1))
    InputIndex(reader).check(state["input"])
    file = sorted((tmp_path / "input").iterdir())[0]
    content = file.read_bytes()
    file.write_bytes(content.replace(b"text 3", b"text 4"))
    assert file.read_bytes() != content
    with pytest.raises(CheckpointMismatch, match="content"):
        InputIndex(reader).check(state["input"])


def test_another_skip_or_limit_is_named(parquet):
    (state,) = states_of(parquet, (1, 1))
    for name in ("skip", "limit"):
        other = copy.copy(parquet)
        setattr(other, name, 5)
        with pytest.raises(CheckpointMismatch, match=rf"with {name}=(0|-1), now 5"):
            InputIndex(other).check(state["input"])


def test_a_merged_state_says_whether_the_epoch_has_ended(parquet):
    for samples, drop_last in [(3, False), (10**6, False), (10**6, True)]:
        merged = DatasetState.from_json(
            merge(states_of(parquet, (4, 1), samples, drop_last=drop_last))
        )
        assert merged.has_ended() == (samples > 3)


def write_other_row_groups(folder):
    table, path = pa.Table.from_pylist(ROWS[:40]), folder / "0.parquet"
    size = path.stat().st_size
    pq.write_table(table, path, row_group_size=20, compression="none")
    padded = table.replace_schema_metadata({"a": "b" * max(0, size - path.stat().st_size)})
    pq.write_table(padded, path, row_group_size=20)


def write_new(folder, *names):
    for name in names:
        pq.write_table(pa.Table.from_pylist(ROWS[:30]), folder / name, row_group_size=6)


@pytest.mark.parametrize(
    "change, named",
    [
        (
            lambda folder: (folder / "3.parquet").unlink(),
            r"4 files of \d+ bytes to 3 of",
        ),
        (
            lambda folder: write_new(folder, "4.parquet"),
            r"4 files of \d+ bytes to 5 of",
        ),
        (
            lambda folder: write_new(folder, "2.parquet"),
            r"4 files of \d+ bytes to 4 of",
        ),
        (lambda folder: (folder / "2.parquet").rename(folder / "2b.parquet"), "4 files"),
        (write_other_row_groups, "4 files|other row groups"),
    ],
    ids=["gone", "new", "resized", "renamed", "rows"],
)
def test_files_that_changed_are_refused_read_or_not(parquet, change, named):
    (state,) = states_of(parquet, (1, 1))
    change(Path(parquet.data_folder.path))
    with pytest.raises(CheckpointMismatch, match=named) as caught:
        InputIndex(parquet).check(state["input"])
    assert "checkpoints_local_dir" not in str(caught.value)


def test_within_an_epoch_one_number_of_a_state_changes(parquet):
    dataset = made(parquet).shard(2, 0).map(dict).batch(4)
    batches = iter(dataset)
    states = []
    for _ in range(2):
        next(batches)
        states.append(dataset.state_dict())
    assert {key for key in states[0] if states[0][key] != states[1][key]} == {"samples", "checksum"}
    assert [state["samples"] for state in states] == [4, 8]


@pytest.mark.slow
def test_a_state_of_many_workers_and_files_is_small(tmp_path):
    for number in range(70):
        (tmp_path / f"{'a long name ' * 9}{number}.jsonl").write_text(
            f'{{"text": "{number}"}}\n' * 20
        )
    reader = JsonlReader(tmp_path.as_posix())
    dataset = made(reader)
    state = None
    for ranks, workers in ((16, 4), (3, 5), (2, 2), (64, 2)):
        states = []
        for slot in slots(ranks, workers):
            running = epoch(dataset, slot, state)
            list(itertools.islice(running, 2 - (slot.worker > 1)))
            states.append(running.state())
        assert max(len(json.dumps(one)) for one in states) < 1000
        state = merge(states)


_POOLS = []
"""A pool must outlive all that was allocated in it."""


@pytest.fixture
def pool():
    """Counts what pyarrow allocates."""
    usual = pa.default_memory_pool()
    _POOLS.append(pa.proxy_memory_pool(usual))
    pa.set_memory_pool(_POOLS[-1])
    yield _POOLS[-1]
    pa.set_memory_pool(usual)


def test_a_window_of_short_rows_is_bounded_by_their_number(tmp_path):
    """Each row's place in the order takes memory, too."""
    pq.write_table(
        pa.table({"n": np.zeros(200_000, np.int8)}), tmp_path / "a.parquet", row_group_size=1000
    )
    table = InputIndex(ParquetReader(tmp_path.as_posix())).table
    [share] = order_by_rows(table, 1, 0, parse_window("1MB")).shares
    assert share.rows / len(share._ends) <= 2**20 / 64


@pytest.mark.parametrize("seed", [None, 1])
def test_the_type_of_arrays_does_not_depend_on_where_a_run_was_resumed(tmp_path, seed):
    for number, (kind, count) in enumerate(((pa.int64(), 10), (pa.int32(), 200))):
        column = pa.array([[row, row] for row in range(count)], pa.list_(kind))
        pq.write_table(pa.table({"x": column}), tmp_path / f"{number}.parquet", row_group_size=20)
    index = InputIndex(ParquetReader(tmp_path.as_posix()))
    unified = index.blocks.unified(["x"])
    order = order_by_rows(index.table, seed, 0, parse_window(40))
    for first in range(0, 200, 10):
        source = RowSource(index, order, ["x"], unified)  # as after a resume
        rows = source.samples(*order.locate(np.arange(first, first + 10)))
        assert {row["x"].dtype for row in rows if row} == {np.dtype(np.int64)}


@pytest.mark.matrix("case", ["large rows", "repeated texts", "compressed batches"])
def test_what_is_read_beside_a_window_is_bounded(tmp_path, request, case):
    """Beside the window: one group that is being decoded, of one file, and not one of each file."""
    count, length = (4000, 4000) if case == "repeated texts" else (4, 4_000_000)
    kind = "parquet"
    options = {}
    if case == "compressed batches":
        kind = "arrow"
        options = {"options": pa.ipc.IpcWriteOptions(compression="zstd")}
    for number in range(6):
        column = [f"{number}{row % 3}" * (length // 2) for row in range(count)]
        if options:
            column = pa.array([[number] * 1000] * 4000, pa.list_(pa.int32()))
        write_table(tmp_path / f"{number}.{kind}", pa.table({"x": column}), **options)
    index = InputIndex(reader_of(tmp_path, kind))
    pool = request.getfixturevalue("pool")  # several files at once are counted before
    order = order_by_rows(index.table, 1, 0, parse_window("16MB"))
    source = RowSource(index, order, ["x"])
    for place in range(0, index.table.total, index.table.total // 24):
        source.samples(*order.locate(np.arange(place, place + 1)))
    assert pool.max_memory() < 16e6 + 3 * 17e6, "6 files have 16 MB each"


def test_settings_may_be_numbers_of_numpy(parquet):
    states = []
    for kind in (int, np.int64):
        dataset = rows_of(
            parquet, kind(1), kind(2), seed=kind(3), columns=["n"], batch_size=kind(2)
        )
        assert len(list(dataset)) == len(ROWS) // 2
        states.append(json.dumps(dataset.state_dict()))
    assert states[0] == states[1]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))])
def test_a_copy_begins_anew_and_workers_hear_of_its_epochs(parquet, copied):
    dataset = Mix([rows_of(parquet, columns=["n"])], [1])
    begun = iter(dataset)
    next(begun)
    made = copied(dataset)
    assert [row["n"] for row in made] == list(range(len(ROWS)))
    numbers = made._shared._numbers
    assert isinstance(numbers, list) or numbers.is_shared(), "without torch it is a list"


def test_an_error_of_a_function_ends_no_epoch(reader):
    def text(row):
        if row["text"].endswith("2"):
            raise ValueError(row["text"])
        return str(row["text"])

    found = []
    samples = iter(made(reader, function=text))
    for _ in ROWS:
        with suppress(ValueError, StopIteration):
            found.append(next(samples))
    assert sorted(found) == sorted(row["text"] for row in ROWS if row["n"] % 10 != 2)


# Words of datasets -------------------------------------------------------------------------------


def test_a_folder_is_read_by_the_kind_of_its_files(tmp_path):
    for kind in ("parquet", "jsonl.gz", "arrow"):
        write(tmp_path / kind, kind)
        rows = ReaderDataset.from_folder(tmp_path / kind)
        assert [row["n"] for row in rows] == [row["n"] for row in ROWS]
    (tmp_path / "arrow" / "state.json").write_text("{}")  # of save_to_disk
    (tmp_path / "arrow" / "0.arrow").rename(tmp_path / "arrow" / "data-0.arrow")
    assert len(ReaderDataset.from_folder(str(tmp_path / "arrow"))) == SIZES[0]
    assert len(ReaderDataset.from_folder(str(tmp_path), "parquet/[01].parquet")) == sum(SIZES[:2])
    for place, message in (
        (tmp_path, r"has \.arrow and \.jsonl and \.parquet files, and"),
        (tmp_path / "no", "is no folder with files"),
        (tmp_path / "parquet/0.parquet", "is no folder with files.*glob_pattern"),
    ):
        with pytest.raises(ConfigError, match=message):
            ReaderDataset.from_folder(str(place))


def test_each_call_makes_a_new_dataset_and_shards_of_shards_are_shards(parquet):
    rows = ReaderDataset(parquet)
    shuffled = rows.shuffle(seed=1, window=20)
    assert [row["n"] for row in rows] == [row["n"] for row in ROWS]
    assert list(rows.select_columns(["n"])) == [{"n": row["n"]} for row in ROWS]
    read = [[row["n"] for row in shuffled.shard(2, rank)] for rank in range(2)]
    nested = [[row["n"] for row in shuffled.shard(2, 1).shard(3, rank)] for rank in range(3)]
    assert sorted(itertools.chain(*read)) == [row["n"] for row in ROWS]
    assert [nested[place % 3][place // 3] for place in range(len(read[1]))] == read[1]


def test_functions_add_columns_and_apply_in_their_order(parquet):
    def double(row):
        return {"double": row["n"] * 2}

    rows = ReaderDataset(parquet).map(double)
    assert next(iter(rows)) == {**ROWS[0], "double": 0}
    assert list(rows.select_columns(["double"]))[1] == {"double": 2}
    assert list(rows.map(lambda row: row["double"]))[:3] == [0, 2, 4]
    batches = list(rows.batch(20).map(double))
    assert len(batches) == len(rows.batch(20)) == 6
    assert batches[5]["double"].tolist() == [200, 202, 204]
    assert batches[5]["id"] == ["id 100", "id 101", "id 102"]


@pytest.mark.parametrize("drop_last", [False, True])
def test_batches_are_those_of_all_workers_and_resume_after_each(reader, drop_last):
    dataset = made(reader).batch(4, drop_last_batch=drop_last)
    read = []
    for slot in slots(2, 3):
        whole = [batch["n"].tolist() for batch in epoch(dataset, slot)]
        read += whole
        for stop in range(len(whole)):
            running = epoch(dataset, slot)
            list(itertools.islice(running, stop))
            rest = epoch(dataset, slot, running.state())
            assert [batch["n"].tolist() for batch in rest] == whole[stop:]
    # Of 52 and 51 rows.
    assert sorted(map(len, read)) == [3] * (not drop_last) + [4] * 25
    assert len(dataset.shard(2, 0)) + len(dataset.shard(2, 1)) == len(read)


def test_a_batch_has_arrays_of_what_is_of_one_shape():
    rows = [
        {"a": [1, 2][:n], "b": np.arange(2), "c": "x", "d": n > 1, "e": np.arange(n)}
        for n in (1, 2)
    ]
    (batch,) = Batched(3, False)(iter(rows))
    shown = {name: getattr(column, "tolist", lambda: None)() for name, column in batch.items()}
    assert shown == {"a": None, "b": [[0, 1], [0, 1]], "c": None, "d": [False, True], "e": None}
    (batch,) = Batched(2, True)(iter([1.5, 2.5, 3.5]))
    assert batch.tolist() == [1.5, 2.5]


# What costs time for each row --------------------------------------------------------------------


def test_small_row_groups_are_read_together_and_each_path_is_made_once(tmp_path, monkeypatch):
    """A call of pyarrow costs as much as a hundred rows, and a path as much as three."""
    texts = [f"text {number}" for number in range(400)]
    for file in range(2):
        table = pa.table({"text": texts[200 * file :][:200]})
        pq.write_table(table, tmp_path / f"{file}.parquet", row_group_size=4)
    calls = Counter()

    def counting(owner, name):
        usual = getattr(owner, name)

        def call(*arguments, **named):
            calls[name] += 1
            return usual(*arguments, **named)

        monkeypatch.setattr(owner, name, call)

    counting(pq.ParquetFile, "iter_batches")
    counting(DataFolder, "resolve_paths")

    def take(rows, most_calls):
        calls.clear()
        found = [row["text"] for row in rows]
        assert calls["iter_batches"] <= most_calls
        assert calls["resolve_paths"] <= 4
        return found

    assert take(rows_of(ParquetReader(str(tmp_path))), 2) == texts
    shuffled = rows_of(ParquetReader(str(tmp_path)), seed=1)
    assert sorted(take(shuffled, 8)) == sorted(texts)


def test_columns_of_files_may_differ_in_the_order_of_the_input(tmp_path):
    for file, numbers in enumerate(([1, 2], ["a", "b"], [{"x": 1}, None])):
        table = pa.table({"text": ["t", "t"], "value": numbers})
        pq.write_table(table, tmp_path / f"{file}.parquet")
    found = rows_of(ParquetReader(str(tmp_path)), columns=["value"])
    assert [row["value"] for row in found] == [1, 2, "a", "b", {"x": 1}, None]


def test_rows_are_text_and_id_if_the_reader_reads_no_metadata(tmp_path, monkeypatch):
    """Of token rows of thousands of numbers, the others take most of the time."""
    columns = {name: [f"{name} {n}" for n in range(3)] for name in ("text", "id", "other")}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    asked = []
    usual = pq.ParquetFile.iter_batches

    def noting(file, *arguments, columns=None, **named):
        asked.append(columns)
        return usual(file, *arguments, columns=columns, **named)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", noting)
    for seed in (None, 1):
        reader = ParquetReader(str(tmp_path), read_metadata=False)
        found = list(rows_of(reader, seed=seed))
        assert sorted(row["id"] for row in found) == ["id 0", "id 1", "id 2"]
        assert asked[-1] == ["text", "id"]
        assert {key for row in found for key in row} == {"text", "id"}
