"""What a run says about itself: where it resumes, who waits for whom, what has failed and where,
what was checked.
"""

import gc
import os
import sys
from pathlib import Path

import pytest
from datatrove.data import Document

from datatrove_ckpt.common.warnings import warn_once
from tests.jobs import ask, runner
from tests.patience import until
from tests.processes import run
from tests.yaml_jobs import endpoint, job_yaml, write_input, write_job


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
    "line, code, said",
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
        ("return answer['text']", 1, "not subscriptable (an answer's text is its attribute `text`"),
        ("return 'Yes: ' + answer", 1, "to str (an answer's text is its attribute `text`, as in"),
        (
            "await generate.url()",
            1,
            "(was `async with` forgotten, as in `async with generate.url()",
        ),
        (
            "import asyncio; await asyncio.to_thread(asyncio.run, generate.once('n', len, 'a'))",
            1,
            "from a different loop (from a thread: `asyncio.run_coroutine_threadsafe(",
        ),
        (
            "import asyncio; asyncio.run(generate({}))",
            1,
            "(a rollout is a coroutine: `await generate({",
        ),
        (
            "import asyncio; asyncio.get_event_loop().run_until_complete(generate({}))",
            1,
            "(a rollout is a coroutine: `await generate({",
        ),
        (
            "await generate(messages=[])",
            1,
            "(`generate` takes one payload, a dict: `await generate({",
        ),
        ("await generate('a', 'b')", 1, "(`generate` takes one payload, a dict: `await generate({"),
        (
            "return document",
            1,
            "rollout ask returned the document itself. Return what is added to it",
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
    gc.freeze()  # what other tests have left is none of this one's
    printed = command("run", "job.yaml", code=code)
    gc.collect()  # the coroutine, whose warning would else be another test's
    gc.unfreeze()
    last = printed.error if code else printed.out.splitlines()[-1]
    assert said in last
    assert code or "a return missing?" in last


async def names_model(document, generate):
    return await generate({"model": "m-2", "messages": [{"role": "user", "content": "a"}]})


COLD = ["--choice=[other]", "--engine=none", "--answer-attempts=2", "--invalid-answer=drop"]


@pytest.mark.parametrize(
    "arguments, warning",
    [
        ([*COLD, "--temperature=0"], "A document repeats a request at temperature 0."),
        ([*COLD, "--temperature=0", "--show-error=true"], ""),
        ([*COLD, "--temperature=0.7"], ""),
        (["--id-key=key"], "id_key: the first row has no column 'key'; its columns: text, n."),
        (["--types={m: int64}"], "types: the first row has no column 'm'; its columns: text, n."),
        (["--system-prompt=Of {text}"], "has {text}, but only prompts are filled."),
        ([f"--rollout={__name__}.names_model"], "A payload names the model 'm-2', which is not"),
        (["--types={n: int64}", "--system-prompt=Of {a}", "--id-key=n"], ""),
    ],
)
def test_what_has_no_effect_is_one_warning(command, server, here, log, arguments, warning):
    warn_once.cache_clear()
    Path("a.jsonl").write_text('{"text": "a", "n": 1}\n{"text": "b", "n": 2}\n')
    prompt = [] if "rollout" in arguments[0] else ["--prompt={text}"]
    job = ["--run-folder=x", "--input=a.jsonl", "--model=m", f"--endpoint={server.url}"]
    said = command("run", *job, *prompt, *arguments)
    # A task's log goes to the terminal.
    warnings = [line for line in [*log, *said.err.splitlines()] if "WARNING" in line]
    assert len(warnings) == bool(warning)
    assert all(warning in line for line in warnings)


STREAMS = {
    "errors closed": "2>&-",
    "all closed": "<&- >&- 2>&-",
    "output closed": ">&-",
    "nobody reads": ">&PIPE 2>&PIPE",
    "nobody reads errors": "2>&PIPE",
    "a full disk for errors": "2>/dev/full",
}


@pytest.mark.matrix("case", STREAMS)
def test_a_command_whose_streams_are_closed_or_not_read_does_its_work(here, server, case):
    write_input(here, ["a", "b"], ["c"])
    reader, pipe = os.pipe()
    os.close(reader)
    redirections = STREAMS[case].replace("PIPE", str(pipe))
    job = f"run --input input --tasks 2 --prompt {{text}} --model m --endpoint {server.url}"
    settings = {"input": "input", "prompt": "{text}", "model": "m", "endpoint": server.url}
    settings |= {"run_folder": "script"}
    (here / "job.py").write_text(f"import datatrove_ckpt\ndatatrove_ckpt.run(**{settings})")
    is_logged = "2>&-" not in redirections  # datatrove's import fails without standard error
    for words, code in (
        (f"-m datatrove_ckpt {job} --run-folder run", 0),
        ("-m datatrove_ckpt --version", 0),
        ("-m datatrove_ckpt status nothing", 2),
        ("-m datatrove_ckpt status --nonsense", 2),
        *[("job.py", 0)] * is_logged,
    ):
        printed = run(
            f"{sys.executable} {words} {redirections}",
            shell=True,
            executable="/bin/bash",  # sh has descriptors of one digit
            env={**os.environ, "PYTHONUNBUFFERED": ""},
            pass_fds=[pipe],
        )
        assert printed.returncode == code, words
        assert "Traceback" not in printed.stdout + printed.stderr
        assert "Exception ignored" not in printed.stdout + printed.stderr
    os.close(pipe)
    assert "3 written" in run([sys.executable, "-m", "datatrove_ckpt", "verify", "run"]).stdout


def test_output_that_cannot_be_written_is_an_error_that_names_it(here, server):
    write_input(here, ["a"])
    job = f"run --input input --prompt {{text}} --model m --endpoint {server.url} --run-folder run"
    ended = run(f"{sys.executable} -m datatrove_ckpt {job} >/dev/full", shell=True)
    assert ended.returncode == 1
    assert "error: Could not write to standard output: No space left" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_command_works_without_docstrings(here, server):
    """With ``python -OO``."""
    write_input(here, ["a"])
    job = [f"--endpoint={server.url}", "--input=input", "--prompt={text}", "--model=m"]
    command = ["-m", "datatrove_ckpt", "run"]
    usual, stripped = (
        run([sys.executable, *flags, *command, "--help"]).stdout for flags in ([], ["-OO"])
    )
    assert stripped == usual
    ended = run([sys.executable, "-OO", *command, *job, "--run-folder=run"])
    assert "1 of 1 document is in 1 file" in ended.stdout, ended.stderr


def test_a_reader_that_gives_no_document_is_named_with_its_place(
    tmp_path, server, log, monkeypatch
):
    monkeypatch.setattr("datatrove_ckpt.generation.progress.MINUTE_SECONDS", 0.3)
    warning = "no document has come: the reader stands, in tests/"

    def pages():
        yield Document(text="a", id="1")
        until(lambda: log.said(warning))
        yield Document(text="b", id="2")

    runner(tmp_path, server, ask).run(pages())
    assert len(log.said(warning)) == 1
    assert server.asked.total() == 2
