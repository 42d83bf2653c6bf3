"""What would end a run, or end it with less than all documents, is found by the doctor: one line
each, exit code 1.
"""

import asyncio
import json
import socket
from pathlib import Path

import pytest
from aiohttp import web

import datatrove_ckpt
from datatrove_ckpt.cli.short_form import make_executor
from datatrove_ckpt.run_folder import findings, input_checks
from datatrove_ckpt.testing import FakeServer
from tests.yaml_jobs import ENDPOINT, doctor_lines, job_yaml

JOB = job_yaml(
    f"{ENDPOINT}, default_generation_params: {{max_tokens: 100}}", data="documents", output="out"
)


@pytest.fixture
def found(here, command, server):
    """``datatrove-ckpt doctor job.yaml ...`` of a job that works; gives state and message by
    check.
    """
    Path("documents").mkdir()
    Path("documents/a.jsonl").write_text(json.dumps({"text": "Rain falls.", "id": "0"}) + "\n")
    Path("job.yaml").write_text(JOB.replace("URL", server.url))

    def run(*arguments):
        said = command("doctor", "job.yaml", "--all", *arguments, code=None)
        assert "Traceback" not in said
        checks = {name: line.partition(": ")[::2] for name, line in doctor_lines(said.out).items()}
        assert len(checks) == len(said.out.splitlines()) - 1
        assert said.code == any(state == "problem" for state, _ in checks.values())
        return checks

    return run


@pytest.mark.parametrize("is_cell", [False, True])
def test_it_can_be_called_from_a_program_or_a_cell_of_a_notebook(found, is_cell):
    _, executor = make_executor("job.yaml", [])

    async def cell():
        return datatrove_ckpt.doctor(executor)

    checks = asyncio.run(cell()) if is_cell else datatrove_ckpt.doctor(executor)
    assert {check.state for check in checks} <= {"ok", "note", "warning"}


# endpoint ----------------------------------------------------------------------------------------


def test_a_dead_endpoint(found):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        state, text = found(f"--pipeline.1.config.endpoint_url={url}")["server, endpoint"]
    assert state == "problem"
    assert text.startswith(f"{url}/v1/models: Connection refused")
    assert "Start the server, or correct its URL." in text


def test_an_endpoint_whose_host_has_no_address(found, monkeypatch):
    resolve = socket.getaddrinfo

    def without_dns(host, *arguments, **options):
        if host == "no-such-host.invalid":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve(host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", without_dns)
    url = "http://no-such-host.invalid:8000"
    state, text = found(f"--pipeline.1.config.endpoint_url={url}")["server, endpoint"]
    assert state == "problem"
    assert text.startswith(f"{url}/v1/models: no host of this name (DNS)")


def test_one_dead_endpoint_of_two_is_a_warning(server):
    from datatrove_ckpt import InferenceConfig
    from datatrove_ckpt.run_folder.findings import check_endpoints

    config = InferenceConfig("endpoint", "fake", endpoint_url=[server.url, "http://127.0.0.1:9"])
    assert [check.state for check in check_endpoints(config)] == ["ok", "warning"]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("answer", "state", "says"),
    [
        (web.json_response({"data": [{"id": "7"}]}), "problem", "does not list the model 'fake'; it lists"),
        (web.Response(status=401), "problem", "wants a key, and this run sends none: set api_key_env"),
        (web.json_response({"data": [{"id": "fake", "max_model_len": 1024}]}), "problem",
         "max_tokens is 1024, and max_model_len of "),
        (web.Response(status=404), "warning", "Some gateways have no such list"),
    ],
)  # fmt: skip
def test_what_an_endpoint_answers(found, monkeypatch, answer, state, says):
    async def models(self, request):
        return web.Response(
            body=answer.body, status=answer.status, content_type=answer.content_type
        )

    monkeypatch.setattr(FakeServer, "_models", models)
    with FakeServer() as other:
        check = found(
            f"--pipeline.1.config.endpoint_url={other.url}",
            "--pipeline.1.config.default_generation_params.max_tokens=1024",
        )["server, endpoint"]
    assert check[0] == state
    assert says in check[1]


# input -------------------------------------------------------------------------------------------


def write_input(**sizes):
    """Files of about so many bytes, instead of those that are there."""
    for path in Path("documents").iterdir():
        path.unlink()
    for name, size in sizes.items():
        row = json.dumps({"text": "x" * max(0, size - 30), "id": name}) + "\n" if size else ""
        Path(f"documents/{name}.jsonl").write_text(row)


def test_tasks_without_input(found):
    write_input(a=100, b=100, c=100, d=100)
    assert found("--executor.tasks=100")["input, shares"] == (
        "warning",
        "96 of 100 tasks have no input: 4 files for 100 tasks. Set tasks to 4, or split the input into at least 100 "
        "files.",
    )
    assert found("--executor.tasks=4")["input, shares"] == ("ok", "4 files for 4 tasks.")


def test_prompts_that_no_prefix_cache_can_help(found):
    texts = [f"{number} rains. " * 700 for number in range(60)] * 2
    rows = [json.dumps({"text": text, "id": str(row)}) for row, text in enumerate(texts)]
    Path("documents/a.jsonl").write_text("\n".join(rows))
    prompt = "--pipeline.1.rollout_fn.prompt={text} " + "Sum it up in one sentence. " * 30
    checks = found(prompt)
    assert "input, prompts" not in checks
    state, text = checks["input, end of prompts"]
    assert state == "warning"
    assert text.endswith("before the text that differs, they would save 10.6 % of each prompt.")
    assert checks["input, order"] == (
        "warning",
        "60 of the first 120 prompts share 7,697 characters with an earlier one, 60 rows before (averages), which a "
        "prefix cache may have lost by then. Sort the input, so that rows with the same text are neighbours.",
    )


# folders, files, an earlier run ------------------------------------------------------------------


def test_a_writer_of_the_users_own_is_tried(found):
    head = "from datatrove.pipeline.writers import JsonlWriter\n\nclass Own(JsonlWriter):\n"
    Path("own_writer.py").write_text(
        f"{head}    def _write(self, document, file, name):\n        raise OSError('no route')\n"
    )
    job = Path("job.yaml").read_text()
    Path("job.yaml").write_text(
        job.replace("class_path: JsonlWriter", "class_path: own_writer.Own")
    )
    state, text = found()["output, writer"]
    assert state == "problem"
    assert "OSError: no route. Correct it" in text
    assert not Path("out").exists()


def test_a_check_that_fails_is_a_problem_and_no_traceback(found, monkeypatch):
    def fails(*arguments):
        raise RuntimeError("of a kind\nthat nobody thought of")

    monkeypatch.setattr(findings, "check_checkpoints", fails)
    monkeypatch.setattr(input_checks, "as_read", fails)
    checks = found()
    message = "this could not be checked: RuntimeError: of a kind that nobody thought of."
    assert checks["checkpoints, reachable"] == ("problem", message)
    assert checks["input, readable"][0] == "problem"
