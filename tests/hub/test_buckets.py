"""Buckets of the fake hub, with the real client above a transport that stands for hf_xet."""

from __future__ import annotations

from pathlib import Path

import pytest
from datatrove.data import Document
from datatrove.pipeline.writers import HuggingFaceBucketWriter, ParquetWriter
from huggingface_hub import HfApi, HfFileSystem
from huggingface_hub.errors import BucketNotFoundError, HfHubHTTPError

from tests.hub import FakeHub


def test_files_go_in_and_out_and_are_replaced_and_deleted(hub: FakeHub, tmp_path: Path) -> None:
    api = HfApi()
    with pytest.raises(BucketNotFoundError):
        api.bucket_info("org/data")
    api.create_bucket("org/data", private=True)
    (tmp_path / "local").write_bytes(b"from a file")
    api.batch_bucket_files("org/data", add=[(b"0", "a/0.txt"), (tmp_path / "local", "a/b/1.txt")])
    assert hub.files("org/data", kind="bucket") == {"a/0.txt": b"0", "a/b/1.txt": b"from a file"}
    assert [entry.path for entry in api.list_bucket_tree("org/data", "a")] == ["a/0.txt", "a/b"]
    assert [entry.path for entry in api.list_bucket_tree("org/data", recursive=True)][-1] == "a/b/1.txt"
    assert [info.size for info in api.get_bucket_paths_info("org/data", ["a/b/1.txt", "no"])] == [11]
    assert api.get_bucket_file_metadata("org/data", "a/b/1.txt").size == 11
    assert HfFileSystem().cat_file("buckets/org/data/a/b/1.txt", 5, 6) == b"a"
    api.batch_bucket_files("org/data", add=[(b"new", "a/0.txt")], delete=["a/b/1.txt"])
    assert hub.files("org/data", kind="bucket") == {"a/0.txt": b"new"}
    assert api.bucket_info("org/data").total_files == 1


def test_a_token_that_only_reads_a_bucket(hub: FakeHub) -> None:
    hub.create_repo("org/data", kind="bucket")
    with pytest.raises(HfHubHTTPError, match="403"):
        HfApi(token=hub.read_token).batch_bucket_files("org/data", add=[(b"0", "0.txt")])
    assert hub.files("org/data", kind="bucket") == {}


def test_datatroves_bucket_writers(hub: FakeHub, tmp_path: Path) -> None:
    staging = str(tmp_path / "staging")
    with HuggingFaceBucketWriter(
        "org/data", "p", output_filename="${rank}.parquet", local_working_dir=staging
    ) as writer:
        writer.write(Document("text", "0"))
    with ParquetWriter("hf://buckets/org/data/q", "${rank}.parquet", max_file_size=-1) as writer:
        writer.write(Document("text", "0"))
    assert list(hub.files("org/data", kind="bucket")) == ["p/000_00000.parquet", "q/00000.parquet"]
