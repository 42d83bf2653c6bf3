"""How large an input is, and how much of it lies before a document: for every format, from the
start to the end.
"""

import random
from types import SimpleNamespace

import pyarrow as pa
import pytest

from datatrove_ckpt.checkpoint.history_records import InputPosition
from datatrove_ckpt.generation.progress import input_position
from datatrove_ckpt.readers import jsonl
from datatrove_ckpt.readers.extent import InputExtent, Reached
from datatrove_ckpt.readers.positions import position_of
from tests.unit.tables import reader_of, write_table

FILES, ROWS = 3, 400
RANDOM = random.Random(3)
TEXTS = [RANDOM.randbytes(RANDOM.randrange(20, 60)).hex() for _ in range(FILES * ROWS)]


def write(folder, kind):
    options = {"compression": None} if kind == "parquet" else {}
    for number in range(FILES):
        table = pa.table({"text": TEXTS[number * ROWS : (number + 1) * ROWS]})
        write_table(folder / f"{number}.{kind}", table, 90, **options)


def reached(document):
    """At once: a reader is some documents ahead, and what was read of a compressed file is that of
    now.
    """
    position = position_of(document)
    return position[2].reached(position)


KINDS = ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "arrow"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_share_of_the_bytes_is_near_that_of_the_documents(tmp_path, monkeypatch, kind):
    if kind == "jsonl":
        monkeypatch.setattr(jsonl, "_BLOCK", 2000)
    write(tmp_path, kind)
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    before = 0
    batches = {"batch_size": 50} if kind == "parquet" else {}
    for number, document in enumerate(reader_of(tmp_path, kind, **batches).run(), 1):
        done, total, unit = reached(document)
        assert (total, unit) == (size, "bytes")
        assert done / size == pytest.approx(number / len(TEXTS), abs=0.12)
        assert done >= before
        before = done
    assert number == len(TEXTS)
    assert before / size > 0.6


class ManyFiles:
    """10,000 files, of which some are asked for their size."""

    def __init__(self):
        self.names = [f"{number}" for number in range(10_000)]
        self.asked = 0

    def size_for_people(self, index):
        self.asked += 1
        return 100 + index % 2


def test_of_many_files_some_are_measured_in_a_thread():
    inputs = ManyFiles()
    extent = InputExtent(inputs, -1, is_near=False)
    assert not inputs.asked, "nobody wants to know yet"
    extent.measure()
    extent.measuring.join()
    assert extent.total == pytest.approx(1_005_000, rel=0.01)
    assert 0 < inputs.asked <= 50
    extent.measure()
    assert not extent.measuring.is_alive(), "once"


def source(done, handed_over, is_at_end=False):
    return SimpleNamespace(reached=lambda: done, handed_over=handed_over, is_at_end=is_at_end)


def test_documents_in_work_are_not_done():
    read = source(Reached(600, 1000, "bytes"), 30)
    assert input_position(read, 30, 45) == InputPosition(450, 1000, "bytes")
    assert input_position(read, 30, 60) == InputPosition(600, 1000, "bytes")
    assert input_position(read, 30, 90).done == 900, (
        "documents that an earlier attempt finished further on"
    )
    assert input_position(read, 30, 200).done == 1000
    assert input_position(source(Reached(990, 1000, "bytes"), 60, True), 0, 60).share == 1.0
    assert input_position(source(Reached(0, 1000, "bytes"), 0), 0, 0) == InputPosition(
        0, 1000, "bytes"
    )
