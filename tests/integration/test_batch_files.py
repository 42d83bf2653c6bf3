"""Batch files of OpenAI's form: each line is sent as it is written, and has one line in the output,
in order, whatever the server says to it and however often the run is killed.
"""

import json
import re
from pathlib import Path

import pytest

import datatrove_ckpt
from datatrove_ckpt.readers import jsonl
from tests import golden
from tests.jobs import rejects, rejects_documents, rows
from tests.typed_answers import embeddings

CHAT = "/v1/chat/completions"


def request(name, url=CHAT, method="POST", **body):
    if url == CHAT:
        body = {"messages": [{"role": "user", "content": f"ask {name}"}], **body}
    return {"custom_id": name, "method": method, "url": url, "body": body}


def write(*requests, path="requests.jsonl"):
    lines = [one if isinstance(one, str) else json.dumps(one) for one in requests]
    Path(path).write_text("".join(f"{line}\n" for line in lines))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def flags(server, *more):
    job = ["--input", "requests.jsonl", "--endpoint", server.url, "--run-folder", "runs/x"]
    return ["run", *job, *more]


@pytest.fixture
def run(server, command):
    """Runs a job of a model."""
    return lambda *more, code=0: command(*flags(server, "--model", "fake", *more), code=code)


def results(folder="runs/x"):
    return rows(Path(folder))


def test_each_body_is_sent_as_written_to_its_url_and_each_line_has_the_whole_answer(server, run):
    """Keys that nobody knows and null are sent, a body's own model stays, and nothing is added to
    it but a model where there is none.
    """
    ranks = {"id": "rank-7", "created": 5, "results": [{"index": 0, "relevance_score": 0.5}]}
    server.paths = {"/v1/embeddings": embeddings, "/v1/rerank": lambda payload: ranks}
    asked = [
        request("chat", temperature=0.25, unknown={"z": 1, "a": None}, stop=None, model="own"),
        request("text", "/v1/completions", prompt="go on", max_tokens=3),
        request("vector", "/v1/embeddings", input="a text"),
        request("ranks", "/v1/rerank", query="q", documents=["d"], model="reranker"),
    ]
    write(*asked)
    run()
    sent = {json.dumps(payload, sort_keys=True) for payload in server.payloads}
    bodies = [{"model": "fake", **one["body"]} for one in asked]
    assert sent == {json.dumps(body, sort_keys=True) for body in bodies}
    found = results()
    assert [line["custom_id"] for line in found] == ["chat", "text", "vector", "ranks"]
    for line in found:
        assert set(line) == {"id", "custom_id", "response", "error"}
        assert (line["error"], line["response"]["status_code"]) == (None, 200)
    chat, text, vector, ranked = (line["response"]["body"] for line in found)
    assert chat["choices"][0]["message"]["content"].startswith("answer ")
    assert chat["id"] == found[0]["response"]["request_id"] == "fake"
    assert text["choices"][0]["text"].startswith("answer ")
    assert vector == embeddings(asked[2]["body"])
    assert ranked == ranks


@pytest.mark.parametrize("line", golden.sections("other_batch_files"))
def test_a_batch_file_of_another_form_is_named_as_one(run, line):
    write(line)
    golden.hold("other_batch_files", line, run(code=2).error)


def test_azures_urls_are_openais(server, run):
    write(request("a", "/chat/completions", messages=[{"role": "user", "content": "q"}]))
    run()
    (line,) = results()
    assert line["response"]["status_code"] == 200


def test_two_files_may_not_have_a_line_of_one_custom_id(server, run):
    Path("requests.jsonl").mkdir()
    for name in ("a", "b"):
        write(request("one"), path=f"requests.jsonl/{name}.jsonl")
    said = run(code=2).err
    assert "b.jsonl`, line 1: an earlier line also has the custom_id 'one'" in said
    assert not server.asked


def test_a_rejected_request_is_a_line_with_its_error_and_the_run_goes_on(server, run):
    write(request("good"), request("bad"), request("last"))
    server._status = rejects(["ask bad"])
    server.error = "no such parameter"
    said = run()
    good, bad, last = results()
    assert (good["error"], last["error"]) == (None, None)
    message = "no such parameter with 400"
    assert bad["custom_id"] == "bad"
    assert bad["response"]["status_code"] == 400
    assert bad["response"]["body"] == {"error": {"message": message}}
    assert bad["error"]["code"] == "400"
    assert message in bad["error"]["message"]
    assert "'bad' has an error" in said
    assert "Lines with an error in the output: 1 of 3." in said


def test_a_run_whose_every_line_has_an_error_does_not_end_with_0(server, run):
    write(request("0"), request("1"))
    server._status = rejects_documents
    for _ in range(2):
        assert "All lines have an error" in run(code=1).error
    assert [line["error"]["code"] for line in results()] == ["400", "400"]


@pytest.mark.parametrize("bad", golden.sections("batch_files"))
def test_a_line_that_is_no_request_is_refused_before_anything_is_sent(server, command, run, bad):
    write(request("0"), bad, request("2"))
    said = run(code=2).error
    golden.hold("batch_files", bad, said)
    why = re.split("[,.] ", said.partition("line 2: ")[2])[0]
    assert why in command("doctor", *flags(server, "--model", "fake")[1:], code=1)
    assert server.payloads == []
    assert not Path("runs/x/checkpoints").exists()


def test_beyond_the_lines_that_are_checked_such_a_line_has_its_error(server, run, monkeypatch):
    """In files elsewhere, too."""
    refused = golden.sections("batch_files")
    refused.pop(json.dumps(request("0")))  # for what an earlier line says
    write(request("0"), *refused, request("2"))
    monkeypatch.setattr(jsonl, "_CHECKED_LINES", 0)
    run()
    first, *found, last = results()
    assert first["error"] is last["error"] is None
    for line, said in zip(found, refused.values(), strict=True):
        why = re.split("[,.] ", said.partition("line 2: ")[2])[0]
        assert why in line["error"]["message"]
        assert line["response"] is None
    assert len(server.payloads) == 2


def test_a_file_is_a_batch_file_whose_first_lines_are_blank_or_damaged(server, command):
    write("", '{"custom_id": "torn', '{"comment": "of a tool"}', request("0", model="fake"))
    assert "line 2: " in command(*flags(server), code=2).error
    write("", request("0", model="fake"), request("1"))
    command(*flags(server, "--limit=1"))
    assert [line["custom_id"] for line in results()] == ["0"]


def test_the_model_of_the_first_line_is_that_of_the_run_and_what_is_set_fills_what_is_missing(
    server, command
):
    write(request("0", model="fake", max_tokens=1), request("1"))
    command(*flags(server, "--max-tokens", "9"))
    sent = {one["messages"][0]["content"]: one for one in server.payloads}
    assert sent["ask 0"]["max_tokens"] == 1
    assert (sent["ask 1"]["model"], sent["ask 1"]["max_tokens"]) == ("fake", 9)
    said = command("show", "runs/x", "--id", "1")
    assert "answer " in said
    assert "2 of 2 documents" in command(*flags(server, "--max-tokens", "9"))


def test_python_and_yaml_take_it_and_an_input_without_requests_needs_a_prompt(server, command):
    write(request("0", model="fake"))
    job = {"input": "requests.jsonl", "endpoint": server.url}
    datatrove_ckpt.run(**job, run_folder="runs/python")
    Path("job.yaml").write_text(json.dumps({**job, "task": "batch", "run_folder": "runs/yaml"}))
    command("run", "job.yaml")
    Path("long.yaml").write_text(
        command("run", "job.yaml", "--print-config").out.replace("runs/yaml", "runs/long")
    )
    command("run", "long.yaml")
    assert results("runs/python") == results("runs/yaml") == results("runs/long")
    several = ["--rollouts-per-document", "2"]
    assert "must be 1 for a batch" in command("run", "job.yaml", *several, code=2).error
    Path("requests.jsonl").unlink()
    assert "no problem" in command("verify", "job.yaml", "--full")
    write({"id": "0", "text": "no request"})
    assert "prompt: is missing" in command(*flags(server), code=2).error


IN_FLIGHT = 16
