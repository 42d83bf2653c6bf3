"""Formats of output files: what a writer has written is found by writer and by name, counted and
read again.
"""

import pytest
from datatrove.data import Document

from datatrove_ckpt.cli.yaml_config import SHORT_NAMES
from datatrove_ckpt.output.formats import FORMATS, format_of_file, is_known
from datatrove_ckpt.output.names import stem, writer_name

TEXTS = ["one", "two\nlines", "dreiß"]


@pytest.mark.parametrize(
    ("known", "compression"),
    [
        (known, how)
        for known in FORMATS
        for how in ((None,) if known.is_compressed else (None, "gzip", "zstd"))
    ],
)
def test_what_a_writer_has_written_is_counted_and_read(known, compression, tmp_path):
    writer = known.writer(str(tmp_path), f"name{known.suffix}", compression=compression)
    with writer:
        for index, text in enumerate(TEXTS):
            writer.write(Document(text, str(index)))
    assert is_known(writer_name(writer)), "verify does not count its rows"
    assert format_of_file(f"a/name{known.suffix}") is known
    assert known.writer.__name__ in SHORT_NAMES, "YAML files cannot name its writer"
    assert stem(f"name{known.suffix}") == "name", (
        "its files are not recognised if the template lacks the suffix"
    )
    (path,) = tmp_path.iterdir()
    with writer.output_folder.open(path.name, "rb", compression=compression) as file:
        assert known.count(file) == len(TEXTS)
    with writer.output_folder.open(path.name, "rb", compression=compression) as file:
        rows = [row for row, _ in known.rows(file)]
    assert [(row["id"], row["text"]) for row in rows if row] == [
        (str(index), text) for index, text in enumerate(TEXTS)
    ]


@pytest.mark.parametrize(
    ("name", "suffix"),
    [
        ("00000.jsonl.gz", ".jsonl"),
        ("a.jsonl/0.parquet", ".parquet"),
        ("a.jsonl/0.txt", None),
        ("ajsonl", None),
    ],
)
def test_a_format_is_known_by_the_name_of_a_file(name, suffix):
    found = format_of_file(name)
    assert (None if found is None else found.suffix) == suffix
