"""What a sample says of the whole input: how often its range holds, and of which rows it takes."""

import itertools
import json
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datatrove.data import Document

from datatrove_ckpt.readers import JsonlReader, ParquetReader
from datatrove_ckpt.readers.csv_rows import CSVReader
from datatrove_ckpt.run_folder import counted_input
from datatrove_ckpt.run_folder.counted_input import count_input
from datatrove_ckpt.run_folder.estimate import Estimate, Population

SORTED = [{"id": str(row), "text": "x" * (1 + row // 2)} for row in range(500)]


def sampled(reader, number, tasks=1, steps=()):
    runner = SimpleNamespace(plan=SimpleNamespace(tasks=tasks), before=[reader, *steps])
    drawn = count_input(runner, number)
    return drawn.documents, drawn.whole


def write_parquet(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=20)


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def lengths(seed, random, rows):
    """Of rows sorted by length, of lognormal ones, of files of unlike rows."""
    if seed % 3 == 0:
        return np.sort(np.ceil(random.lognormal(4, 1, rows)).astype(int))
    if seed % 3 == 1:
        return np.ceil(random.lognormal(4, 0.8, rows)).astype(int)
    return np.repeat([20, 60, 200, 600], rows // 4) + random.integers(0, 20, rows)


def priced(folder, seed, rows=2000):
    """The true cost of a job with simulated answers, and the estimate of a sample."""
    random = np.random.default_rng(seed)
    sizes = lengths(seed, random, rows)
    paid = sizes / 4 + 4 * random.lognormal(3, random.choice([0.3, 0.6, 0.8]), rows)
    for number, part in enumerate(np.split(np.arange(rows), 4)):
        lines = [{"id": str(row), "text": "x" * int(sizes[row])} for row in part]
        write_lines(folder / f"{number}.jsonl", lines)
    reader = JsonlReader(str(folder), text_key=None)
    documents, whole = sampled(reader, 50, int(random.integers(1, 5)))
    sent = [paid[int(document.id)] for document in documents]
    return paid.sum(), whole.total(sent, [document.size for document in documents])


def test_of_twenty_uneven_jobs_eighteen_cost_what_their_samples_say(tmp_path):
    jobs = [priced(tmp_path, seed) for seed in range(20)]
    assert sum(found.low <= truth <= found.high for truth, found in jobs) >= 18
    assert max(found.high / found.low for _, found in jobs) <= 2


def test_rows_sorted_by_length_are_counted_and_priced_as_a_whole(tmp_path):
    write_lines(tmp_path / "1.jsonl", SORTED)
    documents, whole = sampled(JsonlReader(str(tmp_path), text_key=None), 20)
    assert whole.number.low == whole.number.high == 500
    lengths = [len(document.text) for document in documents]
    assert lengths == sorted(lengths)
    assert lengths[0] < 25
    assert lengths[-1] > 225
    characters = whole.total(lengths, [document.size for document in documents])
    assert characters.low <= sum(len(row["text"]) for row in SORTED) <= characters.high


@pytest.fixture
def slow(monkeypatch):
    """Each look at the clock takes a second."""
    monkeypatch.setattr(
        counted_input, "time", SimpleNamespace(monotonic=itertools.count().__next__)
    )


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize(
    "name, write, reader",
    [("1.parquet", write_parquet, ParquetReader), ("1.jsonl", write_lines, JsonlReader)],
)
@pytest.mark.parametrize("tasks", [1, 2])
def test_rows_that_take_too_long_come_from_places_of_all_files(
    tmp_path, name, write, reader, tasks
):
    write(tmp_path / f"a{name}", SORTED[:300])
    write(tmp_path / f"b{name}", SORTED[300:])
    documents, whole = sampled(reader(str(tmp_path), text_key=None), 20, tasks)
    assert whole.number.low == whole.number.high == 500
    assert {int(document.id) // 300 for document in documents} == {0, 1}
    for document in documents:
        task = SORTED
        if tasks == 2:
            task = [SORTED[:300], SORTED[300:]][document.rank]
        assert task[document.ordinal]["text"] == document.text


@pytest.mark.usefixtures("slow")
def test_documents_that_are_not_counted_are_estimated_by_bytes(tmp_path):
    write_lines(tmp_path / "1.jsonl", SORTED)
    reader = JsonlReader(str(tmp_path))  # a row without a text would be no document
    documents, whole = sampled(reader, 20)
    assert 0 < len(documents) < 20
    assert whole.number.low < whole.number.high


def _halves(documents, rank, world_size):
    """Splits long documents. Only the first half has a position in the input."""
    for document in documents:
        yield document
        if len(document.text) > 200:
            yield Document(document.text, f"{document.id} b")


def test_documents_of_a_step_that_splits_some_are_estimated_by_bytes(tmp_path, monkeypatch):
    clock = itertools.count(step=0.25).__next__  # two documents are read at a time
    monkeypatch.setattr(counted_input, "time", SimpleNamespace(monotonic=clock))
    write_lines(tmp_path / "1.jsonl", SORTED[:300])
    write_lines(tmp_path / "2.jsonl", [{"id": str(row), "text": "x" * 300} for row in range(200)])
    documents, whole = sampled(JsonlReader(str(tmp_path)), 20, 2, [_halves])
    assert 0 < len(documents) < 500
    assert whole.number.low < 700 < whole.number.high


@pytest.mark.usefixtures("slow")
def test_rows_that_are_skipped_do_not_count(tmp_path):
    write_lines(
        tmp_path / "1.jsonl", [{"id": str(row), "text": "a text"} for row in range(100, 400)]
    )
    _, whole = sampled(JsonlReader(str(tmp_path), skip=200), 5)
    assert whole.number.value == pytest.approx(100)


@pytest.mark.usefixtures("slow")
def test_rows_that_are_read_ahead_are_not_taken_for_few(tmp_path):
    (tmp_path / "1.csv").write_text("id,text\n" + "1,a text\n" * 500)
    _, whole = sampled(CSVReader(str(tmp_path)), 5)
    assert whole is None


class _Even(JsonlReader):
    """Leaves rows out."""

    def get_document_from_dict(self, data, source_file, id_in_file):
        if int(data["id"]) % 2:
            return None
        return super().get_document_from_dict(data, source_file, id_in_file)


@pytest.mark.usefixtures("slow")
def test_rows_of_a_readers_subclass_are_not_counted_as_documents(tmp_path):
    write_lines(tmp_path / "1.jsonl", SORTED)
    documents, _ = sampled(_Even(str(tmp_path), text_key=None), 5)
    assert [int(document.id) for document in documents] == [
        2 * document.ordinal for document in documents
    ]


@pytest.mark.usefixtures("slow")
def test_parts_whose_lines_cannot_be_read_are_left_out(tmp_path):
    (tmp_path / "a.jsonl").write_text("no row\n" * 500)
    write_lines(tmp_path / "b.jsonl", SORTED)
    reader = JsonlReader(str(tmp_path), text_key=None, max_skipped=None)
    documents, _ = sampled(reader, 5)
    assert len(documents) == 5


def test_each_task_may_skip_as_many_lines_as_in_its_run(tmp_path, monkeypatch):
    """Tasks are read in turns."""
    clock = itertools.count(step=0.15).__next__
    monkeypatch.setattr(counted_input, "time", SimpleNamespace(monotonic=clock))
    for task in range(3):
        write_lines(tmp_path / f"{task}.jsonl", SORTED[:10])
        with (tmp_path / f"{task}.jsonl").open("a") as file:
            file.write("no row\n")
    _, whole = sampled(JsonlReader(str(tmp_path), max_skipped=1), 3, tasks=3)
    assert whole.number.value == 30


def test_only_the_documents_of_the_sample_are_held():
    def large(data, rank, world_size):
        for number in range(200):
            yield Document(text=f"{number} " + "x" * 100_000, id=str(number))

    tracemalloc.start()
    try:
        documents, _ = sampled(large, 10)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2_000_000
    assert len(documents) == 10
    assert {int(document.id) // 100 for document in documents} == {0, 1}


def test_documents_that_are_all_larger_than_the_mean_cost_more_than_nothing():
    whole = Population(Estimate.exact(1000), 10.0)
    found = whole.total([10, 30, 33, 50], [100, 200, 300, 290])
    assert 0 < found.low < found.value < found.high
