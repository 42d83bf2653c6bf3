"""Lines that the tools of others write, and what json, pandas and datasets read in them."""

import itertools
import json
import math

import pytest

from datatrove_ckpt.output.document_codec import encode
from datatrove_ckpt.readers import JsonlReader
from tests import golden

LINES = golden.values("lines_of_others", globals())


def as_read(value):
    """What other readers make of it, with U+FFFD for surrogates that are alone."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {as_read(key): as_read(item) for key, item in value.items()}
    if isinstance(value, list):
        return [as_read(item) for item in value]
    return "nan" if isinstance(value, float) and math.isnan(value) else value


@pytest.mark.parametrize("line", LINES)
def test_a_line_that_others_read_is_a_document(tmp_path, line):
    (tmp_path / "a.jsonl").write_bytes(b'{"text":"first"}\n' + line + b'\n{"text":"last"}\n')
    reader = JsonlReader(str(tmp_path))
    first, document, last = reader.run()
    assert (first.text, last.text) == ("first", "last")
    row = {"text": document.text} | document.metadata
    del row["file_path"]
    assert as_read(row) == as_read(json.loads(line))
    assert "damaged_lines" not in reader.stats.stats
    encode(document)


@pytest.mark.parametrize(
    "line",
    [
        b'{"text":NaN',
        b"{'text':'a'}",
        b'{"text":"a\xff"}',
        b"[" * 9999,
        *(b'{"text":"a","x":%b}' % (b"[" * depth + b"]" * depth) for depth in (253, 600)),
        b'{"text":"a","x":%b}' % (b'{"a":' * 400 + b"1" * 30 + b"}" * 400),
    ],
)
def test_what_nobody_reads_is_damaged_as_before(tmp_path, line):
    (tmp_path / "a.jsonl").write_bytes(b'{"text":"first"}\n' + line + b"\n")
    reader = JsonlReader(str(tmp_path), max_skipped=1)
    assert [document.text for document in reader.run()] == ["first"]
    assert reader.stats["damaged_lines"].total == 1


@pytest.mark.parametrize("line", [*LINES, b"{", b"7", b'{"media":[]}'])
def test_lines_that_are_read_together_are_those_that_are_read_alone(tmp_path, line):
    lines = [b'{"text":"first"}', line, b'{"n":123456789012345678901234567890}']
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    file = JsonlReader(str(tmp_path)).open_file("a.jsonl")
    file.use(file.index())
    alone = [file.read(number, 1) for number in range(3)]
    assert repr(file.read(0, 3)) == repr([*itertools.chain(*alone)])  # NaN is not equal to itself
    assert alone[2] == [json.loads(lines[2])]


def test_a_zstd_frame_with_the_longest_window_is_read(tmp_path):
    pytest.importorskip("zstandard")
    content = b'{"text":"a"}\n'
    last_raw_block = (len(content) << 3 | 1).to_bytes(3, "little")
    window = bytes([(31 - 10) << 3])
    frame = b"\x28\xb5\x2f\xfd\x00" + window + last_raw_block + content
    (tmp_path / "a.jsonl.zst").write_bytes(frame)
    assert [document.text for document in JsonlReader(str(tmp_path)).run()] == ["a"]
