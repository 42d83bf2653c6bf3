"""Formats of output files: what a writer has written is found by writer and by name, counted and
read again.
"""

import copy
import csv
from pathlib import Path

import numpy as np
import orjson
import pandas
import pytest
from datatrove.data import Document

from datatrove_ckpt.output.csv_writer import cell
from datatrove_ckpt.output.document_codec import document_of
from datatrove_ckpt.output.file_names import stem, writer_name
from datatrove_ckpt.output.formats import BY_NAME, CSV, format_of_file, is_known

DOCUMENTS = [
    Document("one", "0", metadata={"n": 1, "answer": "a" * 2**18}),
    Document("two\nlines", "1", metadata={"n": 2, "answer": 'b,"\r\n'}),
    Document("dreiß\rvier", "2", metadata={"n": 3, "answer": ""}),
]


@pytest.mark.parametrize("has_columns", [True, False])
@pytest.mark.parametrize("name", BY_NAME)
def test_what_a_writer_has_written_is_counted_and_read(name, has_columns, tmp_path, request):
    limit = csv.field_size_limit(2**17)  # Python's own
    request.addfinalizer(lambda: csv.field_size_limit(limit))
    known = BY_NAME[name]
    writer = known.writer_class(str(tmp_path), f"name.{name}", **known.settings(has_columns))
    with writer:
        for document in DOCUMENTS:
            writer.write(document)
    assert writer_name(writer).endswith(known.writer)
    assert is_known(writer_name(writer)), "verify does not count its rows"
    assert format_of_file(f"a/name.{name}") is known
    assert stem(f"name.{name}") == "name"
    (path,) = tmp_path.iterdir()
    with known.open(writer.output_folder, path.name) as file:
        assert known.count(file) == len(DOCUMENTS)
    with known.open(writer.output_folder, path.name) as file:
        rows = [row for row, _ in known.rows(file)]
    wanted = copy.deepcopy(DOCUMENTS)
    if known is CSV:
        for document in wanted:
            document.metadata["n"] = str(document.metadata["n"])
    assert [document_of(row) for row in rows] == wanted
    assert known.dataset([str(path)])["text"][:] == [document.text for document in DOCUMENTS]


def test_a_csv_cell_holds_a_whole_list_and_no_value_of_random_order():
    assert orjson.loads(cell(np.arange(2000, dtype=np.float32))) == [*range(2000)]
    assert cell([pandas.Timestamp("2020-01-01"), b"a"]) == '["2020-01-01T00:00:00","YQ=="]'
    for value in ({"a", "b"}, [{"a", "b"}], {"w": {"a"}}):
        with pytest.raises(TypeError):
            cell(value)


@pytest.mark.parametrize("name", BY_NAME)
def test_the_page_of_the_short_form_names_it(name):
    assert f"`{name}`" in Path("docs/cli.md").read_text()
