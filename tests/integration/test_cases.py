"""A hundred small inputs as people have them: each is read as json, pandas or pyarrow read it, or is
refused with its file before a request is sent.
"""

import datetime
import gzip
import io
import json

import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from datatrove_ckpt.readers import CSVReader, JsonlReader, ParquetReader
from tests import golden
from tests.jobs import rows, runner
from tests.unit.tables import reader_of, write_table

MARK = b"\xef\xbb\xbf"


def read(reader, folder):
    found = []
    for document in reader(str(folder)).run():
        row = {"id": document.id, "text": document.text, **document.metadata}
        del row["file_path"]
        found.append(row)
    return found


def write(folder, name, content):
    folder.mkdir()
    if name.endswith(".gz"):
        content = gzip.compress(content)
    (folder / name).write_bytes(content)
    return folder


VALUES = [
    *("0", "-1", "1.5", "-0.0", "1e5", "1E-7", "0.1", "1e308", "1e400", "5e-324"),
    *("9007199254740993", "18446744073709551615", "-9223372036854775809", "1" * 400),
    *("NaN", "-Infinity", "[NaN, Infinity]", "null", "true", "[]", "{}", "[[], [{}]]"),
    *('""', r'"\ud83d\ude00"', r'"a\u0000b"', r'"\u2028"', r'"\/"', '"\u00e9"', '"\u2028\u0085"'),
    *('[1, null, "a"]', '{"": 1}', '{"a.b": {"c": [18446744073709551616]}}', '{"a": 1, "a": 2}'),
]


@pytest.mark.parametrize("value", VALUES)
def test_a_value_of_json_is_read_as_json_reads_it(tmp_path, server, value):
    line = f'{{"id": "1", "text": "a", "v": {value}}}'
    data = write(tmp_path / "data", "a.jsonl", f"{line}\n".encode())
    found = read(JsonlReader, data)
    assert repr(found) == repr([json.loads(line)])
    runner(tmp_path, server).run(JsonlReader(str(data)).run())
    (row,) = rows(tmp_path)
    if not any(sign in value for sign in ("NaN", "Infinity", "e400")):  # null in JSON
        assert repr(row["metadata"]["v"]) == repr(found[0]["v"])


ROW = b'{"id": "1", "text": "a"}'


CSV = {
    "a mark": MARK + b"id,text\n1,a\n",
    "windows": b"id,text\r\n1,a\r\n2,b\r\n",
    "old macs": b"id,text\r1,a\r2,b\r",
    "no line break at the end": b"id,text\n1,a",
    "line breaks in cells": b'id,text\n1,"a\r\nb\nc"\n2,b\n',
    "quotes in quotes": b'id,text\n1,"say ""a"", b"\n',
    "a quote in a cell": b'id,text\n1,5" pipe\n',
    "text after a quote": b'id,text\n1,"a"b\n',
    "zeros before": b"id,text,n\n007,a,1.50\n",
    "words for null": b"id,text,n\n1,a,NA\n2,NULL,null\n3,nan,None\n",
    "empty cells": b'id,text,n\n1,a,\n2,b,""\n,c,x\n',
    "spaces": b"id,text, n \n 1, a , x\n",
    "blank lines": b"id,text\n\n1,a\n\n\n2,b\n\n",
    "one column": b"text\na\nb\n",
    "no rows but one": b'text,id\n"a","1"\n',
    "odd names": b"id,text,a b,\xc3\xa9,a.b\n1,a,2,3,4\n",
    "signs of lines": "id,text\n1,a\u2028b\x0bc\x0cd\x85e\n".encode(),
    "a long cell": b"id,text\n1," + b"x" * 2**20 + b"\n",
    "a column without a name": b",text,id\n0,a,1\n",
    "a byte of zeros": b"id,text\n1,a\0b\n",
    "the old mark of the end": b"text\na\n\0end of the file\nb\n",
    "many columns": b"id,text,"
    + b",".join(b"c%d" % n for n in range(500))
    + b"\n1,a"
    + b",x" * 500,
}


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("name", CSV)
def test_csv_is_read_as_pandas_reads_it(tmp_path, server, name, suffix):
    data = write(tmp_path / "data", f"a.csv{suffix}", CSV[name])
    expected = pandas.read_csv(io.BytesIO(CSV[name]), dtype=str, keep_default_na=False)
    expected = expected.rename(columns={"Unnamed: 0": ""})
    expected = [row for row in expected.to_dict("records") if row["text"]]
    found = read(CSVReader, data)
    if b"," in CSV[name]:
        assert found == expected
    assert [row["text"] for row in found] == [row["text"] for row in expected]
    runner(tmp_path, server).run(CSVReader(str(data)).run())
    assert [row["text"] for row in rows(tmp_path)] == [row["text"] for row in found]


@pytest.mark.parametrize("given", [";", r"\t"])
def test_csv_with_another_delimiter_is_read_as_pandas_reads_it(tmp_path, server, command, given):
    sign = given.replace(r"\t", "\t")
    content = f'id{sign}text{sign}n\n1{sign}a,b{sign}1,5\n2{sign}"c{sign}d"{sign}\n'.encode()
    data = write(tmp_path / "data", "a.csv", content)
    table = pandas.read_csv(io.BytesIO(content), sep=sign, dtype=str, keep_default_na=False)
    job = f"run --input {data} --prompt {{text}} --endpoint {server.url} --model m --run-folder"
    words = [*job.split(), f"{tmp_path}/run"]
    command(*words, "--delimiter", given)
    found = [{name: row[name] for name in table.columns} for row in rows(tmp_path / "run")]
    assert found == table.to_dict("records")
    assert f"delimiter: {sign!r} -> ','" in command(*words, code=1).err
    assert "';;' is not one character" in command(*words, "--delimiter", ";;", code=2).err


DAY = datetime.date(2026, 1, 2)


@pytest.mark.parametrize("code", golden.sections("cases"))
def test_an_odd_file_is_refused(tmp_path, server, code):
    def refused(name, content):
        data = tmp_path / "data"
        kind = name.partition(".")[2]
        if kind == "parquet":
            data.mkdir()
            pq.write_table(pa.table(content), data / name)
        else:
            write(data, name, content)
        reader = {"csv": CSVReader, "jsonl": JsonlReader, "parquet": ParquetReader}[kind]
        runner(tmp_path, server).run(reader(str(data)).run())

    golden.refuse("cases", code, locals(), FOLDER=tmp_path)
    assert not server.asked


@pytest.mark.parametrize("value", ["", False, 0])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_an_empty_cell_is_no_media(tmp_path, server, kind, value):
    table = pa.table({"id": ["1"], "text": ["a"], "media": [value]})
    (tmp_path / "data").mkdir()
    write_table(tmp_path / f"data/a.{kind}", table)
    runner(tmp_path, server).run(reader_of(tmp_path / "data", kind).run())
    assert [row["text"] for row in rows(tmp_path)] == ["a"]
