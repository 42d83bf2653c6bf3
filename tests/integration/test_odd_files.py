"""Files as other programs leave them: hidden ones, byte order marks, equal names, long integers."""

import csv
import json

import pyarrow as pa
import pytest
from datatrove.pipeline import readers as datatrove_readers

from datatrove_ckpt.errors import InputError
from datatrove_ckpt.readers import CSVReader, JsonlReader
from datatrove_ckpt.torch import ReaderDataset
from tests.jobs import rows, runner
from tests.unit.tables import reader_of, write_table
from tests.yaml_jobs import endpoint, job_yaml

MARK = b"\xef\xbb\xbf"
FILES = [
    ".ipynb_checkpoints/a-checkpoint.jsonl",
    "._a.jsonl",
    "_b.jsonl",
    "_temporary/0/part.jsonl",
    "_temporary.jsonl",
    "a.jsonl",
    "sub/.git/c.jsonl",
    "sub/c.jsonl",
]
VISIBLE = ["_b.jsonl", "_temporary.jsonl", "a.jsonl", "sub/c.jsonl"]


def write(folder, name, content=None):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if content is None:
        content = json.dumps({"id": name, "text": name}).encode() + b"\n"
    path.write_bytes(content)
    return path


@pytest.fixture
def run(here, command):
    """Runs the short form. Returns the rows of its output, or what it prints as an error."""

    def run(server, given, prompt="{text}", code=0):
        options = [f"--prompt={prompt}", "--endpoint", server.url, "--model=m", "--run-folder=job"]
        printed = command("run", "--input", str(given), *options, code=code)
        if code:
            return printed.err
        return rows(here / "job")

    return run


@pytest.mark.parametrize(
    "pattern, expected",
    [
        (None, VISIBLE),
        (".jsonl", VISIBLE[:3]),
        ("**/*.jsonl", VISIBLE),
        (".ipynb_checkpoints/*", FILES[:1]),
        (".*", ["._a.jsonl"]),
        ("._a.json[l]", ["._a.jsonl"]),
        ("_temporary/**", ["_temporary/0/part.jsonl"]),
        ("sub/.git/*", ["sub/.git/c.jsonl"]),
    ],
)
def test_a_hidden_file_is_input_only_where_the_pattern_names_it(tmp_path, pattern, expected):
    for name in FILES:
        write(tmp_path, name)
    documents = JsonlReader(str(tmp_path), glob_pattern=pattern).run()
    assert [document.id for document in documents] == expected


def test_files_that_are_listed_or_given_alone_are_input_whatever_their_names(tmp_path, run, server):
    for name in FILES:
        write(tmp_path, name)
    write(tmp_path, "list.txt", "\n".join(FILES).encode())
    reader = JsonlReader(str(tmp_path), paths_file=str(tmp_path / "list.txt"))
    assert [document.id for document in reader.run()] == FILES
    (row,) = run(server, tmp_path / ".ipynb_checkpoints/a-checkpoint.jsonl")
    assert row["id"] == FILES[0]


@pytest.mark.parametrize(
    "reader",
    [
        "JsonlReader",
        pytest.param("datatrove.pipeline.readers.JsonlReader", marks=pytest.mark.matrix),
    ],
)
def test_no_reader_of_a_run_reads_hidden_files(here, command, server, reader):
    for name in FILES:
        write(here / "input", name)
    text = job_yaml(endpoint(server), tasks=2).replace("JsonlReader", reader)
    write(here, "job.yaml", text.encode())
    command("doctor", "job.yaml")
    command("run", "job.yaml")
    assert sorted(row["id"] for row in rows(here)) == VISIBLE


@pytest.mark.parametrize("given", ["", "/", "/*.csv", "/a.csv", "/**/*.cs?"])
@pytest.mark.parametrize("name", ["odd[1]", "odd*", "odd?", "odd[!a]/b[1-2]*"])
def test_a_folder_with_a_sign_of_patterns_in_its_name_is_input(here, run, server, name, given):
    write(here, f"{name}/a.csv", b"id,text\n1,one\n")
    write(here, "odd1/a.csv", b"id,text\n2,two\n")
    assert [row["id"] for row in run(server, f"{name}{given}")] == ["1"]


@pytest.mark.parametrize("pattern", [None, ".jsonl", "*.jsonl", "**/*.jsonl", "s*/*.jsonl"])
@pytest.mark.parametrize("kind", [JsonlReader, datatrove_readers.JsonlReader])
def test_a_pattern_means_the_same_below_such_a_folder(tmp_path, server, kind, pattern):
    def read(folder):
        for name in ("a.jsonl", "sub/b.jsonl", "sub/c/d.jsonl"):
            write(folder, f"data/{name}")
        runner(folder, server).run(kind(str(folder / "data"), glob_pattern=pattern).run())
        return sorted(row["id"] for row in rows(folder))

    assert read(tmp_path / "a [1-2]*") == read(tmp_path / "plain")


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet", "arrow", "jsonl.gz"])
@pytest.mark.parametrize("first", [True, False])
def test_a_pointer_of_git_lfs_is_named_before_a_request(tmp_path, run, server, suffix, first):
    write(tmp_path, f"data/{'a' if first else 'z'}.{suffix}", POINTER)
    whole = write(tmp_path, f"data/b.{suffix}")
    if suffix == "csv":
        whole.write_bytes(b"id,text\n1,one\n")
    said = run(server, tmp_path / "data", code=1)
    assert "is a pointer of Git LFS" in said
    assert not server.asked


@pytest.mark.parametrize("kind", [JsonlReader, CSVReader])
def test_a_pointer_of_git_lfs_is_named_where_no_check_came_before(tmp_path, kind):
    write(tmp_path, "a", POINTER)
    with pytest.raises(InputError, match="'a' is a pointer of Git LFS"):
        list(kind(str(tmp_path)).run())


def test_the_short_form_looks_at_no_hidden_file(tmp_path, run, server):
    folder = tmp_path / "documents"
    write(folder, "a.csv", b"id,text\n1,one\n")
    write(folder, ".a.csv.swp", b"b0VIM")
    write(folder, ".cache/a.parquet", b"PAR1")
    (folder / ".cache/link").symlink_to(tmp_path)
    assert [row["id"] for row in run(server, folder)] == ["1"]


@pytest.mark.parametrize(
    "row, problem",
    [
        (b"two,more", "more cells than columns"),
        (b"two\nand a half", "fewer cells than columns"),
        (b'"two', "a quote that is not closed"),
        (
            b'"' + b"x" * 70 + b'"',
            "a cell that cannot be read (field larger than field limit (64))",
        ),
    ],
)
def test_an_odd_csv_row_is_refused_before_its_request(tmp_path, run, server, row, problem):
    path = write(tmp_path, "a.csv", b'id,text\n1,"o\nne"\n2,' + row + b"\n3,three\n")
    line = 4 + (problem[0] == "f")
    limit = csv.field_size_limit(64 if "limit" in problem else 2**28)
    said = run(server, path, code=1)
    csv.field_size_limit(limit)
    where = f"the row that begins in line {line}"
    named = f"The input file 'a.csv' has {problem} in {where}. ", f"`a.csv`, {where}: {problem};"
    assert any(text in said for text in named)
    assert "three" not in server.asked  # rows before may have been on their way
    path.write_bytes(path.read_bytes().replace(row, b"two"))
    assert len(run(server, path)) == 3
    assert server.asked.total() == 3


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize(
    "names, message", [("text n m n", "'n': numbers 2, 4"), ("text text", "'text': numbers 1, 2")]
)
def test_equal_names_in_a_table_are_refused_with_their_places(tmp_path, names, message, kind):
    columns = names.split()
    write_table(tmp_path / f"a.{kind}", pa.table([["a"]] * len(columns), columns))
    reader = reader_of(tmp_path, kind)
    with pytest.raises(InputError, match=f"several columns named {message}"):
        list(reader.run())
    with pytest.raises(InputError, match=message):
        ReaderDataset(reader)


EDGES = [2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 10**19, 10**25 + 1, -(10**30)]


def test_integers_beyond_64_bits_come_out_as_they_went_in(tmp_path, run, server):
    given = [{"id": value, "text": f"text {value}", "n": [{"v": -value}]} for value in EDGES]
    path = write(tmp_path, "a.jsonl", "\n".join(map(json.dumps, given)).encode())
    found = run(server, path, "{text} {n}")
    assert set(server.asked) == {f'text {value} [{{"v":{-value}}}]' for value in EDGES}
    for row, expected in zip(found, given, strict=True):
        assert {key: row[key] for key in expected} == expected
