"""datatrove logs the end of each task as an exception.

What it says of ours is changed, and nothing else.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
from datatrove.executor import LocalPipelineExecutor as DatatroveExecutor
from datatrove.pipeline.base import PipelineStep
from loguru import logger

from datatrove_ckpt.errors import CheckpointMismatch, Preempted
from datatrove_ckpt.process import task_log
from datatrove_ckpt.process.task_errors import safe_log


class Ends(PipelineStep):
    """Raises."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def run(self, data, rank=0, world_size=1):
        raise self.error


@pytest.fixture
def said(tmp_path, capfd):
    """What a task says on the terminal, and in its log, when a step raises this error."""
    safe_log()

    def run(error):
        with pytest.raises(type(error)):
            DatatroveExecutor([Ends(error)], workers=1, logging_dir=str(tmp_path / "logs")).run()
        return capfd.readouterr().err, (tmp_path / "logs" / "logs" / "task_00000.log").read_text()

    return run


def test_a_log_on_a_full_disk_lacks_lines_and_is_no_error(capfd):
    full = Path("/dev/full")
    folder = SimpleNamespace(is_local=lambda: True, open=lambda path, mode: Path.open(full, mode))
    log = task_log.base.add_task_logger(folder, 0)
    logger.warning("said")
    task_log.base.close_task_logger(log)
    terminal = capfd.readouterr().err
    assert "said" in terminal
    assert "No space left" not in terminal


def test_sinks_of_the_user_show_what_their_patcher_adds():
    lines = []
    sink = logger.add(lines.append, format="{extra[run]} {message}", catch=False)
    logger.configure(patcher=lambda record: record["extra"].update(run="R7"))
    for _ in range(2):
        safe_log()
        logger.info("a\rb")
    logger.remove(sink)
    assert lines == ["R7 a\\u000db\n"] * 2


def test_an_interrupted_rank_is_no_error_for_datatrove(said):
    terminal, log = said(Preempted("Stopped by SIGTERM."))
    assert "Preempted" not in terminal
    assert "ERROR" not in terminal + log
    assert "DEBUG" in log
    assert "stopped by Preempted" in log


def test_errors_of_others_stay_as_they_are(said):
    terminal, log = said(ValueError("another's"))
    for text in (terminal, log):
        assert "Traceback" in text


def test_no_foreign_text_forges_a_line_or_moves_the_cursor(said):
    for error in (
        CheckpointMismatch("a\n2026 | ERROR | forged\x1b[2J"),
        ValueError("a\n2026 | ERROR | forged\x1b[2J"),
    ):
        for text in said(error):
            assert "\n2026 |" not in text
            assert "\x1b[2J" not in text
            assert "  2026 | ERROR | forged\\u001b[2J" in text
