"""An input as blocks of rows: each row is in one block, and a block is read without the others."""

import json
import pickle
import random
import struct
from pathlib import Path

import pyarrow as pa
import pytest
from datatrove.io import DataFolder

from datatrove_ckpt.errors import CheckpointMismatch, ConfigError, InputError
from datatrove_ckpt.readers import (
    DamagedLine,
    JsonlReader,
    block_file,
    blocks,
    jsonl,
)
from datatrove_ckpt.readers.blocks import BlockInput
from tests import golden
from tests.unit.tables import ODD_LINES, reader_of, write_table

ROWS = [
    {
        "text": f"text {i}",
        "id": f"id {i}",
        "input_ids": list(range(i % 5)),
        "nested": {"a": i, "b": [{"c": str(i)}]},
    }
    for i in range(100)
]
SIZES = [40, 0, 25, 35]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "MAX_ROWS", 6)
    monkeypatch.setattr(jsonl, "PART_BYTES", 1000)
    monkeypatch.setattr(jsonl, "_SKIP_BYTES", 300)


def write(folder, kind):
    """Four files, one of them without rows, in row groups or record batches of 20 rows: several
    blocks each.
    """
    folder.mkdir()
    ending, options = FORMATS[kind]
    rest = pa.Table.from_pylist(ROWS)
    for number, size in enumerate(SIZES):
        write_table(folder / f"{number}.{ending}", rest[:size].combine_chunks(), 20, **options)
        rest = rest[size:]
    return reader_of(folder, ending)


FORMATS = golden.named("formats_of_tables", globals())


@pytest.fixture(params=FORMATS)
def reader(request, tmp_path):
    return write(tmp_path / "input", request.param)


def test_a_stream_with_dictionaries_is_refused(tmp_path):
    write_table(
        tmp_path / "a.arrow", pa.table({"x": pa.array(["a", "b"]).dictionary_encode()}), stream=True
    )
    with pytest.raises(
        ConfigError, match=r"'a.arrow' is an Arrow stream with dictionaries.*Write it as"
    ):
        BlockInput(reader_of(tmp_path, "arrow"))


def test_a_file_of_other_libraries_may_have_a_longer_mark(tmp_path):
    """Arrow for Rust pads it to 64 bytes."""
    table = pa.table({"x": [1, 2, 3]})
    write_table(tmp_path / "a.arrow", table)
    path = tmp_path / "a.arrow"
    data = path.read_bytes()
    first = 8 + table.schema.serialize().size  # the footer has the place of each batch
    start = len(data) - 10 - int.from_bytes(data[-10:-6], "little")
    footer = data[start:].replace(struct.pack("<q", first), struct.pack("<q", first + 56), 1)
    path.write_bytes(data[:8] + bytes(56) + data[8:start] + footer)
    assert pa.ipc.open_file(path).read_all() == table
    found = BlockInput(reader_of(tmp_path, "arrow"))
    assert [row for block in found for row in rows_of(found.read(block))] == table.to_pylist()


def test_counting_a_remote_arrow_file_reads_it_once(tmp_path, monkeypatch):
    table = pa.table({"x": pa.array(range(5000)).cast(pa.string()).dictionary_encode()})
    table = table.append_column("text", [["text " * 50] * 5000])
    write_table(tmp_path / "a.arrow", table, 1000)
    read = []
    original = block_file.RetryingFile.read

    def counted(file, size=-1):
        data = original(file, size)
        read.append(len(data))
        return data

    monkeypatch.setattr(DataFolder, "is_local", lambda folder: False)
    monkeypatch.setattr(block_file.RetryingFile, "read", counted)
    file = reader_of(tmp_path, "arrow").open_file("a.arrow")
    assert [group.rows for group in file.index().groups] == [1000] * 5
    assert sum(read) < 1.5 * (tmp_path / "a.arrow").stat().st_size


def rows_of(read):
    return read if isinstance(read, list) else read.to_pylist()


def test_each_row_is_in_one_block_in_the_order_of_the_files(reader, request):
    is_sequential = request.node.callspec.params["reader"] == "jsonl.gz"
    found = BlockInput(reader)
    assert found.sequential - {1} == ({0, 2, 3} if is_sequential else set())  # 1 has no rows
    assert max(block.rows for block in found) <= 6
    assert [sum(block.rows for block in found if block.file == file) for file in range(4)] == SIZES
    ends = [0] * 4
    for block in found:
        assert block.first == ends[block.file]
        assert block.bytes >= block.rows
        ends[block.file] += block.rows
    assert [row for block in found for row in rows_of(found.read(block))] == ROWS
    list(reader.run())
    assert list(found) == list(BlockInput(reader)), "however the reader was used"


def test_blocks_are_read_in_any_order_and_again(reader):
    found = BlockInput(reader)
    starts = [sum(SIZES[: block.file]) + block.first for block in found]
    order = [*range(len(starts)), *range(len(starts))]
    random.Random(1).shuffle(order)
    for number in order:
        columns = random.Random(number).choice([None, ["id"], ["input_ids", "text"]])
        wanted = ROWS[starts[number] : starts[number] + found[number].rows]
        got = rows_of(found.read(found[number], columns))
        assert got == [{name: row[name] for name in columns or row} for row in wanted]


@pytest.mark.matrix
def test_large_rows_make_small_blocks(reader, monkeypatch):
    usual = list(BlockInput(reader))
    monkeypatch.setattr(blocks, "MAX_BYTES", max(block.bytes for block in usual) // 2)
    assert len(list(BlockInput(reader))) > len(usual)
    monkeypatch.setattr(blocks, "MAX_BYTES", 1)
    assert {block.rows for block in list(BlockInput(reader))} == {1}


@pytest.mark.matrix
def test_a_copy_for_a_worker_opens_files_of_its_own(reader):
    found = BlockInput(reader)
    found.read(found[0])
    copy = pickle.loads(pickle.dumps(found))
    assert rows_of(copy.read(copy[1])) == rows_of(found.read(found[1]))


@pytest.mark.matrix
def test_a_column_that_a_file_does_not_have_is_refused_by_name(reader):
    found = BlockInput(reader)
    with pytest.raises(
        ConfigError,
        match=r"0\.\w+(\.\w+)?' has no column 'tokens'. It has 'text', 'id', 'input_ids'",
    ):
        found.read(found[0], ["id", "tokens"])


@pytest.mark.matrix
def test_a_damaged_file_is_named(reader):
    [path] = Path(reader.data_folder.path).glob("2.*")
    path.write_bytes(path.read_bytes()[:-9])
    if path.name == "2.jsonl":
        return  # whose last line is a damaged one, see below
    with pytest.raises(InputError, match=path.name):
        BlockInput(reader)


@pytest.mark.matrix
def test_a_file_that_changed_after_its_rows_were_counted_is_refused(reader):
    found = BlockInput(reader)
    folder = Path(reader.data_folder.path)
    [old], [new] = folder.glob("0.*"), folder.glob("3.*")
    old.unlink()
    old.write_bytes(new.read_bytes())
    with pytest.raises(
        CheckpointMismatch, match=f"{old.name}' has changed since its rows were counted. Restore it"
    ):
        [found.read(block) for block in found if block.file == 0]


@pytest.mark.parametrize("size", [1, 64, 10_000])
@pytest.mark.parametrize(
    "lines",
    [[b"[1]\n", *ODD_LINES], [*ODD_LINES[::-1], b"[1]"], [b"\n", b'{"text": "x"}', b"\n"]],
)
def test_a_row_is_a_line_that_is_not_blank(tmp_path, monkeypatch, size, lines):
    monkeypatch.setattr(jsonl, "PART_BYTES", size)
    lines = [line if line.endswith(b"\n") else line + b"\n" for line in lines[:-1]] + lines[-1:]
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines))
    found = BlockInput(JsonlReader(tmp_path.as_posix()))
    rows = [
        row and row.get("text", "no text") for block in found for row in rows_of(found.read(block))
    ]
    assert len(rows) == sum(block.rows for block in found)
    assert rows == [text_of(line) for line in b"".join(lines).splitlines() if line.strip()]


def text_of(line):
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row.get("text", "no text") if isinstance(row, dict) else None


def test_damaged_lines_are_counted_as_the_reader_counts_them(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n{"text": "to\n{"text": "b"}\n')
    reader = JsonlReader(tmp_path.as_posix())
    found = BlockInput(reader)
    for _ in range(2):  # epochs
        assert rows_of(found.read(found[0])) == [{"text": "a"}, None, {"text": "b"}]
    assert reader.stats["damaged_lines"].total == 2
    strict = JsonlReader(tmp_path.as_posix(), stop_on_bad_line=True)
    with pytest.raises(DamagedLine, match="the line at byte 14"):
        BlockInput(strict).read(found[0])


def test_a_key_that_some_lines_lack_is_none_there(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(
        b'{"text": "a"}\n{"text": "b", "tag": 1}\n' + b'{"text": "c"}\n' * 20
    )
    found = BlockInput(JsonlReader(tmp_path.as_posix()))
    tags = [row["tag"] for block in found for row in rows_of(found.read(block, ["tag"]))]
    assert tags == [None, 1, *[None] * 20]
