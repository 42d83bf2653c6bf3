"""The command on a terminal: one bar over all ranks, log lines above it, and nothing left of it at
the end.
"""

from __future__ import annotations

import pytest

from datatrove_ckpt.testing import FakeServer
from tests.ptys import Terminal, on_terminal
from tests.yaml_jobs import ENDPOINT, job_yaml, write_job

COLUMNS = 160


def has_bar(lines):
    return bool(lines) and " doc/s" in lines[-1] and "tasks" in lines[-1]


def write(folder, server, tasks=4):
    text = job_yaml(f"{ENDPOINT.replace('URL', server.url)}, max_concurrent_generations: 2", tasks)
    texts = ([f"text {task} {number}" for number in range(4)] for task in range(tasks))
    write_job(folder, text + "          drain_seconds: 0.1\n", *texts)


@pytest.mark.slow
def test_ctrl_c_on_a_terminal_leaves_nothing_of_the_bar(tmp_path):
    with FakeServer(hold_after=7) as server, Terminal(COLUMNS) as terminal:
        write(tmp_path, server)
        with on_terminal(terminal, tmp_path, "run", "job.yaml", "--executor.workers=2") as process:
            lines = terminal.until(
                lambda lines: (
                    has_bar(lines) and len(server.payloads) >= 8 and " 7 docs, " in f" {lines[-1]}"
                )
            )
            assert " % |" in lines[-1]
            assert sum("doc/s" in line for line in lines) == 1
            terminal.type(b"\x03")
            terminal.until(lambda lines: process.poll() is not None)
        lines = terminal.read()
        assert process.returncode == 130
        assert lines[-1].startswith(
            "interrupted by SIGINT; what is finished is saved. To resume: datatrove-ckpt run"
        )
        assert not any("doc/s" in line for line in lines), lines
        assert not any(line != "^C" and "^C" in line for line in lines)
        assert "ERROR" not in "".join(lines)
