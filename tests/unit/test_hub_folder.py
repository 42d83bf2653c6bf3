"""Folders on the hub: their URLs, and their listings."""

from __future__ import annotations

from typing import Any

import pytest
from datatrove.pipeline.writers import ParquetWriter

from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.output.hub import HubFolder


@pytest.mark.parametrize(
    ("url", "folder"),
    [
        ("hf://datasets/org/name/a/b/", HubFolder("dataset", "org/name", path="a/b")),
        ("hf://datasets/org/name@v1/a@b/c", HubFolder("dataset", "org/name", "v1", "a@b/c")),
        ("hf://datasets/org/name@refs/pr/3/a", HubFolder("dataset", "org/name", "refs/pr/3", "a")),
        ("hf://datasets/org/name@refs%2Fpr%2F3/a", HubFolder("dataset", "org/name", "refs/pr/3", "a")),
        ("hf://datasets/org/name/a@b", HubFolder("dataset", "org/name", path="a@b")),
        ("hf://org/name/a", HubFolder("model", "org/name", path="a")),
        ("hf://buckets/org/name/a", HubFolder("bucket", "org/name", path="a")),
    ],
)
def test_a_url_names_a_folder_and_the_folder_its_url(url: str, folder: HubFolder) -> None:
    assert HubFolder.parse(url) == folder
    assert HubFolder.parse(folder.url) == folder


@pytest.mark.parametrize("url", ["hf://", "hf://datasets", "hf://datasets/org", "hf://datasets/org/@v1", "hf://org"])
def test_a_url_without_a_repository_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="names no repository"):
        HubFolder.parse(url)


def test_a_writers_folder_is_recognised() -> None:
    writer = ParquetWriter("hf://datasets/org/name@branch/part", "${rank}_${chunk_index}.parquet")
    folder = HubFolder.of(writer.output_folder)
    assert folder is not None
    assert (folder.repo, folder.branch, folder.path) == ("org/name", "branch", "part")
    assert folder.full_name("00000_00001.parquet") == "part/00000_00001.parquet"


def test_a_local_folder_is_none_on_the_hub(tmp_path: Any) -> None:
    assert HubFolder.of(ParquetWriter(str(tmp_path)).output_folder) is None
