"""Private parts of other packages that the code relies on.

Each test names the code to correct when a part changes.
"""

import inspect
import subprocess
import sys

from datatrove.executor import LocalPipelineExecutor
from datatrove.executor.base import PipelineExecutor
from datatrove.executor.jobs import JobsPipelineExecutor
from datatrove.pipeline.writers import JsonlWriter, ParquetWriter
from datatrove.pipeline.writers.disk_base import DiskWriter


def test_datatroves_writers_write_a_row_in_write():
    sentence = (
        "datatrove's writers no longer hand a row to _write(document, file_handler, filename), or a batch to "
        "_write_batch. Correct Format.is_written_by in output/formats.py, and omit_dictionaries in output/chunk_writing.py."
    )
    assert [*inspect.signature(DiskWriter._write).parameters] == [
        "self",
        "document",
        "file_handler",
        "filename",
    ], sentence
    assert "_write" in vars(JsonlWriter), sentence
    assert {"_write", "_write_batch"} <= vars(ParquetWriter).keys(), sentence


def test_an_abandoned_database_is_left_open_until_the_process_ends(tmp_path):
    path = tmp_path / "replay.sqlite3"
    code = "import sys, pathlib; from datatrove_ckpt.checkpoint.request_cache import RequestCache"
    code += "; cache = RequestCache(pathlib.Path(sys.argv[1])); cache.abandon(); del cache"
    subprocess.run([sys.executable, "-c", code, path], check=True)
    assert path.with_name("replay.sqlite3-wal").exists(), (
        "Python's exit has closed the connection, and the log was deleted. Another process may use it: correct "
        "RequestCache.abandon in checkpoint/request_cache.py."
    )


def test_datatroves_executors_run_a_rank_in_run_for_rank(tmp_path):
    sentence = (
        "datatrove's executors no longer run a rank in _run_for_rank(rank, local_rank, node_rank), note their start in "
        "_launched, or make their repository in _ensure_logging_dir_repo. Correct executors/local.py and "
        "executors/jobs.py."
    )
    for kind in (PipelineExecutor, JobsPipelineExecutor):
        parts = [*inspect.signature(kind._run_for_rank).parameters]
        assert parts == ["self", "rank", "local_rank", "node_rank"], sentence
    assert LocalPipelineExecutor([], logging_dir=str(tmp_path))._launched is False, sentence
    assert "_launched" in inspect.getsource(JobsPipelineExecutor), sentence
    assert "_ensure_logging_dir_repo" in vars(JobsPipelineExecutor), sentence
