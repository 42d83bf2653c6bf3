"""Answers as values: ``generate(payload, json_schema=...)``, ``invalid_answer: keep``, and schemas
in files.
"""

import json
from collections import Counter
from pathlib import Path

import pytest

from datatrove_ckpt.errors import ConfigError, DocumentFailed
from datatrove_ckpt.rollouts import InvalidAnswer, JudgeRollout, PromptRollout
from datatrove_ckpt.run_folder.documents import OutputPath
from datatrove_ckpt.testing import FakeServer, outputs
from tests import golden
from tests.jobs import chat, documents, in_pieces, results, rows, run_job, runner
from tests.rank_folders import together
from tests.yaml_jobs import write_rows

SCHEMA = {"type": "object", "required": ["score"], "properties": {"score": {"type": "integer"}}}
ALONE = {"max_concurrent_documents": 1}


class ThirdTimeLucky:
    """For a server: the third answer to a payload is valid, except to text 1."""

    def __init__(self):
        self.answered = Counter()

    def __call__(self, payload, times):
        text = payload["messages"][-1]["content"]
        self.answered[text] += 1  # ``times`` also counts refused requests
        if self.answered[text] < 3 or text == "text 1":
            return ["no JSON", '{"score": "high"}'][self.answered[text] % 2]
        return f'<think>{{}}</think>```json\n{{"score": {len(text)}}}\n```'


async def scored(document, generate):
    try:
        value = await generate(chat(document.text), json_schema=SCHEMA)
    except InvalidAnswer as error:
        return {"score": None, "why": str(error)}
    return {"score": value["score"]}


def test_the_value_comes_back_or_an_error_that_the_rollout_may_catch(tmp_path):
    with FakeServer(ThirdTimeLucky()) as server:
        run_job(tmp_path, server, 2, scored, config=ALONE)
    (first,), (second,) = results(tmp_path)
    assert first == {"score": 6}
    assert second["score"] is None
    assert (
        "json_schema: none of 3 answers is valid. The last problem: $.score: 'high' is not"
        in second["why"]
    )
    assert [payload["response_format"]["json_schema"]["schema"] for payload in server.payloads] == [
        SCHEMA
    ] * 6
    assert together(tmp_path).done.bad["invalid"] == 5


def test_a_schema_of_a_request_is_no_setting_of_the_servers(tmp_path):
    """A server with other flags would be started for the next task."""
    with FakeServer(lambda payload, times: '{"score": 1}') as server:
        step = runner(tmp_path, server, scored)
        step.run(documents(1))
    assert results(tmp_path) == [[{"score": 1}]]
    assert step.config.answer_schema == ""


def test_killed_after_each_answer_no_attempt_is_paid_twice(tmp_path):
    with FakeServer(ThirdTimeLucky()) as server:
        run_job(tmp_path / "other", server, 2, scored, config=ALONE)
    with FakeServer(ThirdTimeLucky()) as server:
        refused = in_pieces(tmp_path, server, scored, config=ALONE)
        assert refused > 0
        assert len(server.payloads) - refused == 6
    assert outputs(tmp_path / "output") == outputs(tmp_path / "other/output")


@pytest.mark.parametrize("attempts", [1, 2])
def test_an_error_that_nobody_catches_is_the_documents(tmp_path, attempts):
    async def rollout(document, generate):
        return await generate(chat(document.text), json_schema=SCHEMA, attempts=attempts)

    with FakeServer(ThirdTimeLucky()) as server:
        with pytest.raises(
            DocumentFailed, match=f"none of {attempts} answers? is valid|InvalidAnswer"
        ):
            run_job(tmp_path, server, 1, rollout)
        assert len(server.payloads) == attempts


@pytest.mark.parametrize("settings", golden.sections("schemas_of_requests"))
def test_a_mistake_stops_the_run_before_a_request(tmp_path, server, settings):
    given = eval(settings)

    async def rollout(document, generate):
        return await generate(chat(document.text), **given)

    with pytest.raises(ConfigError) as refused:
        run_job(tmp_path, server, 1, rollout, on_document_error="dead_letter")
    golden.hold("schemas_of_requests", settings, str(refused.value).partition(", in ")[0])
    assert not server.payloads


def test_a_sample_shows_and_prices_each_attempt(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    write_rows("in.jsonl", [{"id": "a", "text": "text 0"}])
    rollout = "--rollout=tests.integration.test_values_of_answers.scored"
    with FakeServer(ThirdTimeLucky()) as server:
        flags = ["--input=in.jsonl", "--model=m", f"--endpoint={server.url}", "--run-folder=x"]
        said = command("run", *flags, rollout, "--sample", "1")
        assert len(server.payloads) == 3
        (line,) = [line for line in said.splitlines() if "  requests" in line]
        assert line.split()[1:3] == ["3", "3"]
        assert '"score":6' in said.replace(" ", "")
        command("run", *flags, rollout)
        assert len(server.payloads) == 3, "the run takes the sample's answers"


# invalid_answer: keep ----------------------------------------------------------------------------


@pytest.mark.parametrize("form", [{"json_schema": SCHEMA}, {"choice": ["yes"], "engine": "none"}])
def test_an_invalid_answer_is_kept_as_a_null_beside_its_text(tmp_path, form):
    rollout = PromptRollout("{text}", invalid_answer="keep", answer_attempts=3, **form)
    with FakeServer(ThirdTimeLucky()) as server:
        in_pieces(tmp_path, server, rollout, config=ALONE, answer="answer", quality=True)
    (_, second) = (row["metadata"] for row in rows(tmp_path))
    assert second["answer"] is None
    assert second["rollout_results"][0]["text"] == '{"score": "high"}'
    assert second["answer_faults"] == "invalid"
    assert together(tmp_path).done.written == 2


def test_a_judge_without_a_valid_score_gives_a_null(tmp_path):
    def says(payload, times):
        text = payload["messages"][0]["content"]
        if text.startswith("Rate"):
            return "9"
        return "no JSON" if text.endswith("1") else '{"score": 1}'

    settings = {"lowest": 0, "highest": 5, "threshold": 3, "judge": None, "invalid_answer": "keep"}
    judges = {
        "documents": JudgeRollout(judge_prompt="Rate {text}", **settings),
        "answers": JudgeRollout(
            "{text}", judge_prompt="Rate {answer}", json_schema=SCHEMA, **settings
        ),
    }
    for name, rollout in judges.items():
        with FakeServer(says) as server:
            run_job(tmp_path / name, server, 2, rollout, answer="answer")
    assert [row["metadata"]["answer"] for row in rows(tmp_path / "documents")] == [None, None]
    first, second = (row["metadata"] for row in rows(tmp_path / "answers"))
    assert (first["answer"], first["rollout_results"][0]["score"]) == ({"score": 1}, None)
    assert second["answer"] is None
    assert len(server.payloads) == 1 + 3 + 3, "an invalid answer is not judged"


@pytest.mark.parametrize("where", ["flags", "file", "python"])
@pytest.mark.parametrize("suffix", ["json", "yaml", "yml"])
def test_a_schema_is_read_from_a_file(tmp_path, monkeypatch, command, where, suffix):
    import datatrove_ckpt

    monkeypatch.chdir(tmp_path)
    Path(f"schema.{suffix}").write_text(
        json.dumps(SCHEMA)
        if suffix == "json"
        else "# of a rating\ntype: object\nrequired: [score]\nproperties: {score: {type: integer}}\n"
    )
    write_rows("in.jsonl", [{"id": str(n), "text": f"text {n}"} for n in range(2)])
    settings = {
        "run_folder": "x",
        "input": "in.jsonl",
        "prompt": "{text}",
        "model": "m",
        "json_schema": f"@schema.{suffix}",
        "invalid_answer": "keep",
    }
    with FakeServer(ThirdTimeLucky()) as server:
        settings["endpoint"] = server.url
        if where == "flags":
            command(
                "run", *(f"--{name.replace('_', '-')}={value}" for name, value in settings.items())
            )
        elif where == "file":
            Path("job.yaml").write_text(json.dumps(settings))
            command("run", "job.yaml")
        else:
            datatrove_ckpt.run(**settings)
    assert [row.metadata["answer"] for row in OutputPath("x/output")] == [{"score": 6}, None]


@pytest.mark.parametrize(
    "value, message",
    [
        ("schema.yaml", 's name. For its content, write "@schema.yaml"'),
        ("@schema.yaml", "schema.yaml cannot be read: "),
        ("@none.yaml", "none.yaml cannot be read: No such file"),
        ("@list.yml", "json_schema: "),
    ],
)
def test_a_schema_that_cannot_be_read_is_named(tmp_path, monkeypatch, command, value, message):
    monkeypatch.chdir(tmp_path)
    Path("schema.yaml").write_text("type: [object\n")
    Path("list.yml").write_text("- object\n")
    write_rows("in.jsonl", [{"id": "a", "text": "b"}])
    flags = ["--input=in.jsonl", "--prompt={text}", "--model=m", "--endpoint=http://127.0.0.1:1"]
    said = command("run", *flags, "--run-folder=x", f"--json-schema={value}", code=2)
    assert message in said.error
    assert "Traceback" not in said
