"""What a run says about itself: where it resumes, who waits for whom, what has failed and where,
what was checked.
"""

import gc
import json
import os
import subprocess
import sys

import pytest

from datatrove_ckpt.errors import DocumentFailed
from datatrove_ckpt.process.screen import reporting_to
from datatrove_ckpt.testing import FakeServer
from tests.jobs import ask, documents, runner
from tests.patience import until
from tests.yaml_jobs import endpoint, job_yaml, write_job

ONE_BY_ONE = {"max_concurrent_documents": 1}


async def fails_at_the_third(document, generate):
    answer = await ask(document, generate)
    if document.id == "id 2":
        raise ValueError("as asked")
    return answer


def test_a_resume_says_what_is_done_and_which_answers_wait(tmp_path, server, log):
    with pytest.raises(DocumentFailed):
        runner(tmp_path, server, fails_at_the_third, records_per_chunk=5, config=ONE_BY_ONE).run(
            documents(8)
        )
    with pytest.raises(DocumentFailed):
        runner(tmp_path, server, fails_at_the_third, records_per_chunk=5, config=ONE_BY_ONE).run(
            documents(8)
        )
    (said,) = [line for line in log if "Resuming" in line]
    assert "Resuming: 2 documents are done (0 in output files), 1 answer waits." in said


def test_before_its_first_document_a_rank_reads_the_input_and_waits_for_no_server(tmp_path, server):
    states = []

    def slow():
        until(lambda: states)
        yield from documents(1)

    with reporting_to(lambda rank, progress: states.append(progress.state), below=False):
        runner(tmp_path, server).run(slow())
    assert states[0] == "reading the input"


JOB = """
import sys
from datatrove.executor import LocalPipelineExecutor as DatatroveExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter
from datatrove_ckpt import InferenceConfig, InferenceRunner, LocalPipelineExecutor

async def rollout(document, generate):
    answer = await generate({"messages": [{"role": "user", "content": document.text}]})
    return answer.txt

kind, url, workers = sys.argv[1:]
runner = InferenceRunner(
    rollout,
    InferenceConfig("endpoint", "fake", endpoint_url=url),
    JsonlWriter("output", "${rank}_${chunk_index}.jsonl", compression=None),
    checkpoints_local_dir="checkpoints",
)
if __name__ == "__main__":
    executor = LocalPipelineExecutor if kind == "ours" else DatatroveExecutor
    executor([JsonlReader("input"), runner], tasks=2, workers=int(workers), logging_dir="logs").run()
"""
LINE = 10  # of "answer.txt"


@pytest.mark.matrix
@pytest.mark.parametrize(("kind", "workers"), [("ours", 1), ("ours", 2), ("datatrove", 1)])
def test_a_script_shows_our_error_first_and_then_little_more(tmp_path, server, kind, workers):
    (tmp_path / "input").mkdir()
    for task in range(2):
        (tmp_path / "input" / f"{task}.jsonl").write_text(json.dumps({"id": "a", "text": "b"}))
    (tmp_path / "job.py").write_text(JOB)
    argv = [sys.executable, "job.py", kind, server.url, str(workers)]
    ended = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    lines = ended.stderr.splitlines()
    place = f"AttributeError: 'InferenceResult' object has no attribute 'txt', in job.py, line {LINE} (rollout). "
    first = next(index for index, line in enumerate(lines) if "Traceback" in line)
    assert place in "".join(lines[:first])
    assert len(lines[first:]) < 40
    assert "scheduler.py" not in ended.stderr
    logs = [path.read_text() for path in (tmp_path / "logs/logs").iterdir()]
    assert f'job.py", line {LINE}, in rollout' in "".join(logs)


def test_the_command_names_the_line_of_a_rollout_and_the_log_with_the_traceback(
    here, server, command, monkeypatch
):
    text = job_yaml(endpoint(server), rollout="raises_in_line_3.ask")
    write_job(here, text, ["text"])
    code = "async def ask(document, generate):\n    text = None\n    text.strip()\n"
    (here / "raises_in_line_3.py").write_text(code)
    monkeypatch.syspath_prepend(here)
    said = command("run", "job.yaml", code=1).err
    error = said[said.rindex("error: ") :].splitlines()
    assert "no attribute 'strip', in raises_in_line_3.py, line 3 (ask). " in error[0]
    log = here / "logs/logs/task_00000.log"
    assert error[1:] == [
        f"The traceback is in the log of task 0: {log}",
        "The whole command: datatrove-ckpt run job.yaml --pipeline.1.accept_changes=true",
    ]
    assert "Traceback" in log.read_text()
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("answer.text", 0, "0 dead letters), for 3 requests "),
        (
            "return generate({}).text",
            1,
            "has no attribute 'text' (was `await` forgotten, as in `await generate",
        ),
        (
            "return {'answer': generate({})}",
            1,
            "of type coroutine (was `await` forgotten, as in `await generate",
        ),
        (
            "return document",
            1,
            "rollout ask returned the document itself. Return what is to be added to it",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_what_a_rollout_has_forgotten_is_said_in_the_last_line(
    here,
    server,
    command,
    monkeypatch,
    line,
    code,
    said,
):
    write_job(here, job_yaml(endpoint(server), rollout="forgets.ask"), ["a", "b", "c"])
    ask = (
        "    answer = await generate({'messages': [{'role': 'user', 'content': document.text}]})\n"
    )
    (here / "forgets.py").write_text(f"async def ask(document, generate):\n{ask}    {line}\n")
    monkeypatch.syspath_prepend(here)
    monkeypatch.delitem(sys.modules, "forgets", raising=False)
    printed = command("run", "job.yaml", code=code)
    gc.collect()  # the coroutine, whose warning would else be another test's
    last = printed.error if code else printed.out.splitlines()[-1]
    assert said in last
    assert code or "or a return missing?" in last


def test_tasks_without_documents_are_counted_once(here, server, command):
    write_job(here, job_yaml(endpoint(server), tasks=3), ["a"])
    said = command("run", "job.yaml")
    assert " 2 of 3 tasks had no documents. " in said.out.splitlines()[-1]
    assert "No files found" not in said


def test_a_second_run_names_the_command_to_stop_and_not_its_worker(here, command):
    with FakeServer(hold_after=1) as server:
        write_job(here, job_yaml(endpoint(server), tasks=2), "abc", "def")
        words = ["run", "job.yaml", "--executor.workers=2"]
        script = (
            "import sys; from datatrove_ckpt.cli.main import main; sys.exit(main(sys.argv[1:]))"
        )
        first = subprocess.Popen([sys.executable, "-c", script, *words], stderr=subprocess.DEVNULL)
        until(lambda: len(server.payloads) == 6)
        assert (
            f"pid {first.pid} on {os.uname().nodename} holds "
            in command("run", "job.yaml", code=1).error
        )
        server.release()
        assert first.wait() == 0


def test_the_end_says_what_was_checked_skipped_and_sent_again(here, command):
    down = [True]

    def status(payload, times):
        if "text 1" in payload["messages"][-1]["content"] and down:
            return 500 if times == 0 else 400
        return None

    with FakeServer(status=status) as server:
        write_job(here, job_yaml(endpoint(server)), [f"text {n}" for n in range(4)])
        with (here / "input/0.jsonl").open("a") as file:
            file.write("\nno JSON\n")
        command("run", "job.yaml", code=1)
        down.clear()
        said = command("run", "job.yaml", "--pipeline.1.retry_errors=true").out
    assert "Skipped: 1 damaged line. In 2 attempts of 1 task, " in said
    assert "at least" not in said, "no attempt was killed"
    assert (
        " requests were sent, 1 of them again. Checked: 1 output file by name, size and time of change and 1 input "
        "file by size" in said
    )
    assert "none is gone or changed. To check the files: " in said
    stats = json.loads((here / "logs/stats.json").read_text())[1]["stats"]
    assert stats["skipped_damaged_lines"]["total"] == 1
