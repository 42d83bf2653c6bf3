"""Readers that seek: datatrove's documents, resumed from every position, and never from another
input.
"""

import copy
import gzip
import io
import itertools
import json
import random
from dataclasses import asdict

import dill
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from datatrove.io import DataFolder
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.readers import CSVReader as OriginalCSV
from datatrove.pipeline.readers import IpcReader as OriginalIpc
from datatrove.pipeline.readers import JsonlReader as OriginalJsonl
from datatrove.pipeline.readers import ParquetReader as OriginalParquet

from datatrove_ckpt.errors import CheckpointMismatch, InputError
from datatrove_ckpt.readers import (
    CSVReader,
    DamagedLine,
    IpcReader,
    JsonlReader,
    ParquetReader,
    PositionedDocument,
    Reading,
    Stateful,
    TextReader,
    inputs,
    jsonl,
    position_state,
    tables,
)
from tests import golden
from tests.unit.tables import ODD_LINES, rows, write_table

NAMES = {None: "jsonl", "gzip": "jsonl.gz", "zstd": "jsonl.zst"}
COMPRESS = {
    None: bytes,
    "gzip": gzip.compress,
    "zstd": zstandard.compress,
}


@pytest.fixture(
    params=[64, pytest.param(None, marks=pytest.mark.slow)], ids=["tiny blocks", "usual blocks"]
)
def _blocks(request, monkeypatch):
    if request.param:
        monkeypatch.setattr(jsonl, "PART_BYTES", request.param)
        monkeypatch.setattr(tables._TableReader, "batch_size", 3)


def write_jsonl(folder, codec=None):
    files = {
        "a": b"".join(ODD_LINES),
        "b": b"",
        "c": b"".join(json.dumps(row).encode() + b"\n" for row in rows(12)),
        "d": b'\n{"text": "after a blank line"}\n{"text": "second"}\n',
        "sub/e": b"".join(ODD_LINES[::-1]),
    }
    for name, content in files.items():
        path = folder / f"{name}.{NAMES[codec]}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(COMPRESS[codec](content))


def write_csv(folder):
    """Rows of several lines, blank lines, and a file without rows."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, count in enumerate([9, 0, 3]):
        cells = [f'"{row["text"]}\n",{row["number"]}\n\n' for row in rows(count, number)]
        (folder / f"{number}.csv").write_text("".join(["text,number\n", *cells]))


def write_tables(folder, kind):
    """Groups of several sizes, empty ones among them, and a file without rows."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, sizes in enumerate([(5, 1, 0, 9), (), (3,), (7, 7)]):
        groups = [
            pa.Table.from_pylist(rows(size, 10 * i), schema=SCHEMA) for i, size in enumerate(sizes)
        ]
        path = folder / f"{number}.{kind}"
        if kind == "parquet":
            with pq.ParquetWriter(path, SCHEMA) as writer:
                for group in groups:
                    writer.write_table(group)
            continue
        new = pa.ipc.new_stream if kind == "arrows" else pa.ipc.new_file
        with new(path, SCHEMA) as writer:
            for group in groups:
                for batch in group.to_batches() or [pa.RecordBatch.from_pylist([], schema=SCHEMA)]:
                    writer.write_batch(batch)


SCHEMA = pa.schema([("text", pa.string()), ("number", pa.int64())])


def write(folder, kind):
    if kind == "txt":
        write_texts(folder)
    elif kind.startswith("jsonl"):
        write_jsonl(folder, {"jsonl": None, "jsonl gzip": "gzip", "jsonl zstd": "zstd"}[kind])
    elif kind == "csv":
        write_csv(folder)
    else:
        write_tables(folder, kind)


def reader(folder, kind, **options):
    usual = {"batch_size": 4} if kind == "parquet" else {}
    usual |= {"max_skipped": None}
    classes = {"jsonl": JsonlReader, "parquet": ParquetReader, "csv": CSVReader, "txt": TextReader}
    return classes.get(kind.split()[0], IpcReader)(folder, **usual | options)


def original(folder, kind, **options):
    usual = {"parquet": {"batch_size": 4}, "arrows": {"stream": True}}.get(kind, {})
    classes = {"jsonl": OriginalJsonl, "parquet": OriginalParquet, "csv": OriginalCSV}
    return classes.get(kind.split()[0], OriginalIpc)(folder, **usual | options)


KINDS = ["jsonl", "jsonl gzip", "jsonl zstd", "parquet", "arrow", "arrows", "csv"]


def through_json(state):
    text = json.dumps(state, separators=(",", ":"))  # as a checkpoint keeps it
    assert len(text) <= 1024, text
    return json.loads(text)


def state_of(document):
    return through_json(position_state(document))


def plain(documents):
    return [asdict(document) for document in documents]


# The same documents ------------------------------------------------------------------------------


SAME = [
    {},
    {"limit": 0},
    {"skip": 3, "limit": 4},
    {"skip": 1000},
    {"recursive": False},
    {"glob_pattern": "*[ac0-2].*"},
    {"default_metadata": {"lang": "de", "default": True}, "text_key": "text", "id_key": "number"},
    {"adapter": lambda self, data, path, at: {"text": path, "id": f"{at}", "metadata": data}},
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("_blocks")
def test_documents_are_those_of_datatrove_in_their_order(tmp_path, kind):
    write(tmp_path, kind)
    same = [*SAME, {"read_metadata": False}] if kind == "parquet" else SAME
    for options, (rank, world_size) in itertools.product(same, [(0, 1), (2, 3)]):
        ours, theirs = (
            reader(tmp_path.as_posix(), kind, **options),
            original(tmp_path.as_posix(), kind, **options),
        )
        assert plain(ours.run(None, rank, world_size)) == plain(
            theirs.run(None, rank, world_size)
        ), options
        assert totals(ours) == totals(theirs), options


def totals(step):
    """The stats that both have.

    Files are counted when they are opened, and datatrove opens one more at its limit.
    """
    ours_alone = ("damaged_lines", "input_files")
    return {
        name: stat.total
        for name, stat in step.stats.stats.items()
        if stat.total and name not in ours_alone
    }


@pytest.mark.parametrize("kind", ["jsonl zstd", "parquet"])
def test_a_paths_file_and_a_missing_file_path_are_as_in_datatrove(tmp_path, kind):
    write(tmp_path / "data", kind)
    names = sorted(DataFolder(f"{tmp_path}/data").list_files(), reverse=True)
    (tmp_path / "paths.txt").write_text("\n".join(names))
    options = {"paths_file": f"{tmp_path}/paths.txt"}
    if kind.startswith("jsonl"):
        options["add_file_path"] = False
    for rank in range(2):
        ours = reader(f"{tmp_path}/data", kind, **options).run(None, rank, 2)
        assert plain(ours) == plain(
            original(f"{tmp_path}/data", kind, **options).run(None, rank, 2)
        )


def test_all_frames_of_a_zstd_file_and_all_members_of_a_gzip_file_are_read(tmp_path):
    for codec in ("zstd", "gzip"):
        parts = [COMPRESS[codec](b'{"text": "%d"}\n' % i) for i in range(3)]
        (tmp_path / f"a.{NAMES[codec]}").write_bytes(b"".join(parts))
    assert [document.text for document in JsonlReader(tmp_path.as_posix()).run()] == [
        "0",
        "1",
        "2",
    ] * 2


# From every position -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*KINDS, "txt"])
@pytest.mark.parametrize("options", [{}, {"shuffle_seed": 5, "skip": 3, "limit": 11}], ids=str)
@pytest.mark.usefixtures("_blocks")
def test_the_rest_is_the_same_after_a_stop_after_each_document(tmp_path, kind, options):
    def read(state=None):
        one = reader(tmp_path.as_posix(), kind, **options)
        if state is not None:
            one.load_state_dict(state)
        return list(one.run())

    write(tmp_path, kind)
    whole = read()
    assert len(whole) > 8 or kind == "txt"
    positions = [document.position for document in whole]
    assert all(before < after for before, after in itertools.pairwise(positions))
    for done, document in enumerate(whole, start=1):
        rest = read(state_of(document))
        assert plain(rest) == plain(whole[done:])
        assert [state_of(later) for later in rest] == [state_of(later) for later in whole[done:]]


def test_the_seed_alone_moves_files_and_added_files_move_no_other(tmp_path):
    def order(count, seed=1):
        for i in range(count):
            (tmp_path / f"{i:02}.jsonl").write_bytes(b'{"text": "%d"}\n{"text": "%d"}\n' % (i, i))
        ours = JsonlReader(tmp_path.as_posix(), shuffle_seed=seed)
        return [document.text for document in ours.run()]

    few = order(10)
    assert few[::2] == few[1::2], "rows keep their order within a file"
    assert sorted(few) != few != order(10, seed=2)
    assert [text for text in order(20) if text in few] == few


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow"])
def test_what_comes_before_the_position_is_not_read(tmp_path, kind, monkeypatch):
    chance = random.Random(0)
    texts = [chance.randbytes(200).hex() for _ in range(4000)]
    write_table(tmp_path / f"a.{kind}", pa.table({"text": texts}), 200)
    *_, before_last, _last = reader(tmp_path.as_posix(), kind).run()
    ours = reader(tmp_path.as_posix(), kind)
    ours.load_state_dict(state_of(before_last))
    read = []

    class Counted(io.FileIO):
        def read(self, size=-1, /):
            data = super().read(size)
            read.append(len(data))
            return data

    monkeypatch.setattr(
        DataFolder, "open", lambda folder, name, *mode, **options: Counted(tmp_path / name)
    )
    if kind == "arrow":  # a local file is mapped into memory, where nobody counts
        monkeypatch.setattr(DataFolder, "is_local", lambda self: False)
    assert [document.text for document in ours.run()] == texts[-1:]
    size = next(tmp_path.iterdir()).stat().st_size
    assert size > 1_000_000
    assert 0 < sum(read) < size / 5


# A file is a document -----------------------------------------------------------------------------

FILES = {
    "a.txt": b"\xef\xbb\xbfone\r\ntwo\n",
    "b.md": b"",
    "c.html": "<p>\u2028é</p>".encode(),
    "deep/d.txt.gz": gzip.compress(b"four"),
    "e.txt": b" \n",
}
TEXTS = {
    "a.txt": "one\r\ntwo\n",
    "c.html": "<p>\u2028é</p>",
    "deep/d.txt.gz": "four",
    "e.txt": " \n",
}


def write_texts(folder, files=FILES):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder.as_posix()


def test_a_file_is_a_document(tmp_path):
    folder = write_texts(tmp_path)
    whole = list(TextReader(folder).run())
    assert {document.id: document.text for document in whole} == TEXTS
    assert [document.metadata for document in whole] == [
        {"file_path": f"{folder}/{name}"} for name in TEXTS
    ]
    assert state_of(whole[-1])["skipped"] == [0, 1]


def test_a_file_whose_rows_have_their_text_elsewhere_is_named(tmp_path, log):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"id": 1}\n')
    (tmp_path / "b.jsonl").write_text('{"content": "b"}\n')
    assert [one.text for one in JsonlReader(tmp_path.as_posix()).run()] == ["a"]
    (said,) = log.said("gave no document")
    assert "'b.jsonl'" in said
    assert "Is text_key correct for this file?" in said


def test_a_file_that_is_too_long_for_a_text_is_named(tmp_path, monkeypatch):
    folder = write_texts(tmp_path, {"b.txt": b"x" * 11, "c.txt": b""})
    monkeypatch.setattr("datatrove_ckpt.readers.whole_files.MAX_LINE_BYTES", 10)
    with pytest.raises(InputError, match=r"'b.txt' is longer than 10 bytes"):
        list(TextReader(folder).run())
    assert list(TextReader(folder, glob_pattern="c.*").run()) == []


PRICES = [f"café {number} €" for number in range(40)]
IN_FILES = {
    "jsonl": "".join(f'{{"text": "{text}"}}\n' for text in PRICES),
    "jsonl gzip": "".join(f'{{"text": "{text}"}}\n' for text in PRICES),
    "csv": "".join(f"{text}\r\n" for text in ["text", *PRICES]),
    "txt": "".join(PRICES),
}


@pytest.mark.parametrize("encoding", ["windows-1252", "utf-16", "utf-16-le"])
@pytest.mark.parametrize("kind", IN_FILES)
@pytest.mark.usefixtures("_blocks")
def test_files_of_another_encoding_are_read_from_any_position(tmp_path, kind, encoding):
    codec = "gzip" if kind == "jsonl gzip" else None
    path = tmp_path / f"a.{NAMES[codec] if kind.startswith('jsonl') else kind}"
    path.write_bytes(COMPRESS[codec](IN_FILES[kind].encode(encoding)))

    def ours(encoding=encoding):
        return reader(tmp_path.as_posix(), kind, encoding=encoding, max_skipped=0)

    documents = list(ours().run())
    texts = [document.text for document in documents]
    assert texts == (["".join(PRICES)] if kind == "txt" else PRICES)
    for done, document in enumerate(documents, 1):
        resumed = ours()
        resumed.load_state_dict(state_of(document))
        assert [later.text for later in resumed.run()] == texts[done:]
    other = ours(None)
    other.load_state_dict(state_of(documents[0]))
    with pytest.raises(CheckpointMismatch, match=f"made with encoding='{encoding}', now None"):
        list(other.run())
    if encoding != "utf-16-le":  # which has no mark at its beginning
        with pytest.raises((InputError, DamagedLine), match=f"Set encoding: {encoding}"):
            list(ours(None).run())


@pytest.mark.parametrize("begin", ["sep=;\n", "\ufeffsep=;\r\n", "sep=;\n\n"])
def test_the_first_line_of_a_csv_may_declare_its_delimiter(tmp_path, begin):
    (tmp_path / "a.csv").write_text(f"{begin}id;text\n1;a,b\n2;c\n3\n", newline="")
    rows = CSVReader(tmp_path.as_posix(), max_skipped=1)
    assert [(row.id, row.text) for row in rows.run()] == [("1", "a,b"), ("2", "c")]
    line = 5 + begin.endswith("\n\n")
    with pytest.raises(DamagedLine, match=f"begins in line {line}"):
        list(CSVReader(tmp_path.as_posix()).run())


# States ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*KINDS, "txt"])
def test_a_reader_is_stateful_as_in_torchdata(tmp_path, kind):
    write(tmp_path, kind)
    ours = reader(tmp_path.as_posix(), kind)
    assert isinstance(ours, Stateful)
    beginning = through_json(ours.state_dict())
    documents = list(ours.run())
    ours.load_state_dict(beginning)
    running = ours.run()
    for document in documents[:3]:
        assert next(running) == document
        assert through_json(ours.state_dict()) == state_of(document)
    saved = through_json(ours.state_dict())
    ours.load_state_dict(saved)
    running = ours.run()
    assert ours.state_dict() == saved, (
        "a generator has not started before its first document is requested"
    )
    assert plain(running) == plain(documents[3:])
    assert plain(ours.run()) == plain(documents), "the state was for one run"
    ours.load_state_dict(state_of(documents[-1]))
    assert list(ours.run()) == []
    assert through_json(ours.state_dict()) == state_of(documents[-1])


def test_the_position_is_no_field_of_the_document(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a", "id": "b", "c": 1}\n')
    [ours] = JsonlReader(tmp_path.as_posix()).run()
    [theirs] = OriginalJsonl(tmp_path.as_posix()).run()
    assert list(asdict(ours)) == ["text", "id", "media", "metadata"]
    assert "position=" not in repr(ours)
    assert ours == theirs
    assert theirs == ours
    theirs.text = "other"
    assert ours != theirs
    assert ours != "a"
    assert position_state(theirs) is None
    assert position_state(PositionedDocument("a", "b")) is None
    for copied in (copy.copy(ours), copy.deepcopy(ours), dill.loads(dill.dumps(ours))):
        assert copied == ours
        assert position_state(copied) == position_state(ours)


# Another input -----------------------------------------------------------------------------------


@pytest.fixture
def six(tmp_path):
    """Six files of three documents."""
    for i in range(6):
        (tmp_path / f"f{i}.jsonl").write_bytes(
            b"".join(b'{"text": "%d.%d"}\n' % (i, j) for j in range(3))
        )
    return tmp_path


def stop(folder, after=11, **options):
    """The state after the second document of ``f3.jsonl``, or after another number of documents."""
    documents = JsonlReader(folder.as_posix(), **options).run()
    for _ in range(after):
        document = next(documents)
    return state_of(document)


def resume(folder, state, reader=JsonlReader, ranks=1, **options):
    ours = reader(folder.as_posix(), **options)
    ours.load_state_dict(state)
    return [document.text for document in ours.run(None, 0, ranks)]


REST = ["3.2", "4.0", "4.1", "4.2", "5.0", "5.1", "5.2"]


def overwrite(path, old, new):
    path.write_bytes(path.read_bytes().replace(old, new))


def after(folder, change):
    """Resumes before and after a change of the files."""
    state = stop(folder)
    assert resume(folder, state) == REST
    change()
    resume(folder, state)


@golden.rows("resumes")
def test_an_input_that_is_no_continuation_is_refused(six, code, monkeypatch):
    monkeypatch.setattr(inputs._thread, "readings", [inputs.Reading()])
    error = golden.refuse("resumes", code, {**globals(), "six": six}, FOLDER=six)
    assert isinstance(error, CheckpointMismatch)
    assert error.starts_over == "with old results"


def test_another_order_of_the_same_files_is_refused(six, tmp_path_factory):
    paths = tmp_path_factory.mktemp("paths") / "paths.txt"
    names = [f"f{i}.jsonl" for i in range(6)]
    paths.write_text("\n".join(names))
    state = stop(six, paths_file=paths.as_posix())
    names[1], names[2] = names[2], names[1]
    paths.write_text("\n".join(names))
    with pytest.raises(CheckpointMismatch, match="are not the same now"):
        resume(six, state, paths_file=paths.as_posix())
    (six / "f2.jsonl").unlink()
    with pytest.raises(CheckpointMismatch, match=r"'f2.jsonl' is missing"):
        resume(six, state, paths_file=paths.as_posix())


@pytest.mark.parametrize(
    "kind, grows",
    [
        *((kind, False) for kind in [*KINDS, "txt"]),
        ("parquet", True),
        ("arrows", True),
        ("csv", "shrinks"),
    ],
)
def test_a_current_file_with_other_content_is_refused(tmp_path, kind, grows):
    """Of the same size, or, if it is not plain text, grown; a table of text with fewer rows."""
    write(tmp_path, kind)
    documents = list(reader(tmp_path.as_posix(), kind).run())
    first = sorted(path for path in tmp_path.iterdir() if path.is_file())[0]
    content = bytearray(first.read_bytes())
    if grows == "shrinks":
        content = content[: content.index(b"\n\n") + 1]
    elif grows:
        content *= 2
    elif kind.startswith("jsonl"):
        codec = {"jsonl": None, "jsonl gzip": "gzip", "jsonl zstd": "zstd"}[kind]
        content = bytearray(COMPRESS[codec](b"".join(ODD_LINES).replace(b"plain", b"Plain")))
    else:
        content[13 if kind == "csv" else -12] ^= 1
    first.write_bytes(content)
    fresh = reader(tmp_path.as_posix(), kind)
    fresh.load_state_dict(state_of(documents[kind != "txt"]))
    said = f"'{first.name}' " + ("had .*, and has" if grows else "has changed")
    with pytest.raises(CheckpointMismatch, match=said):
        list(fresh.run())


def test_a_changed_line_before_the_position_is_found_behind_the_first_64_kb(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"".join(b'{"text": "%06d"}\n' % i for i in range(10_000)))
    state = stop(tmp_path, after=8000)
    assert len(resume(tmp_path, state)) == 2000
    overwrite(path, b"007999", b"007998")
    with pytest.raises(CheckpointMismatch, match=r"'a.jsonl' has changed before byte 152000"):
        resume(tmp_path, state)


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b""])
def test_a_plain_file_may_grow_at_its_end_and_new_files_may_follow(tmp_path, end):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": "b"}' + end)
    states = [stop(tmp_path, after=after) for after in (1, 2)]
    with path.open("ab") as file:
        file.write((b"" if end else b"\r\n") + b'{"text": "c"}\n')
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "d"}\n')
    documents = list(JsonlReader(tmp_path.as_posix()).run())
    for done, state in enumerate(states, start=1):
        ours = JsonlReader(tmp_path.as_posix())
        ours.load_state_dict(state)
        assert [*map(state_of, ours.run())] == [*map(state_of, documents[done:])]


def test_a_last_line_that_is_completed_while_the_file_is_read_is_one_document(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"te')
    documents = JsonlReader(tmp_path.as_posix()).run()
    texts = [next(documents).text]
    with path.open("ab") as file:
        file.write(b'xt": "b"}\n{"text": "c"}')
    texts.append(next(documents).text)
    texts.append(next(documents).text)
    with path.open("ab") as file:
        file.write(b' {"text": "d"}\n')
    assert [*texts, *documents] == ["a", "b", "c"]


def test_a_last_line_that_grew_is_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": "b"}')
    state = stop(tmp_path, after=2)
    with path.open("ab") as file:
        file.write(b' {"text": "c"}\n')
    with pytest.raises(
        CheckpointMismatch, match=r"The line of the input file 'a.jsonl' at byte 14"
    ):
        resume(tmp_path, state)


def test_equal_options_and_a_higher_limit_are_accepted(six):
    for same in ({"default_metadata": {"lang": "de"}}, {"types": {"number": "int64"}}):
        assert resume(six, stop(six, **same), **same) == REST
    assert resume(six, stop(six, limit=20), limit=11) == []
    assert resume(six, stop(six, limit=11), limit=12) == ["3.2"], "a higher limit reads more"


# Reader and runner -------------------------------------------------------------------------------


def chain(*steps):
    data = None
    for step in steps:
        data = step.run(data, 0, 1)
    return iter(data)


def three_folders(tmp_path):
    for name in "abc":
        (tmp_path / name).mkdir(exist_ok=True)
        for i in range(2):
            content = b"".join(b'{"text": "%s%d%d"}\n' % (name.encode(), i, j) for j in range(3))
            (tmp_path / name / f"{i}.jsonl").write_bytes(content)
    return [JsonlReader(f"{tmp_path}/{name}") for name in "abc"]


@pytest.mark.parametrize("batch_size", [1, 4])
def test_chained_readers_behind_filters_resume_from_every_document(tmp_path, batch_size):
    class Ahead(PipelineStep):
        """A filter that takes documents in batches before it lets any pass."""

        def __init__(self, keep):
            super().__init__()
            self.keep = keep

        def run(self, data, rank=0, world_size=1):
            while batch := list(itertools.islice(data, batch_size)):
                yield from filter(self.keep, batch)

    def pipeline():
        a, b, c = three_folders(tmp_path)
        return chain(
            a, Ahead(lambda document: "1" in document.text), b, c, Ahead(lambda d: d.text != "c00")
        )

    with Reading() as reading:
        documents = list(pipeline())
    assert not reading.resumed
    positions = [document.position for document in documents]
    assert positions == sorted(positions)
    assert [position[0] for position in positions] == [0] * 4 + [1] * 6 + [2] * 5
    for done, document in enumerate(documents, start=1):
        reading = Reading(state_of(document))
        rest = pipeline()
        left = []
        while True:
            with reading:
                following = next(rest, None)
            assert reading.resumed
            if following is None:
                break
            left.append(following)
        assert plain(left) == plain(documents[done:])
        assert [state_of(later) for later in left] == [
            state_of(later) for later in documents[done:]
        ]


def test_a_reader_that_had_finished_still_checks_its_input(tmp_path):
    with Reading():
        last = list(chain(*three_folders(tmp_path)))[-1]
    (tmp_path / "a" / "1.jsonl").write_bytes(b"")
    readers = [JsonlReader(f"{tmp_path}/{name}") for name in "abc"]
    with Reading(state_of(last)), pytest.raises(CheckpointMismatch, match=f"{tmp_path}/a"):
        list(chain(*readers))


def test_a_reading_finds_no_reader_that_seeks_or_too_few(tmp_path):
    with Reading():
        last = list(chain(*three_folders(tmp_path)))[-1]
    with Reading(state_of(last)) as reading:
        assert len(list(OriginalJsonl(f"{tmp_path}/a").run())) == 6
    assert not reading.resumed
    with Reading(state_of(last)) as reading:
        assert list(JsonlReader(f"{tmp_path}/a").run()) == []
    with pytest.raises(CheckpointMismatch, match=r"reader 2 .*of the pipeline's readers"):
        _ = reading.resumed
