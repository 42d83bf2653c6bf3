"""What a sample says of the whole input: how often its range holds, and of which rows it takes."""

import itertools
import json
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from datatrove_ckpt.readers import JsonlReader, ParquetReader
from datatrove_ckpt.run_folder import counted_input
from datatrove_ckpt.run_folder.counted_input import count_input
from tests.bench.sample_prices import UNEVEN, priced

SORTED = [{"id": str(row), "text": "x" * (1 + row // 2)} for row in range(500)]


def runner(reader, tasks=1):
    return SimpleNamespace(plan=SimpleNamespace(tasks=tasks), before=[reader])


def write_parquet(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=20)


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_of_twenty_uneven_jobs_eighteen_cost_what_their_samples_say():
    jobs = [priced(UNEVEN[seed % 3], seed) for seed in range(20)]
    assert sum(found.low <= truth <= found.high for truth, found in jobs) >= 18
    assert max(found.high / found.low for _, found in jobs) <= 2


def test_rows_sorted_by_length_are_counted_and_priced_as_a_whole(tmp_path):
    write_lines(tmp_path / "1.jsonl", SORTED)
    documents, whole = count_input(runner(JsonlReader(str(tmp_path), text_key=None)), 20)
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
    steps = runner(reader(str(tmp_path), text_key=None), tasks)
    documents, whole = count_input(steps, 20)
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
    documents, whole = count_input(runner(reader), 20)
    assert 0 < len(documents) < 20
    assert whole.number.low < whole.number.high
