"""``steps``: several runs in one file, with queries between them."""

import json
import os
import re
import shutil
import sys
import time
from pathlib import Path

import duckdb
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

import datatrove_ckpt
from datatrove_ckpt.checkpoint.lock import Lock
from datatrove_ckpt.claims import claims
from datatrove_ckpt.cli.steps import read_steps
from datatrove_ckpt.common import LAUNCH
from datatrove_ckpt.errors import ConfigError, StorageFailed
from datatrove_ckpt.generation import prometheus
from datatrove_ckpt.inference.servers.server import free_port
from datatrove_ckpt.run_folder import queries
from datatrove_ckpt.run_folder.steps import STEPS as STEPS_FILE
from datatrove_ckpt.testing import FakeServer, outputs
from tests import golden, processes
from tests.engines import ENGINE
from tests.jobs import rejects
from tests.pages import ROOT
from tests.processes import is_alive, write_program
from tests.steps import STEPS, reply
from tests.yaml_jobs import write_rows

ROWS = [{"id": f"id {n:02d}", "text": f"text {n}", "topic": f"topic {n % 3}"} for n in range(12)]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_rows("docs.jsonl", ROWS)
    return tmp_path


@pytest.fixture
def server():
    with FakeServer(reply) as running:
        yield running


@pytest.fixture
def finished(server, command):
    write(server)
    command("run", "job.yaml")
    server.asked.clear()
    return server


def job(server, steps=STEPS, **settings):
    defaults = {"run_folder": "qa", "model": "fake", "endpoint": server.url, "sync_seconds": 0.05}
    return {**defaults, **settings, "steps": steps}


def write(server, steps=STEPS, **settings):
    Path("job.yaml").write_text(yaml.safe_dump(job(server, steps, **settings), sort_keys=False))


def changed(name, steps=STEPS, **settings):
    """The steps with another setting of one."""
    return {**steps, name: {**steps[name], **settings}}


def table(name, folder="qa"):
    files = sorted(Path(folder, name, "output").glob("*.parquet"))
    return [row for file in files for row in pq.read_table(file).to_pylist()]


def test_each_step_is_a_run_and_a_query_reads_those_before(server, command):
    write(server)
    command("run", "job.yaml")
    assert len(table("answers")) == len(table("judged")) == 12
    assert [row["id"] for row in table("best")] == [
        row["id"] for n, row in enumerate(ROWS) if n % 4
    ]
    assert [row["id"] for row in table("rejected")] == ["id 00", "id 04", "id 08"]
    topics = {row["id"]: row["text"] for row in table("topics")}
    assert topics["topic 0"] == " ".join(f"answer to Answer: text {n}" for n in (3, 6, 9))
    assert {*table("best")[0]} == {"id", "topic", "answer"}
    assert "3 of 3 documents" in command("run", "job.yaml")
    assert set(server.asked.values()) == {1}
    assert "no problem" in command("verify", "qa/judged", "--full")


def test_python_has_the_same_steps_and_returns_the_outputs(server):
    async def rollout(document, generate):
        await generate({"messages": [{"role": "user", "content": f"Judge: {document.text}"}]})
        return document.id

    steps = changed("judged", rollout=rollout)
    del steps["judged"]["prompt"]
    outputs = datatrove_ckpt.run(**job(server, steps))
    assert [*outputs] == ["answers", "judged", "best", "topics", "rejected"]
    assert [document.id for document in outputs["answers"]] == [row["id"] for row in ROWS]
    assert len(server.payloads) == 24


@pytest.mark.parametrize("settings", golden.sections("steps"))
def test_mistakes_in_the_form_are_found_before_any_request(server, command, settings):
    write(server, **{"steps": STEPS} | json.loads(settings))
    golden.hold("steps", settings, command("run", "job.yaml", code=2).error)
    assert not server.payloads


def test_an_error_names_the_step_that_stopped_and_a_query_says_where_its_rows_are(
    server, command, log
):
    few = {"sql": "select * from 'docs.jsonl' limit 2"}
    write(server, {"few": few, "first": {"input": "few", "prompt": "{txet}"}})
    said = command("run", "job.yaml", code=1)
    assert log.said("job.yaml: steps.few: 2 rows in qa/few/output")
    assert "no column 'txet'" in said.error
    assert said.error.rstrip().endswith("The step that stopped: job.yaml: steps.first.")


def test_the_example_runs(command):
    shutil.copytree(ROOT / "configs", "configs")
    command("run", "configs/steps.yaml")
    questions = len(Path("configs/quickstart_documents.jsonl").read_text().splitlines())
    assert len(table("judged", "steps")) == questions
    best, rejected = (table(name, "steps") for name in ("best", "rejected"))
    assert len(best) + len(rejected) == questions
    assert {"id", "question", "answer"} <= {*[*best, *rejected][0]}


def test_other_commands_name_the_folders_of_steps(finished, command):
    assert "no place for the queries" in command("k8s", "job.yaml", code=2).error
    assert "tune takes one run" in command("tune", "job.yaml", code=2).error
    for what in ("qa", "job.yaml"):
        named = "give the folder of a step: qa/answers, qa/judged, "
        for name in ("repair", "report"):
            assert named in command(name, what, code=2).error
        assert named in command("export", what, "x.csv", "--step", "none", code=2).error
    assert "it has none" in command("show", "qa/answers", "--step", "answers", code=2).error


@pytest.mark.parametrize(
    "given, name", [({}, "qa"), ({"monitoring": {"run_name": "mine"}}, "mine")]
)
def test_steps_are_labels_of_metrics(server, command, monkeypatch, given, name):
    names = []
    shown = prometheus.RankSnapshot

    def snapshot(run, *rest):
        names.append(run)
        return shown(run, *rest)

    monkeypatch.setattr(prometheus, "RankSnapshot", snapshot)
    monitoring = {"metrics_port": free_port(), **given.get("monitoring", {})}
    write(server, monitoring=monitoring)
    command("run", "job.yaml")
    assert {*names} == {f"{name}/answers", f"{name}/judged", f"{name}/topics"}


@pytest.mark.parametrize("flag", ["--dry-run", "--print-config"])
def test_the_long_form_of_each_step_is_printed(server, command, flag):
    write(server)
    printed = command("run", "job.yaml", flag)
    assert re.findall("^--- # (.*)$", printed, re.M) == [
        "answers",
        "judged",
        "best: a query",
        "topics",
        "rejected: a query",
    ]
    runs = [config for config in yaml.safe_load_all(printed) if config is not None]
    inputs = [run["executor"]["init_args"]["pipeline"][0]["init_args"] for run in runs]
    assert [given["data_folder"] for given in inputs] == [".", "qa/judged/input", "qa/topics/input"]
    assert not Path("qa").exists()
    command("run", "job.yaml")
    sent = len(server.payloads)
    for number, run in enumerate(runs):
        Path(f"step{number}.yaml").write_text(yaml.safe_dump(run))
        command("run", f"step{number}.yaml")
    assert len(server.payloads) == sent


def test_flags_of_single_runs_hold_for_each_step(server, command):
    write(server)
    assert "--cancel: is for Hugging Face Jobs" in command("run", "job.yaml", "--cancel", code=2)
    assert not server.payloads
    command("run", "job.yaml", "--no-wait")
    assert len(server.payloads) == 27


def test_a_setting_of_a_step_may_be_a_flag(server, command):
    write(server)
    command("run", "job.yaml", "--steps.judged.max-tokens=3", "--max-tokens", "7")
    assert [payload["max_tokens"] for payload in server.payloads] == [7] * 12 + [3] * 12 + [7] * 3


def test_a_query_does_not_replace_a_run_of_its_name_but_a_run_replaces_a_query(finished, command):
    write(finished, {**STEPS, "judged": {"sql": "select *, 'good' as rating from answers"}})
    error = command("run", "job.yaml", code=2).error
    assert "qa/judged/output holds other files, such as 0" in error
    assert len(table("judged")) == 12
    write(finished, changed("rejected", sql=None, input="docs.jsonl", prompt="More: {text}"))
    Path("job.yaml").write_text(Path("job.yaml").read_text().replace("    sql: null\n", ""))
    command("run", "job.yaml")
    assert len(table("rejected")) == 12
    assert "answer" in table("rejected")[0]
    Path("qa/best/output/mine.txt").touch()
    write(finished, changed("best", sql="select id, topic, answer from judged"))
    assert "holds other files, such as mine.txt" in command("run", "job.yaml", code=2).error
    assert Path("qa/best/output/mine.txt").exists()


def refused(server, command, *said):
    """Runs the job, which must be refused without a request."""
    before = len(server.payloads)
    error = command("run", "job.yaml", code=None)
    assert error.code in (1, 2), error
    assert len(server.payloads) == before
    for text in said:
        assert text in error.error
    return error


@pytest.mark.parametrize(
    "change, step, reason",
    [
        ("row", "answers", "docs.jsonl"),
        ("row added", "answers", "docs.jsonl"),
        ({"answers": {"prompt": "Other: {text}"}}, "answers", "prompt"),
        ({"judged": {"prompt": "Judge: {text}"}}, "judged", "prompt"),
        (
            {"judged": {"input": {"sql": "from answers limit 3"}}},
            "judged",
            "query, or a file that it reads, has changed",
        ),
        ({"judged": {"max_tokens": 3}}, "judged", "max_tokens"),
        (
            {
                "topics": {
                    "input": {"sql": "select topic as id, max(id) as text from best group by 1"}
                }
            },
            "topics",
            "query, or a file that it reads, has changed",
        ),
        ({"topics": {"prompt": "{text}"}}, "topics", "prompt"),
    ],
)
def test_a_change_before_finished_steps_is_refused_without_a_request(
    finished, command, change, step, reason
):
    if isinstance(change, str):
        rows = [*ROWS, {"id": "new", "text": "new 9", "topic": "topic 1"}]
        if change == "row":
            rows = [{**row, "text": row["text"].replace("text 6", "text 7")} for row in ROWS]
        write_rows("docs.jsonl", rows)
    else:
        ((name, settings),) = change.items()
        write(finished, changed(name, **settings))
    error = refused(finished, command, reason, f"first changed step: job.yaml: steps.{step}")
    assert f"--redo {step}" in error


def test_a_change_of_a_later_step_is_refused_before_the_requests_of_a_new_one(finished, command):
    more = {"input": "answers", "prompt": "More: {answer}", "answer": "more"}
    write(finished, {"answers": STEPS["answers"], "more": more, **changed("judged", max_tokens=3)})
    refused(finished, command, "first changed step: job.yaml: steps.judged", "max_tokens")


def test_a_worker_is_refused_for_a_change_with_exit_code_2(finished, command):
    """A scheduler that starts it again would not help."""
    write(finished, changed("judged", input={"sql": "from answers limit 3"}))
    before = len(finished.payloads)
    command("run", "job.yaml", "--worker", code=2)
    assert len(finished.payloads) == before


def test_a_lost_input_of_a_finished_step_is_compared_once_it_is_made_anew(finished, command):
    """By workers, too, whose own checks skip what is finished."""
    shutil.rmtree("qa/answers")
    shutil.rmtree("qa/judged/input")
    write_rows("docs.jsonl", [{**row, "text": f"{row['text']}0"} for row in ROWS])
    error = command("run", "job.yaml", "--worker", code=2).error
    assert "is not what task 0 read" in error
    assert "first changed step: job.yaml: steps.judged" in error


def test_a_changed_query_is_computed_anew_and_refuses_what_began_with_other_rows(finished, command):
    steps = changed("topics", input={"sql": "select topic as id, 'x' as text from best group by 1"})
    write(finished, changed("best", steps, sql=f"{STEPS['best']['sql']} and id <> 'id 01'"))
    refused(finished, command, "topics")
    write(finished, changed("best", sql=f"{STEPS['best']['sql']} and id <> 'id 01'"))
    command("run", "job.yaml")
    assert "id 01" not in [row["id"] for row in table("best")]
    assert "id 01" in [row["id"] for row in table("rejected")]
    assert not finished.asked


def test_a_blank_in_a_query_makes_nothing_stale(finished, command):
    topics = {"sql": STEPS["topics"]["input"]["sql"].replace("from", "  from")}
    write(finished, changed("topics", input=topics))
    command("run", "job.yaml")
    assert not finished.asked


def test_a_row_in_the_middle_of_a_step_is_seen(server, command):
    """Which the sample of a file's ends would miss."""
    rows = [{"id": f"{n:06d}", "text": f"{n % 7919}" * 9} for n in range(30_000)]
    write_rows("docs.jsonl", rows)
    steps = {
        "rows": {"sql": "select * from read_json('docs.jsonl') order by id"},
        "some": {"input": {"sql": "from rows"}, "prompt": "Answer: {text}", "until": 10},
    }
    write(server, steps)
    command("run", "job.yaml")
    before = len(server.payloads)
    rows[15_000]["text"] = "other" * 9
    write_rows("docs.jsonl", rows)
    refused(server, command, "the rows of step rows have changed")
    assert len(server.payloads) == before


def everything(folder="qa"):
    names = [*STEPS]
    return {name: table(name, folder) for name in names}


def test_redo_asks_only_for_rows_that_changed(finished, command):
    rows = [*ROWS, {"id": "id 90", "text": "text 90", "topic": "topic 1"}]
    write_rows("docs.jsonl", rows)
    command("run", "job.yaml", "--redo", "answers")
    assert sorted(finished.asked) == [
        "Answer: text 90",
        "Judge: answer to Answer: text 90",
        next(asked for asked in finished.asked if asked.startswith("Sum up") and "90" in asked),
    ]
    redone = everything()
    Path("qa").rename("old")
    command("run", "job.yaml")
    assert everything() == redone
    assert Path("old/answers.1/output").is_dir()


def test_a_redo_that_is_cut_and_given_again_keeps_what_it_has_paid(finished, command):
    write(finished, changed("answers", prompt="Reply: {text}"), max_concurrent_generations=1)
    cut = "--steps.answers.max-total-tokens=40"
    said = command("run", "job.yaml", "--redo", "answers", cut, code=4)
    flag = cut.replace("=40", " 80")
    assert f"The whole command: datatrove-ckpt run job.yaml {flag}\n" in said.err
    paid = finished.asked.total()
    assert 1 < paid < 12
    command("run", "job.yaml", "--redo", "answers")
    assert set(finished.asked.values()) == {1}


ASK_TWICE = """
async def rollout(document, generate):
    for text in ("First", "Then"):
        await generate({"messages": [{"role": "user", "content": f"{text}: {document.text}"}]})
    return "good"
"""


def test_a_redo_that_is_given_again_keeps_the_answers_of_half_a_document(server, command):
    """In the step, and in one that depends on it; unless another step is named."""
    Path("ask.py").write_text(ASK_TWICE)
    steps = {
        "texts": {"sql": "select id, text from read_json('docs.jsonl') limit 1"},
        "answers": {"input": "texts", "rollout": "ask.rollout"},
        "judged": {"input": "answers", "rollout": "ask.rollout", "answer": "rating"},
    }
    write(server, steps)
    command("run", "job.yaml")
    write_rows("docs.jsonl", [{**ROWS[0], "text": "other"}])
    server.asked.clear()
    for number in (1, 2):  # of the step itself, and of the one that depends on it
        server._status = rejects(["Then: other"], 401) if number == 1 else lambda *call: None
        command("run", "job.yaml", "--redo", "texts", code=int(number == 1))
        assert not Path("qa/answers.2").exists()
    assert server.asked == {"First: other": 2, "Then: other": 3}
    assert not Path("qa/redo.json").exists()
    command("run", "job.yaml", "--redo", "texts")  # a redo of its own
    assert Path("qa/answers.2").exists()


def test_a_redo_that_cannot_continue_is_given_anew(finished, command):
    finished._status = rejects(["Judge: answer to Answer: text 90"], 401)
    rows = [*ROWS, {"id": "id 90", "text": "text 90", "topic": "topic 1"}]
    write_rows("docs.jsonl", rows)
    command("run", "job.yaml", "--redo", "answers", code=1)
    finished._status = lambda *call: None
    write_rows("docs.jsonl", [{**rows[0], "text": "text 7"}, *rows[1:]])
    for _ in range(2):
        refused(finished, command, "docs.jsonl", "--redo answers, for this step")
    command("run", "job.yaml", "--redo", "answers")
    assert Path("qa/answers.2").exists()
    assert len(table("answers")) == len(table("judged")) == 13


def test_a_redo_of_a_step_that_has_no_row_yet_begins_it(server, command):
    server._status = lambda payload, *call: 401 if "Judge" in str(payload) else None
    write(server)
    command("run", "job.yaml", code=1)
    server._status = lambda *call: None
    command("run", "job.yaml", "--redo", "judged")
    assert Path("qa/judged.1").exists()
    assert len(table("judged")) == 12


def test_a_step_that_is_named_while_another_redo_is_under_way_is_redone_at_once(finished, command):
    """Alone: what began anew before it goes on."""
    finished._status = rejects(["Judge: answer to Answer: text 90"], 401)
    rows = [*ROWS, {"id": "id 90", "text": "text 90", "topic": "topic 1"}]
    write_rows("docs.jsonl", rows)
    command("run", "job.yaml", "--redo", "answers", code=1)
    finished._status = lambda *call: None
    write(finished, changed("judged", prompt="Rate: {answer}"))
    command("run", "job.yaml", "--redo", "answers", "--redo", "judged")
    assert Path("qa/judged.2").exists()
    assert not Path("qa/answers.2").exists()
    assert finished.asked["Rate: answer to Answer: text 90"] == 1


@pytest.mark.parametrize("record", ["", "3", '["answers"]', "{}", '{"named": [], "moves": 3}'])
def test_a_damaged_record_of_a_redo_is_one_message(finished, command, record):
    Path("qa/redo.json").write_text(record)
    for redo in ([], ["--redo", "answers"]):
        error = command("run", "job.yaml", *redo, code=1).error
        assert error.startswith("error: qa/redo.json is damaged")
        assert "Remove it, and run again" in error
    Path("qa/redo.json").unlink()
    command("run", "job.yaml")
    assert not finished.asked


def test_the_printed_long_form_of_a_redone_step_takes_the_old_answers(finished, command):
    write_rows("docs.jsonl", [*ROWS, {"id": "id 90", "text": "text 90", "topic": "topic 1"}])
    finished._status = rejects(["Answer: text 90"], 401)
    command("run", "job.yaml", "--redo", "answers", code=1)
    (first, *_) = yaml.safe_load_all(command("run", "job.yaml", "--print-config"))
    taken = first["executor"]["init_args"]["pipeline"][1]["init_args"]["finished_from"]
    assert taken == ["qa/answers.1/output", "qa/answers.1/checkpoints"]


def test_the_newest_answers_of_more_than_nine_redos_come_first(finished, command):
    for number in range(1, 11):
        shutil.copytree("qa/answers", f"qa/answers.{number}")
    printed = read_steps(job(finished), "x")[0].executor()[1].pipeline[1].finished_from
    assert [Path(path).parent.suffix for path in printed[::2]] == [
        f".{n}" for n in range(10, 0, -1)
    ]


def test_redo_of_another_prompt_pays_that_step_again_and_says_so(finished, command):
    write(finished, changed("judged", prompt="Judge:  {answer}"))
    said = command("run", "job.yaml", "--redo", "judged")
    assert said.count("judged.1: its answers are not taken over") == 1
    assert "prompt" in said
    assert [asked.split(":")[0] for asked in finished.asked] == ["Judge"] * 12


@pytest.mark.parametrize("text", [True, False])
def test_redo_takes_exploded_rows_and_rows_without_a_text(server, command, text):
    schema = {"type": "array", "items": {"type": "object", "properties": {"q": {"type": "string"}}}}
    rows = [{"id": row["id"], "text" if text else "body": row["text"]} for row in ROWS]
    write_rows("docs.jsonl", rows)
    steps = {
        "items": {
            "input": {"sql": "select * from read_json('docs.jsonl')"},
            "prompt": "Items: {text}" if text else "Items: {body}",
            "explode": True,
            "json_schema": schema,
        },
        "asked": {"input": "items", "prompt": "{q}"},
    }
    server._answer = lambda payload, times: json.dumps(
        [{"q": f"{payload['messages'][-1]['content']} {n}"} for n in range(2)]
    )
    write(server, steps)
    command("run", "job.yaml")
    assert len(table("items")) == len(table("asked")) == 24
    server.asked.clear()
    write_rows("docs.jsonl", [*rows, {**rows[0], "id": "new", ("text" if text else "body"): "new"}])
    command("run", "job.yaml", "--redo", "items")
    assert sorted(server.asked) == ["Items: new", "Items: new 0", "Items: new 1"]
    redone = table("items"), table("asked")
    Path("qa").rename("old")
    command("run", "job.yaml")
    assert (table("items"), table("asked")) == redone


@pytest.mark.parametrize("files, flags", [(1, []), (3, []), (1, ["--worker"])])
@pytest.mark.parametrize("other, starts", [({}, 1), ({"server_stop_timeout_sec": 4.0}, 2)])
def test_steps_with_equal_servers_share_them(command, files, flags, other, starts):
    Path("engine.py").write_text(ENGINE)
    for n in range(files):
        write_rows(f"docs{n}.jsonl", ROWS[n::files])
    engine = {
        "server_type": "custom",
        "model_kwargs": {"server_script": "engine.py"},
        "max_concurrent_generations": 2,
    }
    steps = {
        "answers": {"input": "docs?.jsonl", "prompt": "{text}", "tasks": files},
        "judged": {"input": "answers", "prompt": "{answer}", "answer": "r", **other},
    }
    job = {"run_folder": "qa", "model": "m", **engine, "steps": steps}
    Path("job.yaml").write_text(yaml.safe_dump(job))
    command("run", "job.yaml", *flags)
    assert len(table("judged")) == 12
    started = [int(line.split()[0]) for line in Path("engines").read_text().splitlines()]
    assert len(started) == starts
    assert not any(map(is_alive, started))


def test_dead_letters_keep_the_next_step_waiting_until_they_are_retried_or_left(command):
    bad = ["Judge: answer to Answer: text 3"]
    with FakeServer(reply, rejects(bad)) as server:
        write(server, skip_bad_requests=True)
        said = command("run", "job.yaml", code=1)
        assert "steps.judged: 1 dead letter is left. Retry them" in said.error
        assert not Path("qa/topics").exists()
        assert not Path("qa/best").exists()
        command("run", "job.yaml", code=1)
        bad.clear()
        command("run", "job.yaml", "--retry-dead-letters")
        assert len(table("judged")) == 12
        asked = server.asked
        assert asked.pop("Judge: answer to Answer: text 3") == 2
        assert asked.total() == 12 + 11 + 3 + 1  # with a probe


def test_rows_that_a_retry_brings_later_make_later_steps_stale(command):
    bad = ["Judge: answer to Answer: text 3"]
    with FakeServer(reply, rejects(bad)) as server:
        write(server, changed("judged", dead_letters="leave"), skip_bad_requests=True)
        command("run", "job.yaml")
        assert len(table("judged")) == 11
        assert len(table("topics")) == 3
        bad.clear()
        before = len(server.payloads)
        said = command("run", "job.yaml", "--retry-dead-letters", code=1)
        assert "the rows of step judged have changed" in said.error
        assert "--redo topics" in said.error
        said = command("export", "qa", "x.csv", "--step", "topics")
        assert "qa/topics is stale: the rows of step judged have changed" in said.err
        said = command("show", "qa", "--sql", "select count(*) from topics")
        assert "qa/topics is stale: the rows of step judged have changed" in said.err
        assert len(server.payloads) == before + 1
        command("run", "job.yaml", "--redo", "topics")
        assert len(server.payloads) == before + 2  # topic 0 has another row
        assert len(table("best")) == 9


@pytest.mark.parametrize("json_schema", [None, {"properties": {"score": {"type": "integer"}}}])
def test_a_step_that_no_row_reaches_is_finished_and_has_its_columns(server, command, json_schema):
    steps = {
        "none": {"sql": "select * from read_json('docs.jsonl') where id = 'x'"},
        "answers": {"input": "none", "prompt": "{text}", "json_schema": json_schema},
        "again": {"input": "answers", "prompt": "{answer}", "answer": "more"},
        "all": {"sql": f"select id, answer{'.score' if json_schema else ''} as s, more from again"},
    }
    write(server, steps)
    for _ in range(2):
        command("run", "job.yaml")
    assert not server.payloads
    assert pq.read_schema("qa/all/output/rows_00000.parquet").names == ["id", "s", "more"]
    write(server, changed("none", steps, sql="select * from read_json('docs.jsonl') limit 2"))
    server._answer = lambda payload, times: '{"score": 3}'
    command("run", "job.yaml")
    assert [row["s"] for row in table("all")] == [3 if json_schema else '{"score": 3}'] * 2


def test_a_step_that_writes_no_row_has_its_columns(server, command):
    server._answer = lambda payload, times: "no JSON"
    steps = {
        "answers": {
            "input": "docs.jsonl",
            "prompt": "{text}",
            "json_schema": {"properties": {"score": {"type": "integer"}}},
            "invalid_answer": "drop",
        },
        "best": {"sql": "select id, topic, answer.score from answers"},
    }
    write(server, steps)
    command("run", "job.yaml")
    assert pq.read_schema("qa/best/output/rows_00000.parquet").names == ["id", "topic", "score"]


def test_files_without_a_document_are_an_error_as_everywhere(server, command):
    Path("docs.jsonl").write_text("")
    write(server)
    said = command("run", "job.yaml", code=1)
    assert "No row of the input is a document" in said.error
    assert not Path("qa/judged").exists()


def test_status_show_verify_and_export_know_steps(finished, command):
    for what in ("qa", "job.yaml"):
        said = command("status", what)
        assert "5 steps" in said
        assert "answers   finished; 12 done: 12 written in 1 chunk, 0 dropped, 0 dead" in said
        assert "best      finished; 9 rows" in said
        assert "All steps: 27 requests" in said
    found = command.json("status", "qa")
    assert found["steps"]["best"] == {"is_finished": True, "rows": 9}
    assert found["steps"]["answers"]["delivered"]["written"] == 12
    assert "5 steps verified" in command("verify", "qa", "--full")
    assert "1. id 01" in command("show", "qa/best")
    assert "1. id 00" in command("show", "qa")  # rejected
    assert "answer: good" in command("show", "job.yaml", "--step", "judged", "--id", "id 01")
    said = command("show", "qa", "--sql", "select count(*) as n from answers join best using (id)")
    assert "9" in said
    assert command("export", "qa", "last.csv") == "3 documents in last.csv.\n"
    assert command("export", "qa", "best.csv", "--step", "best") == "9 documents in best.csv.\n"
    assert len(Path("best.csv").read_text().splitlines()) == 10
    assert command("export", "qa/judged", "all.parquet") == "12 documents in all.parquet.\n"


def test_status_names_what_waits_and_what_is_stale(server, command):
    write(server, max_concurrent_generations=1)
    assert "no step has started" in command("status", "job.yaml")
    server._status = rejects(["Judge: answer to Answer: text 3"], 401)
    command("run", "job.yaml", code=1)
    said = command("status", "qa")
    assert re.search("judged .* 3 done: 0 written in 0 chunks, .* 3 in 1 unfinished chunk", said)
    assert "All steps: 15 requests" in said
    assert "topics    waiting" in said
    for name in ("show", "export"):
        refused = command(name, "qa", *["x.csv"][: name == "export"], code=2).error
        assert "qa/rejected: this step has not begun. Another: --step." in refused
    server._status = lambda payload, times: None
    command("run", "job.yaml")
    write(server, changed("best", sql=f"{STEPS['best']['sql']} and id <> 'id 01'"))
    command("run", "job.yaml")
    assert "stale" not in command("status", "qa")
    damaged = Path("qa/best/output/rows_00000.parquet")
    data = bytearray(damaged.read_bytes())
    data[10] ^= 1
    damaged.write_bytes(data)
    assert "best: qa/best/output is damaged" in command("verify", "qa", code=1)
    found = json.loads(command("verify", "qa", "--json", code=1).out)["steps"]
    assert found["judged"]["totals"]["written"] == 12
    assert [step["exit_code"] for step in found.values()] == [0, 0, 1, 0, 0]


@pytest.mark.parametrize(
    "file, size",
    [
        ("best/output/.made_from.json", -9),
        ("best/output/.made_from.json", 0),
        ("topics/input/rows_00000.parquet", -9),
    ],
)
def test_rows_that_are_damaged_are_one_message(finished, command, file, size):
    path = Path("qa", file)
    path.write_bytes(path.read_bytes()[:size] or b"[]")
    for words in (["status", "qa"], ["verify", "qa"], ["run", "job.yaml"]):
        error = command(*words, code=None).error
        assert f"error: {path.parent} is damaged. Remove it, and run again" in error
    shutil.rmtree(path.parent)
    assert "is not" not in command("status", "qa")
    command("run", "job.yaml")
    assert not finished.asked


def test_an_emptied_list_of_steps_is_written_anew_by_a_run(finished, command):
    Path("qa", STEPS_FILE).write_bytes(b"")
    assert "error: " in command("status", "qa", code=2).error
    command("run", "job.yaml")
    assert "5 steps" in command("status", "qa")
    assert not finished.asked


def test_columns_of_equal_names_get_names_of_their_own(finished, command):
    steps = {
        **STEPS,
        "both": {"sql": "select * from answers a join judged j on a.id = j.id order by a.id desc"},
        "more": {"input": "both", "prompt": "More: {answer}"},
    }
    write(finished, steps)
    command("run", "job.yaml")
    assert [row["id"] for row in table("both")] == [row["id"] for row in reversed(ROWS)]
    assert {"text", "text_1"} <= {*table("more")[0]}


@pytest.mark.parametrize("key", ["rollout_results", "it's"])
def test_a_query_may_select_all_columns_of_a_run(finished, command, key):
    answer = "answer_2"
    more = {"input": {"sql": "select * from judged order by id"}, "prompt": "More: {answer}"}
    steps = {**STEPS, "more": {**more, "metadata_key": key}}
    write(finished, steps)
    assert "no problem" in command("doctor", "job.yaml")
    command("run", "job.yaml")
    for judged, better in zip(table("judged"), table("more"), strict=True):
        (kept,) = better.pop(key)
        assert kept["text"] == better.pop(answer) != judged["answer"]
        expected = {**judged, "file_path": better["file_path"]}
        if key == "rollout_results":
            del expected[key]
        assert better == expected


def test_a_row_without_an_id_is_shown_without_one(finished, command):
    write(finished, {**STEPS, "total": {"sql": "select count(*) as n from judged"}})
    command("run", "job.yaml")
    said = command("show", "qa")
    assert "1.  (rows_00000.parquet)\n" in said
    assert 'answer: {"n":12}' in said


def test_no_row_stands_out(server, command):
    write(server, changed("best", sql=f"{STEPS['best']['sql']} and id = 'x'"))
    command("run", "job.yaml")
    assert "best      finished; NO ROW" in command("status", "qa")


SCORE = {"type": "object", "properties": {"score": {"type": "integer"}}}
WRONG = [
    ("best", {"sql": "select id, topik from judged"}, "topik"),
    ("best", {"sql": "select rating.skore from judged"}, "skore"),
    ("best", {"sql": "select topic, count(*) from judged"}, "GROUP BY"),
    ("best", {"sql": "selekt"}, "syntax error"),
    ("rejected", {"sql": "select * from judged anti join best using (ids)"}, "ids"),
    ("topics", {"input": {"sql": "select verdict as text from judged"}}, "verdict"),
]


def test_doctor_finds_a_mistake_in_each_query_before_any_request(server, command):
    steps = changed("judged", json_schema=SCORE)
    steps = {
        **steps,
        "best": {"sql": "select id, topic, answer from judged where rating.score > 3"},
    }
    steps["topics"] = {**steps["topics"], "input": "best", "prompt": "{answer}"}
    write(server, steps)
    assert "no problem" in command("doctor", "job.yaml")
    for name, settings, found in WRONG:
        write(server, changed(name, steps, **settings))
        said = command("doctor", "job.yaml", code=None)
        assert said.code in (1, 2), found
        assert found in said
    assert not server.payloads


def test_doctor_says_that_columns_of_a_rollout_are_not_known(server, command):
    Path("ask.py").write_text("async def rollout(document, generate):\n    return 'x'\n")
    steps = changed("judged", rollout="ask.rollout", answer=None)
    del steps["judged"]["prompt"]
    write(server, steps)
    said = command("doctor", "job.yaml")
    assert "note     best, query: a rollout before it has no rows yet" in said


def test_a_sample_takes_rows_through_all_steps_and_the_run_takes_its_answers(server, command):
    write(server, prices={"prompt": 2, "completion": 8})
    said = command("run", "job.yaml", "--sample", "3")
    for line in ("best: 2 rows", "rejected: 1 row", "topics:\n1. topic 1"):
        assert line in said
    drawn = re.findall(r"^\d\. id (\d\d)$", said, re.MULTILINE)
    assert drawn[:3] == drawn[3:], "the rows of one step are those of the next"
    assert [int(number) // 4 for number in drawn[:3]] == [0, 1, 2], "of the whole input"
    assert "for 12 documents" in said[said.index("judged:") : said.index("best:")]
    assert "size of the input is not known" in said[said.index("topics:") :]  # a query groups
    assert said.count("not known") == 1
    assert said.count("cost   ") == 3
    assert said.count("The run takes these answers for") == 2
    assert "The run sends these requests again" in said[said.index("topics:") :]
    assert len(server.payloads) == 3 + 3 + 1
    assert not list(Path("qa").rglob("*.parquet"))
    before = len(server.payloads)
    command("run", "job.yaml")
    assert len(server.payloads) == before + 27 - 3 - 3
    assert len(table("topics")) == 3


def test_a_sample_prices_a_step_whose_query_groups_files(server, command):
    sql = (
        "select topic as id, string_agg(text, ' ' order by id) as text from 'docs.jsonl' group by 1"
    )
    write(server, {"topics": {"input": {"sql": sql}, "prompt": "Sum up: {text}"}})
    said = command("run", "job.yaml", "--sample", "1")
    assert "for 3 documents" in said


def test_the_run_takes_the_answers_of_a_sample_from_a_query_over_files(server, command):
    steps = {
        "texts": {"sql": "select id, text from 'docs.jsonl' where id <> 'id 03'"},
        "answers": {"input": "texts", "prompt": "Answer: {text}"},
    }
    write(server, steps)
    said = command("run", "job.yaml", "--sample", "2")
    assert "The run takes these answers for" in said
    assert "for 11 documents" in said
    command("run", "job.yaml")
    assert len(server.payloads) == 11
    assert set(server.asked.values()) == {1}


def test_a_sample_whose_requests_all_fail_ends_with_1(command):
    with FakeServer(
        reply, rejects([f"Judge: answer to Answer: {row['text']}" for row in ROWS])
    ) as server:
        write(server)
        assert "topics: no row reaches it" in command("run", "job.yaml", "--sample", "2", code=1)


def test_a_sample_has_the_types_of_all_files(server, command):
    """Each of its tasks has a file, and one of them no value."""

    def reply(payload, times):
        number = int(payload["messages"][-1]["content"].split()[-1])
        return json.dumps(number) if number else "no JSON"

    server._answer = reply
    for n in (0, 9, 11):
        write_rows(f"part{n}.jsonl", [{"id": f"{n}", "text": f"text {n}"}])
    settings = {"engine": "none", "answer_attempts": 1, "invalid_answer": "keep", "seed": 1}
    steps = {
        "answers": {
            "input": "part*.jsonl",
            "prompt": "{text}",
            "tasks": 3,
            "json_schema": {"type": "integer"},
            **settings,
        },
        "most": {
            "input": {"sql": "select '' || max(answer) as text from answers"},
            "prompt": "{text}",
        },
    }
    write(server, steps)
    assert "question: 11" in command("run", "job.yaml", "--sample", "3")


def test_a_sample_finds_a_mistake_in_the_last_query_and_steps_without_rows(server, command):
    steps = changed("best", sql="select id, answer from judged where rating = 'x'")
    steps["topics"] = {"input": "best", "prompt": "{answer}"}
    write(server, steps)
    said = command("run", "job.yaml", "--sample", "3")
    assert "topics: no row reaches it" in said
    assert "best: no row reaches it" in said
    write(server, changed("rejected", steps, sql="select idd from judged"))
    assert "idd" in command("run", "job.yaml", "--sample", "2", code=2).error


SBATCH = f"""#!{sys.executable}
import os, pathlib, sys
number = len(list(pathlib.Path("submitted").glob("*"))) + 7
pathlib.Path("submitted", f"{{number}}").write_text(pathlib.Path(sys.argv[-1]).read_text())
print(f"Submitted batch job {{number}}")
"""


@pytest.fixture
def cluster(folder, monkeypatch):
    """Runs the jobs that were submitted, in their order, as Slurm would."""
    monkeypatch.setenv("PATH", f"{folder}/bin:{Path(sys.executable).parent}:/usr/bin:/bin")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv(LAUNCH, "")
    Path("submitted").mkdir()
    write_program(folder / "bin/sbatch", SBATCH)
    write_program(
        folder / "bin/srun",
        '#!/bin/sh\nwhile [ "$1" != launch_pickled_pipeline ]; do shift; done; "$@"\n',
    )
    write_program(folder / "bin/scontrol", "#!/bin/sh\necho here\n")

    def work(number):
        script = Path("submitted", str(number))
        array = "--array=" in script.read_text()
        of_slurm = {"SLURM_JOB_ID": str(number), "SLURM_NODELIST": "here"}
        if array:
            of_slurm |= {"SLURM_ARRAY_TASK_ID": "0", "SLURM_ARRAY_JOB_ID": str(number)}
        return processes.run(["bash", str(script)], env={**os.environ, **of_slurm})

    return work


@pytest.mark.slow
def test_the_last_job_of_an_array_goes_on_with_the_next_step(cluster, server, command):
    write(server, slurm={"partition": "p", "time": "1:00:00"})
    said = command("run", "job.yaml", "--redo", "answers")
    assert "Submitted job 7" in said
    assert "datatrove-ckpt run job.yaml\n" in Path("submitted/8").read_text()
    assert "afterany:7" in Path("submitted/8").read_text()
    assert not server.payloads
    for number in range(7, 13):
        done = cluster(number)
        assert done.returncode == 0, done.stdout + done.stderr
    assert not Path("submitted/13").exists()
    assert len(table("topics")) == 3
    assert len(table("rejected")) == 3
    assert set(server.asked.values()) == {1}


@pytest.mark.slow
def test_a_failure_ends_the_chain_and_the_same_command_goes_on(cluster, server, command):
    write(server, slurm={"partition": "p", "time": "1:00:00"}, skip_bad_requests=True)
    server._status = rejects(["Answer: text 3"])
    command("run", "job.yaml")
    assert cluster(7).returncode == 0
    done = cluster(8)
    assert "steps.answers: 1 dead letter is left" in done.stdout + done.stderr
    assert done.returncode == 1
    assert not Path("submitted/9").exists()


def test_workers_take_tasks_of_the_first_step_that_is_not_finished(server, command):
    write(server)
    command("run", "job.yaml", "--worker")
    assert len(table("rejected")) == 3
    assert set(server.asked.values()) == {1}


@pytest.mark.slow
def test_worker_processes_take_the_tasks_of_each_step(server, command):
    """As in one allocation, where a node may not submit."""
    for n in range(3):
        write_rows(f"part{n}.jsonl", ROWS[n::3])
    write(server, changed("answers", input="part?.jsonl", tasks=3), workers=2)
    command("run", "job.yaml")
    assert len(table("answers")) == 12
    assert len(table("rejected")) == 3
    assert set(server.asked.values()) == {1}


def test_a_worker_says_that_it_waits_for_the_queries_of_another(server, command, log, monkeypatch):
    Path("qa").mkdir()
    lock = Lock(Path("qa/steps.lock"))
    monkeypatch.setattr(time, "sleep", lambda seconds: lock.release())
    write(server)
    command("run", "job.yaml", "--worker")
    assert log.said("Waiting for a query: Another call")
    assert len(table("rejected")) == 3


def test_a_worker_waits_for_the_task_of_another_and_goes_on(server, command, monkeypatch):
    rank = Path("qa/answers/checkpoints/00000")
    rank.mkdir(parents=True)
    lock = Lock(rank / "lock")
    monkeypatch.setattr(time, "sleep", lambda seconds: lock.release())
    monkeypatch.setattr(claims, "_LOCKED_SECONDS", 1.0)
    write(server)
    said = command("run", "job.yaml", "--worker")
    assert "Waiting for 1 task of other processes" in said.err
    assert len(table("rejected")) == 3
    assert set(server.asked.values()) == {1}


def test_a_second_run_of_all_tasks_is_refused_and_a_worker_is_not(server, command):
    Path("qa").mkdir()
    lock = Lock(Path("qa/run.lock"))
    write(server)
    refused(server, command, "qa/run.lock")
    command("run", "job.yaml", "--worker")
    lock.release()
    assert len(table("rejected")) == 3


@pytest.mark.parametrize("name, limit", [("max_total_tokens", 120), ("max_cost", 0.0006)])
def test_a_limit_beside_steps_holds_for_all_together(server, command, name, limit):
    settings = {"prices": {"prompt": 2, "completion": 8}, "max_concurrent_generations": 1}
    write(server, **{name: limit}, **settings)
    said = command("run", "job.yaml", code=4)
    assert f"{name}: {limit:g} is reached: the answers " in said.err
    assert 12 <= len(server.payloads) < 20
    (more,) = re.findall(rf"The whole command: .* (--{name.replace('_', '-')} \S+)\n", said.err)
    sent = len(server.payloads)
    command("run", "job.yaml", code=4)
    assert len(server.payloads) == sent
    command("run", "job.yaml", *more.split(), code=None)
    assert len(server.payloads) > 1.5 * sent
    write(server, **{name: 100 * limit}, **settings)
    command("run", "job.yaml")
    assert len(server.payloads) == 27


def test_a_step_with_a_limit_of_its_own_keeps_to_the_other_of_all_steps(server, command):
    settings = {"prices": {"prompt": 2, "completion": 8}, "max_concurrent_generations": 1}
    steps = {name: STEPS[name] for name in ("answers", "judged")}
    steps = changed("judged", steps, max_total_tokens=10_000)
    write(server, steps, max_cost=0.0006, max_total_tokens=10_000, **settings)
    assert "max_cost: 0.0006 is reached" in command("run", "job.yaml", code=4).err
    assert 12 < len(server.payloads) < 20


def test_the_advice_at_a_limit_of_a_step_names_the_step(server, command):
    write(server, changed("judged", max_total_tokens=20), max_concurrent_generations=1)
    said = command("run", "job.yaml", code=4)
    (more,) = re.findall(r"The whole command: .* (--steps.judged.max-total-tokens \S+)\n", said.err)
    sent = len(server.payloads)
    command("run", "job.yaml", *more.split(), code=4)
    assert len(server.payloads) > sent


@pytest.mark.parametrize("name", ["promt", "max_token"])
def test_unknown_settings_beside_queries_are_refused(server, command, name):
    write(server, {"rows": {"sql": "from 'docs.jsonl'"}}, **{name: 3})
    said = command("run", "job.yaml", code=2).error
    assert f'job.yaml: unknown key "{name}", did you mean' in said
    assert not Path("qa").exists()


def test_a_query_is_the_input_of_a_single_run(server, command):
    sql = "select id, upper(text) as text, 0.5 as share, sum(1) over () as n from 'docs.jsonl'"
    job = {"run_folder": "x", "input": {"sql": sql}, "prompt": "Answer: {text}", "model": "fake"}
    job["endpoint"] = server.url
    Path("job.yaml").write_text(yaml.safe_dump(job))
    command("run", "job.yaml")
    command("run", "job.yaml")
    assert len(server.payloads) == 12
    (row, *_) = table("", "x")
    assert (row["text"], row["share"], row["n"]) == ("TEXT 0", 0.5, 12)
    assert "12 written" in command("status", "job.yaml")
    job["input"] = {"sql": f"{sql} limit 3"}
    Path("job.yaml").write_text(yaml.safe_dump(job))
    error = command("run", "job.yaml", code=1).error
    assert "the query, or a file that it reads, has changed. Undo the change" in error
    assert "choose another run_folder, and set finished_from to the old run_folder" in error
    assert len(server.payloads) == 12


def test_a_run_waits_while_another_process_computes_its_query(server, command, log, monkeypatch):
    Path("x").mkdir()
    lock = Lock(Path("x/query.lock"))
    monkeypatch.setattr(time, "sleep", lambda seconds: lock.release())
    rows = {"sql": "select id, text from 'docs.jsonl' limit 2"}
    single = {"run_folder": "x", "input": rows, "prompt": "{text}", "model": "fake"}
    Path("job.yaml").write_text(yaml.safe_dump({**single, "endpoint": server.url}))
    command("run", "job.yaml")
    assert log.said("Waiting for a query: Another call")
    assert len(table("", "x")) == 2


def test_a_query_of_a_url_needs_no_internet(server, empty_memory_file_system):
    """fsspec reads it, and DuckDB downloads nothing."""
    with fsspec.open("memory://rows.parquet", "wb") as file:
        pq.write_table(pa.table({"a": [1, 2]}), file)
    outputs = datatrove_ckpt.run(
        **job(server, {"rows": {"sql": "select a + 1 as a from 'memory://rows.parquet'"}})
    )
    assert [row.metadata["a"] for row in outputs["rows"]] == [2, 3]
    with pytest.raises(ConfigError, match="spatial"):
        datatrove_ckpt.run(**job(server, {"a": {"sql": "from st_read('x.shp')"}}))


@pytest.mark.parametrize(
    "url, said",
    [
        ("http://127.0.0.1:9/a.csv", "ClientConnectorError: Cannot connect to host 127.0.0.1:9"),
        ("none://a/a.csv", "Protocol not known: none"),
        ("http://me:sesame@127.0.0.1:9/a.csv", "Export credentials"),
    ],
)
def test_a_url_that_cannot_be_read_is_one_clear_message(server, url, said):
    with pytest.raises(ConfigError) as refused:
        datatrove_ckpt.run(**job(server, {"rows": {"sql": f"from '{url}'"}}))
    assert said in str(refused.value)
    assert "sesame" not in str(refused.value)
    assert "Traceback" not in str(refused.value)


def test_a_query_beyond_the_memory_is_an_error_that_names_the_way(server, monkeypatch):
    monkeypatch.setattr(queries, "free_memory", lambda: 200_000_000)
    sql = "select n % 3 as g, list(repeat('x', 100) || n order by n desc) as l from range(3000000) r(n) group by g"
    with pytest.raises(StorageFailed, match=r"more than 95.4 MB, half .* Order a subquery"):
        datatrove_ckpt.run(**job(server, {"groups": {"sql": sql}}))
    locks = {"run.lock", "steps.lock", "query.lock"}
    assert {path.name for path in Path("qa").rglob("*")} == {"groups", STEPS_FILE, *locks}


@pytest.mark.parametrize(
    "columns",
    ["* replace (trim(answer) as answer)", "* rename (answer as text)", "answer.current_date"],
)
def test_a_table_is_read_whatever_the_names_of_columns_are(columns):
    assert queries.parse(f"select {columns} from answer", "").tables == ["answer"]


def test_the_values_of_an_enum_are_rows_too(finished, command):
    def sql(value):
        return f"select id, '{value}'::enum('{value}', 'x') as text from answers"

    steps = {"answers": STEPS["answers"], "last": {"input": {"sql": sql("a")}, "prompt": "{text}"}}
    write(finished, steps)
    command("run", "job.yaml")
    write(finished, changed("last", steps, input={"sql": sql("b")}))
    assert "its rows differ" in command("run", "job.yaml", code=1).error


def test_equal_rows_twice(server):
    """Of a query whose order is not given."""
    sql = "select id, topic, hash(id) as h from 'docs.jsonl' order by hash(id, 42) limit 7"
    first = datatrove_ckpt.run(**job(server, {"rows": {"sql": sql}}))["rows"]
    before = outputs(first)
    shutil.rmtree("qa")
    assert outputs(datatrove_ckpt.run(**job(server, {"rows": {"sql": sql}}))["rows"]) == before


def test_redo_refuses_while_a_process_works_on_a_step(finished, command):
    lock = Lock(Path("qa/judged/checkpoints/00000/lock"))
    error = command("run", "job.yaml", "--redo", "answers", code=1).error
    lock.release(remove=True)
    assert "A process works on qa/judged" in error
    assert not Path("qa/answers.1").exists()
    write(finished, checkpoints_remote_dir="mirror")
    assert "does not move a mirror" in command("run", "job.yaml", "--redo", "answers", code=2).error
    assert "did you mean" in command("run", "job.yaml", "--redo", "answer", code=2).error


@pytest.mark.parametrize("name, value", [("redo", "answers"), ("dead_letters", "leave")])
def test_settings_of_steps_are_refused_for_a_single_run(command, name, value):
    job = {"run_folder": "x", "input": "docs.jsonl", "prompt": "{text}", "model": "m", name: value}
    flags = [f"--{name}={value}".replace("_", "-") for name, value in job.items()]
    assert "for a job with steps" in command("run", *flags, code=2).error
    assert not Path("x").exists()
    with pytest.raises(ConfigError, match="for a job with steps"):
        datatrove_ckpt.run(**job)


def test_a_duckdb_relation_is_an_input_in_python(server):
    rows = duckdb.sql("select * from 'docs.jsonl' order by id limit 2")
    output = datatrove_ckpt.run(
        run_folder="x", input=rows, prompt="{text}", model="fake", endpoint=server.url
    )
    assert [document.id for document in output] == ["id 00", "id 01"]


def test_values_reach_the_next_step_unchanged(server, command):
    odd = {"day": "2024-01-02", "uuid": "0b0fdd76-9ba0-4b3c-8d2b-3f3c0a2a8a11", "big": 2**62 + 1}
    write_rows("docs.jsonl", [{**row, **odd} for row in ROWS])
    steps = {
        "answers": {"input": "docs.jsonl", "prompt": "{text}"},
        "more": {"input": "answers", "prompt": "{answer}", "answer": "again"},
        "all": {"sql": "select id, day, uuid, big::varchar as big from more"},
    }
    write(server, steps)
    for _ in range(2):
        command("run", "job.yaml")
    assert table("all")[3] == {"id": "id 03", **odd, "big": str(2**62 + 1)}
    assert len(server.payloads) == 24


@pytest.mark.parametrize("without", [0, 11])  # in the first file, in the last
def test_files_without_a_value_leave_other_files_their_types(command, without):
    def reply(payload, times):
        number = int(payload["messages"][-1]["content"].split()[-1])
        if abs(number - without) < 3:
            return "no JSON"
        return json.dumps({"score": number, "notes": [number]} if "tools" in payload else number)

    run = {"input": "docs.jsonl", "prompt": "{text}", "records_per_chunk": 3, "engine": "none"}
    form = {"answer_attempts": 1, "invalid_answer": "keep", "rollout_results": False}
    nested = {"type": "object", "required": ["score"]}
    steps = {
        "judged": {**run, **form, "json_schema": nested, "generation_params": {"tools": []}},
        "best": {"sql": "select id, answer.score, answer.notes from judged where answer notnull"},
        "flat": {**run, **form, "json_schema": {"type": "integer"}},
        "most": {"sql": "select max(answer) as score from flat"},
    }
    with FakeServer(reply) as server:
        write(server, steps)
        command("run", "job.yaml")
    scores = [number for number in range(12) if abs(number - without) >= 3]
    assert table("most") == [{"score": max(scores)}]
    assert [row["notes"] for row in table("best")] == [[number] for number in scores]
    command("export", "qa/judged", "all.parquet")
    answers = pq.read_table("all.parquet")["answer"].to_pylist()
    assert [answer["score"] for answer in answers if answer] == scores


def test_rows_that_change_nothing_in_a_later_step_leave_it_up_to_date(server, command):
    steps = {
        "answers": {"input": "docs.jsonl", "prompt": "{text}"},
        "texts": {"sql": "select id, topic, text from answers"},
        "more": {"input": {"sql": "select id, text from texts"}, "prompt": "More: {text}"},
    }
    write(server, steps)
    command("run", "job.yaml")
    write(
        server, changed("texts", steps, sql="select id, upper(topic) as topic, text from answers")
    )
    sent = len(server.payloads)
    command("run", "job.yaml")
    assert len(server.payloads) == sent
    assert "stale" not in command("status", "qa")
    assert "3 steps verified" in command("verify", "qa")


def test_a_moved_run_folder_goes_on_and_a_removed_file_of_a_query_is_made_again(finished, command):
    Path("qa").rename("moved")
    write(finished, run_folder="moved")
    before = everything("moved")
    Path("moved/best/output/rows_00000.parquet").unlink()
    command("run", "job.yaml")
    assert everything("moved") == before
    assert not finished.asked


@pytest.mark.parametrize("explode", [False, True])
def test_doctor_knows_the_names_of_second_answers(server, command, explode):
    server._answer = lambda payload, times: '["x"]'
    schema = {"type": "array", "items": {"type": "string"}}
    settings = {"prompt": "{answer}", "json_schema": schema, "explode": explode}
    steps = {
        "answers": {"input": "docs.jsonl", "prompt": "{text}"},
        "more": {"input": "answers", **settings},
        "most": {"input": "more", **settings},
        "all": {"sql": "select id, answer, answer_2, answer_3 from most"},
    }
    write(server, steps)
    assert "no problem" in command("doctor", "job.yaml")
    command("run", "job.yaml")
    assert table("all")[0]["answer_3"] == ("x" if explode else ["x"])


def test_doctor_knows_the_columns_beside_the_answers(server, command):
    steps = {
        "answers": {"input": "docs.jsonl", "prompt": "{text}", "quality": True},
        "best": {"sql": "select id, answer_faults, answer_tokens from answers"},
    }
    write(server, steps)
    assert "no problem" in command("doctor", "job.yaml")
    command("run", "job.yaml")
    assert len(table("best")) == 12


def test_doctor_knows_the_columns_of_a_schema_in_a_file(server, command):
    Path("schema.json").write_text(json.dumps(SCORE))
    steps = {
        "judged": {"input": "docs.jsonl", "prompt": "{text}", "json_schema": "@schema.json"},
        "best": {"sql": "select id from judged where answer.score > 3"},
    }
    write(server, steps)
    assert "no problem" in command("doctor", "job.yaml")
    write(server, changed("best", steps, sql="select id from judged where answer.skore > 3"))
    assert "skore" in command("doctor", "job.yaml", code=1)
