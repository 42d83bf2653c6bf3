"""Input that cannot be what the user meant, because it holds no document or is cut off.

The errors name the file.
"""

import bz2
import codecs
import gzip
import io
import lzma
import zipfile
from contextlib import nullcontext, suppress
from functools import partial

import pyarrow as pa
import pytest
import zstandard

from datatrove_ckpt import readers
from datatrove_ckpt.errors import CheckpointMismatch, InputError
from datatrove_ckpt.readers import (
    CSVReader,
    DamagedLine,
    JsonlReader,
    empty_input,
    jsonl,
    position_state,
)
from datatrove_ckpt.readers.compressed import naming_damage, refuse_partial_files
from tests import golden
from tests.unit.tables import reader_of, write_table

LINES = [b'{"text": "%d", "id": "%d"}\n' % (i, i) for i in range(2000)]
COMPRESS = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": zstandard.compress,
}


def texts(reader):
    return [document.text for document in reader.run()]


def read_until(error, reader):
    """The documents before the error."""
    read = []
    with suppress(error):
        read.extend(reader.run())
        pytest.fail(f"no {error.__name__}")
    assert read, f"{error.__name__} came before the first document"
    return read


def resumed(reader, read):
    """The texts after those documents."""
    reader.load_state_dict(position_state(read[-1]))
    return texts(reader)


# No documents ------------------------------------------------------------------------------------


@golden.rows("unreadable")
def test_an_input_that_cannot_be_read_is_an_error_that_shows_it(tmp_path, code):
    def read(files, reader=JsonlReader, **options):
        for name, content in files.items():
            (tmp_path / name).write_bytes(content)
        list(reader(str(tmp_path), **options).run())

    error = golden.refuse(
        "unreadable", code, {**globals(), **vars(readers), "read": read}, FOLDER=tmp_path
    )
    assert isinstance(error, InputError)


@pytest.mark.parametrize(
    "content", [b"", b"\n\r\n  \n", b'{"text": "", "id": 1}\n{"text": null}\n']
)
@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_an_input_that_is_empty_is_no_error(tmp_path, content, suffix):
    compress = COMPRESS.get(suffix[1:], bytes) if content else bytes
    (tmp_path / f"a.jsonl{suffix}").write_bytes(compress(content))
    assert texts(JsonlReader(tmp_path.as_posix())) == []


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_byte_order_mark_costs_no_document_and_moves_no_position(tmp_path, suffix):
    content = (
        codecs.BOM_UTF8 + LINES[0] + LINES[1] + codecs.BOM_UTF8 + LINES[2] + codecs.BOM_UTF8 + b"\n"
    )
    compress = COMPRESS.get(suffix.lstrip("."), lambda data: data)
    (tmp_path / f"a.jsonl{suffix}").write_bytes(compress(content))
    (tmp_path / "b.jsonl").write_bytes(codecs.BOM_UTF8)
    found = texts(JsonlReader(str(tmp_path)))
    assert found == ["0", "1", "2"]
    for done in range(3):
        first, resumed = (JsonlReader(str(tmp_path)) for _ in range(2))
        documents = first.run()
        for _ in range(done):
            next(documents)
        resumed.load_state_dict(first.state_dict())
        assert texts(resumed) == found[done:]


@pytest.mark.parametrize(
    "content",
    [LINES[0] + b'[]\n["c"]\n[1,\n', LINES[0] + b'[{"role": "user", "cont\n'],
)
def test_what_only_begins_as_an_array_is_a_damaged_line(tmp_path, content):
    (tmp_path / "a.jsonl").write_bytes(content)
    assert texts(JsonlReader(str(tmp_path), max_skipped=3)) == ["0"]


@pytest.mark.parametrize(
    "line, why",
    [
        (
            b'{"text": 5, "id": "five"}\n',
            "'five' of the input file 'a.jsonl' has a text of type int",
        ),
        ('{"text": "caf\xe9"}\n'.encode("latin-1"), "UTF-8"),
        (b'{"text": "t", "n": 99999999999999999999}\n', "which is no int64"),
        (b'{"text": "t", "media": "print"}\n', "has a 'media' that is not datatrove's"),
        (b'{"text": "t", "media": [{"id": "1", "media_bytes": "x"}]}\n', "is no base64"),
    ],
)
def test_a_number_as_text_text_as_media_and_a_line_in_latin_1_are_treated_alike(
    tmp_path, log, line, why
):
    """Skipped and counted with a warning that names file and line, or refused with it."""
    (tmp_path / "a.jsonl").write_bytes(LINES[0] + line + LINES[1])
    reader = JsonlReader(str(tmp_path), max_skipped=1, types={"n": "int64"})
    assert texts(reader) == ["0", "1"]
    assert reader.stats["damaged_lines"].total == 1
    assert any("`a.jsonl`, line 2" in one and why in one for one in log)
    with pytest.raises(DamagedLine, match=r"`a\.jsonl`, line 2"):
        texts(JsonlReader(str(tmp_path), types={"n": "int64"}))


@pytest.mark.parametrize("suffix", ["", *COMPRESS])
def test_a_line_that_does_not_end_is_an_error_that_names_the_file(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", 2**21)
    monkeypatch.setattr(jsonl, "read_line", partial(empty_input.read_line, size=2**21))
    name = f"a.jsonl.{suffix}".rstrip(".")
    (tmp_path / name).write_bytes(COMPRESS.get(suffix, bytes)(bytes(2**22)))
    with pytest.raises(
        InputError, match=f"The input file '{name}' has a line of more than {2**21} bytes"
    ):
        texts(JsonlReader(str(tmp_path)))


# Damaged files -----------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_compressed_file_that_is_cut_off_or_changed_is_an_error_that_names_it(tmp_path, suffix):
    whole = COMPRESS[suffix](b"".join(LINES))
    changed = bytearray(whole)
    changed[len(changed) // 2] ^= 255
    changed[4:6] = b"\xff\xff" if suffix == "zst" else changed[4:6]
    for content in (whole[: len(whole) // 2], whole[:-1], changed):
        (tmp_path / f"a.jsonl.{suffix}").write_bytes(content)
        with pytest.raises(InputError, match=rf"'a.jsonl.{suffix}' is damaged or cut off: "):
            list(JsonlReader(tmp_path.as_posix()).run())


def test_an_error_of_isal_which_fsspec_takes_for_gzip_is_damage():
    error = type("IsalError", (Exception,), {"__module__": "igzip_lib"})(
        "Invalid lookback distance"
    )
    message = "'a.gz' is damaged or cut off: Invalid lookback"
    with pytest.raises(InputError, match=message), naming_damage("a.gz"):
        raise error


def test_a_zstd_file_that_is_cut_between_two_blocks_or_within_a_later_frame_is_an_error(
    tmp_path,
):
    path = tmp_path / "a.jsonl.zst"
    frame = zstandard.ZstdCompressor().compressobj()
    half = frame.compress(b"".join(LINES[:1000])) + frame.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    whole = half + frame.compress(b"".join(LINES[1000:])) + frame.flush()
    path.write_bytes(whole)
    assert len(texts(JsonlReader(tmp_path.as_posix()))) == 2000
    for cut in (half, whole + half, half + whole):
        path.write_bytes(cut)
        with pytest.raises(InputError, match=r"'a.jsonl.zst' is damaged or cut off"):
            list(JsonlReader(tmp_path.as_posix()).run())


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("behind", [b"garbage", b"\0" * 8 + b"x", LINES[0]])
def test_bytes_behind_a_compressed_stream_are_an_error_that_names_their_place(
    tmp_path, suffix, behind
):
    stream = COMPRESS[suffix](b"".join(LINES))
    (tmp_path / f"a.jsonl.{suffix}").write_bytes(stream + behind)
    place = ""
    if suffix != "gz":
        start = len(stream) + 8 * (suffix == "xz" and behind[0] == 0)
        place = f".* in the stream that begins at byte {start}"
    with pytest.raises(InputError, match=rf"'a.jsonl.{suffix}' is damaged or cut off: {place}"):
        list(JsonlReader(tmp_path.as_posix()).run())


@pytest.mark.parametrize("padding", [4, 2**13])
def test_all_streams_of_an_xz_file_are_read(tmp_path, padding):
    streams = [lzma.compress(line) + bytes(padding) for line in LINES[:3]]
    (tmp_path / "a.jsonl.xz").write_bytes(b"".join(streams))
    assert texts(JsonlReader(tmp_path.as_posix())) == ["0", "1", "2"]


STREAMS = [
    lzma.compress(b"".join(LINES[:count]), check=check)
    for count, check in ((0, lzma.CHECK_CRC32), (1, lzma.CHECK_NONE), (2000, lzma.CHECK_SHA256))
]
PADDED = golden.named("padded_streams", globals())


@pytest.mark.parametrize("parts, is_padded", PADDED.values(), ids=PADDED)
def test_an_xz_file_with_padding_before_a_stream_was_read_in_part(tmp_path, parts, is_padded):
    (tmp_path / "a.jsonl.xz").write_bytes(b"".join(parts))
    folder = str(tmp_path)
    with pytest.raises(CheckpointMismatch) if is_padded else nullcontext():
        refuse_partial_files(folder, ["a.jsonl.xz", "gone.xz"], "infer", {})
    refuse_partial_files(folder, ["a.jsonl.xz"], "infer", {"whole": True})


def zipped(*names):
    """A zip with some lines in each file."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as made:
        for name in names:
            made.writestr(name, b"" if name.endswith("/") else b"".join(LINES[:3]))
    return file.getvalue()


@pytest.mark.parametrize(
    "names", [["a.jsonl"], ["d/", "d/a.jsonl"], ["__MACOSX/._a.jsonl", "a.jsonl"]]
)
def test_the_only_file_of_a_zip_is_read(tmp_path, names):
    (tmp_path / "a.jsonl.zip").write_bytes(zipped(*names))
    assert texts(JsonlReader(tmp_path.as_posix())) == ["0", "1", "2"]


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_table_that_is_cut_off_is_an_error_that_names_it(tmp_path, kind):
    path = tmp_path / f"a.{kind}"
    write_table(path, pa.table({"text": [str(i) for i in range(1000)]}), 100, stream=True)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(InputError, match=rf"'a.{kind}' is damaged or cut off: "):
        list(reader_of(tmp_path, kind).run())


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_a_run_continues_after_a_file_that_was_cut_off_is_replaced(tmp_path, suffix):
    lines = [b'{"text": "%d", "filler": "%s"}\n' % (i, b"x" * 5000) for i in range(500)]
    whole, path = COMPRESS[suffix](b"".join(lines)), tmp_path / f"a.jsonl.{suffix}"
    path.write_bytes(whole[: len(whole) - 100])
    reader = JsonlReader(tmp_path.as_posix())
    read = read_until(InputError, reader)
    path.write_bytes(whole)
    assert [document.text for document in read] + resumed(reader, read) == [
        str(i) for i in range(500)
    ]
    path.write_bytes(COMPRESS[suffix](b"".join(lines).replace(b'"7"', b'"8"')))
    with pytest.raises(
        CheckpointMismatch,
        match=rf"'a.jsonl.{suffix}' has changed before byte \d+, the saved position",
    ):
        resumed(reader, read)


def test_rows_of_a_table_before_a_damaged_one_are_documents(tmp_path):
    write_table(tmp_path / "a.parquet", pa.table({"text": ["a", "b"], "media": ["", "print"]}))
    assert [one.text for one in read_until(DamagedLine, reader_of(tmp_path, "parquet"))] == ["a"]


@pytest.mark.parametrize("size", [10, 100_000])
def test_a_damaged_line_behind_the_position_may_be_corrected(tmp_path, size):
    lines = [b'{"text": "%d", "filler": "%s"}\n' % (i, b"x" * size) for i in range(6)]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"".join([*lines[:3], b"torn\n", *lines[4:]]))
    reader = JsonlReader(tmp_path.as_posix())
    read = read_until(DamagedLine, reader)
    path.write_bytes(b"".join(lines))
    assert resumed(reader, read) == ["3", "4", "5"]
    path.write_bytes(b"".join(lines[:3] + lines[5:]))  # now shorter than it was
    assert resumed(reader, read) == ["5"]


def test_rows_that_an_earlier_attempt_has_left_out_count(tmp_path):
    (tmp_path / "a.csv").write_text("text,n\na,1\nb\na,1\nb\na,1\n")
    first = CSVReader(str(tmp_path), max_skipped=2)
    read = first.run()
    assert [next(read).text, next(read).text] == ["a", "a"]
    again = CSVReader(str(tmp_path), max_skipped=1)
    again.load_state_dict(first.state_dict())
    with pytest.raises(DamagedLine):
        texts(again)


def test_a_reader_that_an_earlier_release_has_pickled_stops_as_it_was_told(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": \n{"text": "b"}\n')
    for strict in (True, False):
        reader = JsonlReader(str(tmp_path), stop_on_bad_line=strict)
        del reader.max_skipped
        found = []
        with pytest.raises(DamagedLine) if strict else nullcontext():
            found += reader.run()
        assert len(found) == (1 if strict else 2)
