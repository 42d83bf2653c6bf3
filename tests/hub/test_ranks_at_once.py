"""Ranks that commit to one repository at the same time, on a hub that fails now and then."""

import io
from concurrent.futures import ThreadPoolExecutor

import pyarrow.parquet as pq
import pytest
from datatrove.pipeline.writers import ParquetWriter

from tests.jobs import documents, runner

RANKS, DOCUMENTS = 4, 10


@pytest.mark.slow
def test_every_file_is_there_once(
    hub,
    server,
    tmp_path,
):
    hub.create_repo("org/data")
    hub.lag_commits = 1
    refused = hub.fail("commit", status=500, times=None, every=3)
    hub.fail("commit", status=504, times=None, every=7, after_effect=True)
    hub.fail("commit", None, times=None, every=8, after_effect=True)
    hub.fail("lfs-upload", status=503, times=None, every=9)

    def run(rank):
        writer = ParquetWriter(
            "hf://datasets/org/data/config", "${rank}_${chunk_index}.parquet", max_file_size=-1
        )
        step = runner(tmp_path, server, output_writer=writer, hub_commit_seconds=0.0)
        step.run(documents(DOCUMENTS), rank, RANKS)

    with ThreadPoolExecutor(RANKS) as threads:
        list(threads.map(run, range(RANKS)))
    files = hub.files("org/data")
    assert list(files) == [
        f"config/{rank:05d}_{chunk:05d}.parquet" for rank in range(RANKS) for chunk in range(5)
    ]
    ids = [
        one
        for content in files.values()
        for one in pq.read_table(io.BytesIO(content))["id"].to_pylist()
    ]
    assert ids == RANKS * [document.id for document in documents(DOCUMENTS)]
    assert sum(len(commit.added) for commit in hub.commits("org/data")) == len(files), (
        "none is committed again"
    )
    assert refused.hits > 0
