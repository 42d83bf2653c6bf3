"""Private parts of other packages that the code relies on.

Each test names the code to correct when a part changes.
"""

import asyncio
import inspect
import io
import os
import subprocess
import sys
from pathlib import Path

import aiohttp
import multiprocess
import pytest
from aiohttp.client_proto import ResponseHandler
from datatrove.executor import LocalPipelineExecutor
from datatrove.executor.base import PipelineExecutor
from datatrove.executor.jobs import JobsPipelineExecutor
from datatrove.pipeline.writers import JsonlWriter, ParquetWriter
from datatrove.pipeline.writers.disk_base import DiskWriter
from loguru import logger


def test_datatroves_writers_write_a_row_in_write():
    sentence = (
        "datatrove's writers no longer hand a row to _write(document, file_handler, filename), or a batch to "
        "_write_batch. Correct Format.is_written_by in output/formats.py, and _BatchWriter in output/parquet.py."
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


def test_aiohttp_makes_its_connections_with_a_factory_and_hands_them_what_arrives():
    sentence = (
        "aiohttp no longer makes its connections with TCPConnector._factory, or has renamed a method of "
        "ResponseHandler. Correct _WatchedConnection in inference/client/over_aiohttp.py: answers may be swapped without it."
    )

    async def factory():
        async with aiohttp.TCPConnector() as connector:
            return connector._factory()

    assert isinstance(asyncio.run(factory()), ResponseHandler), sentence
    replaced = {
        "upgraded",
        "set_response_params",
        "feed_data",
        "is_connected",
        "force_close",
        "close",
    }
    assert replaced <= {*dir(ResponseHandler)}, sentence


def test_loguru_has_its_handlers_and_its_patcher_in_core(monkeypatch):
    stream = io.StringIO()
    number = logger.add(stream)
    try:
        sinks = [getattr(handler, "_sink", None) for handler in logger._core.handlers.values()]
        assert stream in [getattr(sink, "_stream", None) for sink in sinks], (
            "loguru no longer has a handler's stream in logger._core.handlers. Correct _move_logging in "
            "process/screen.py: log lines are printed over the bar without it."
        )
    finally:
        logger.remove(number)

    def patcher(record):
        pass

    monkeypatch.setattr(logger._core, "patcher", logger._core.patcher)  # is put back
    logger.configure(patcher=patcher)
    assert logger._core.patcher is patcher, (
        "loguru no longer has its patcher in logger._core. Correct safe_log in process/task_errors.py: a patcher of "
        "the user is lost without it."
    )


@pytest.mark.skipif(sys.platform != "linux", reason="needs epoll")
@pytest.mark.parametrize("package", ["asyncio", "uvloop"])
def test_an_event_loop_tells_the_descriptor_with_which_it_waits(package):
    loop = pytest.importorskip(package).new_event_loop()
    try:
        number = loop._selector.fileno() if hasattr(loop, "_selector") else loop._get_backend_id()
        assert "eventpoll" in str(Path(f"/proc/self/fd/{number}").readlink()), (
            f"{package} no longer tells it in loop._selector or loop._get_backend_id. Correct _poll_of in "
            "process/event_loop.py: a fork of user code takes answers of its rank without it."
        )
    finally:
        loop.close()


class _Sent(Exception):
    def __reduce__(self):
        return Exception, (f"pickled in {os.getpid()}",)


def _fail():
    raise _Sent


def test_a_pool_pickles_the_error_of_a_task_in_its_worker():
    with multiprocess.get_context("fork").Pool(1) as pool:
        with pytest.raises(Exception, match="pickled in") as failed:
            pool.apply(_fail)
        worker = pool.apply(os.getpid)
    assert str(failed.value) == f"pickled in {worker}", (
        "A pool no longer pickles the error of a task in its worker. Correct _Handed in process/preemption.py: a "
        "worker that a signal should have ended stays, and Pool.terminate waits for it."
    )
