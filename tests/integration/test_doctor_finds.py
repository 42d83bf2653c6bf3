"""What would end a run, or end it with less than all documents, is found by the doctor: one line
each, exit code 1.
"""

import asyncio
import json
import os
import socket
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiohttp import web
from datatrove.io import DataFolder
from fsspec.implementations.memory import MemoryFileSystem

import datatrove_ckpt
from datatrove_ckpt.cli.short_form import make_executor
from datatrove_ckpt.run_folder import environment_checks, finding
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


def test_a_dead_endpoint(found, monkeypatch):
    resolve = socket.getaddrinfo

    def without_dns(host, *arguments, **options):
        if host == "no-such-host.invalid":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve(host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", without_dns)
    for url, says in (
        ("http://127.0.0.1:9", "/v1/models: Connection refused"),
        ("http://no-such-host.invalid:8000", "/v1/models: the host was not found (DNS)"),
    ):
        state, text = found(f"--pipeline.1.config.endpoint_url={url}")["server, endpoint"]
        assert state == "problem"
        assert text.startswith(f"{url}{says}")
        assert "Start the server, or correct its URL." in text


def test_one_dead_endpoint_of_two_is_a_warning(server):
    from datatrove_ckpt import InferenceConfig
    from datatrove_ckpt.run_folder.environment_checks import check_endpoints

    config = InferenceConfig("endpoint", "fake", endpoint_url=[server.url, "http://127.0.0.1:9"])
    assert [check.state for check in check_endpoints(config)] == ["ok", "warning"]


@pytest.mark.matrix(
    "answer, state, says",
    [
        (web.json_response({"data": [{"id": "fake", "max_model_len": 1024}]}), "problem",
         "max_tokens is 1024, and max_model_len of "),
        (web.Response(status=404), "warning", "unless it is a gateway without a list"),
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


def test_prompts_that_no_prefix_cache_can_help(found):
    texts = [f"{number} rains. " * 700 for number in range(60)] * 2
    rows = [json.dumps({"text": text, "id": str(row)}) for row, text in enumerate(texts)]
    Path("documents/a.jsonl").write_text("\n".join(rows))
    prompt = "--pipeline.1.rollout_fn.prompt={text} " + "Sum it up in one sentence. " * 30
    checks = found(prompt)
    assert "input, prompts" not in checks
    assert checks["input, end of prompts"][1].endswith("would save 10.6 % of each prompt.")
    state, text = checks["input, order"]
    assert state == "warning"
    assert text.startswith("60 of the first 120 prompts share 7,697 characters")


def test_a_document_may_hold_what_cannot_be_copied_as_rollouts_take_it_out(found):
    Path("own_reader.py").write_text(
        "import threading\n"
        "from datatrove_ckpt.readers import JsonlReader\n\n\n"
        "def adapter(self, row, path, place):\n"
        "    return {**row, 'metadata': {'handle': threading.Lock()}}\n\n\n"
        "class Own(JsonlReader):\n"
        "    def __init__(self, data_folder):\n"
        "        super().__init__(data_folder, adapter=adapter)\n"
    )
    job = Path("job.yaml").read_text()
    Path("job.yaml").write_text(
        job.replace("class_path: JsonlReader", "class_path: own_reader.Own")
    )
    assert [name for name, (state, _) in found().items() if state == "problem"] == []


# folders, files, an earlier run ------------------------------------------------------------------


def test_a_check_that_fails_is_a_problem_and_no_traceback(found, monkeypatch):
    def fails(*arguments):
        raise RuntimeError("of a kind\nthat nobody thought of")

    monkeypatch.setattr(environment_checks, "check_local", fails)
    monkeypatch.setattr(environment_checks, "list_files", fails)
    checks = found()
    message = "this could not be checked: RuntimeError: of a kind that nobody thought of."
    assert checks["checkpoints, reachable"] == ("problem", message)
    assert checks["input, readable"][0] == "problem"


@pytest.mark.parametrize(
    "override, check, expected, says",
    [
        ("output_writer.output_folder=memory://doctor/out", "output, reachable", "ok", ""),
        ("checkpoints_local_dir=null", "checkpoints, folder", "warning", "none: set"),
        ("checkpoints_remote_dir=mirror", "mirror, reachable", "ok", ""),
        ("checkpoints_remote_dir=/proc/mirror", "mirror, reachable", "problem", ""),
    ],
)  # fmt: skip
def test_what_would_fail_is_named_with_what_to_do_and_nothing_is_left(
    found, here, override, check, expected, says
):
    before = sorted(here.rglob("*"))
    state, text = found(f"--pipeline.1.{override}")[check]
    assert state == expected
    assert says in text
    assert sorted(here.rglob("*")) == before
    assert MemoryFileSystem().find("/doctor") == []


def test_a_folder_that_never_answers_is_a_problem(found, monkeypatch):
    never = threading.Event()
    monkeypatch.setattr(environment_checks, "file_system", lambda folder: never.wait())
    monkeypatch.setattr(finding, "REMOTE_SECONDS", 0.5)
    said = found()["checkpoints, reachable"][1]
    never.set()
    assert said.endswith("no answer within 0 s. Check the network, or the mount.")


def test_nothing_is_written_into_a_repository_where_each_write_is_a_commit(tmp_path):
    class Repository(DataFolder):
        def is_local(self):
            return False

        def resolve_paths(self, path):
            return "hf://datasets/me/answers"

    [said] = environment_checks.check_remote(Repository(str(tmp_path)))
    assert not any(tmp_path.iterdir())
    assert said.state == "warning"
    assert "Use hf://buckets/" in said.message


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


def test_a_disk_with_too_little_room_is_a_problem(tmp_path, monkeypatch):
    for size, state in ((1 << 27, "ok"), (1 << 25, "problem")):
        status = SimpleNamespace(f_bavail=size, f_frsize=1)
        monkeypatch.setattr(os, "statvfs", lambda path, status=status: status)
        assert environment_checks.check_room(tmp_path).state == state
