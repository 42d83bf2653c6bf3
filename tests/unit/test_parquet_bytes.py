"""Parquet files have the bytes that datatrove's own ParquetWriter writes with the same schema."""

import datetime

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datatrove.data import Document, Media
from datatrove.pipeline.writers import ParquetWriter

from datatrove_ckpt.output.chunk_writing import ChunkWriter, ColumnTypes
from datatrove_ckpt.output.document_codec import decode_rows, encode
from datatrove_ckpt.output.file_managers import StagedFiles
from datatrove_ckpt.output.file_names import FileNames
from tests import golden

VECTORS = np.random.default_rng(0).random((200, 8), dtype=np.float32)
SCHEMA = pa.schema([("id", pa.string()), ("n", pa.int64()), ("vector", pa.list_(pa.float32(), 8))])


def adapter(self, document):
    return {"id": document.id, "words": document.text.split()}


class ClosesByName(ParquetWriter):
    closed = []  # noqa: RUF012 - also of the copies

    def close_file(self, filename):
        self.closed.append(filename)
        super().close_file(filename)


SETTINGS = golden.named("settings_of_parquet", globals())


def documents(vectors):
    found = []
    for number in range(200):
        metadata = {
            "n": number,
            "half": number % 2,
            "day": datetime.date(2026, 1, 1 + number % 28),
            "none": None,
        }
        if vectors:
            metadata["vector"] = VECTORS[number]
        media = [Media(str(number), 0, "u", media_bytes=bytes([number % 256]))]
        found.append(Document(f"text {number} " * (number % 5), f"id {number}", media, metadata))
    return found


def writer(folder, kind=ParquetWriter, **settings):
    settings.setdefault("output_filename", "${rank}_chunk_${chunk_index}.parquet")
    return kind(str(folder), **settings)


def ours(folder, found, own):
    staged = StagedFiles(folder, own.output_mg)
    finished = [(number, encode(one)) for number, one in enumerate(found)]
    ChunkWriter(own, 2, FileNames(own, 2)).write(staged, 5, finished)
    return {name: (folder / name).read_bytes() for name in staged.finished}


def theirs(folder, found, own):
    for document in found:
        own.write(decode_rows(encode(document)), 2, chunk_index="00005")
    own.close()
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.parquet")}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_bytes_are_those_of_datatroves_writer(tmp_path, name):
    settings, found = SETTINGS[name], documents(vectors=name == "schema")
    files = ours(tmp_path / "ours", found, writer(tmp_path / "unused", **settings))
    assert (len(files) > 2) == (settings.get("max_file_size") == 2_000)
    own = writer(tmp_path / "theirs", **settings)
    if own.schema is None:
        types = ColumnTypes()
        types.add([own.adapter(decode_rows(encode(document))) for document in found])
        own.schema = types.schema()
    assert theirs(tmp_path / "theirs", found, own) == files


def test_a_class_of_the_user_gets_its_calls(tmp_path):
    files = ours(
        tmp_path,
        documents(False),
        writer(tmp_path, ClosesByName, max_file_size=2_000, batch_size=20),
    )
    assert sorted(ClosesByName.closed) == sorted(files)
    assert len(files) > 2
    assert sum(pq.read_metadata(tmp_path / name).num_rows for name in files) == 200


def test_files_with_vectors_have_no_dictionary_if_the_schema_is_found_out(tmp_path):
    found = documents(vectors=True)
    for folder, schema, expected in (("a", None, False), ("b", SCHEMA, True)):
        own = writer(tmp_path, schema=schema, expand_metadata=True)
        [name] = ours(tmp_path / folder, found, own)
        group = pq.read_metadata(tmp_path / folder / name).row_group(0)
        columns = [group.column(number) for number in range(group.num_columns)]
        assert {column.has_dictionary_page for column in columns} == {expected}
