"""``rollout_results: false``: the answers' column alone, and all that a run shows without the
whole results.
"""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import datatrove_ckpt
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.run_folder.documents import OutputPath
from datatrove_ckpt.testing import FakeServer, outputs
from tests.jobs import Budget
from tests.jobs import rows as written
from tests.yaml_jobs import write_rows

ROWS = [{"id": f"id {n}", "text": f"text {n}", "year": n} for n in range(5)]
FORMATS = ["jsonl", "parquet", "csv"]


@pytest.fixture
def job(command, tmp_path, monkeypatch):
    """Runs it with flags. ``budget``: stops the task when so many requests are answered."""
    monkeypatch.chdir(tmp_path)
    write_rows("in.jsonl", ROWS)

    def job(*flags, given="in.jsonl", folder="x", code=0, budget=10**9):
        with FakeServer(lambda payload, times: "fine", status=Budget(budget)) as server:
            job = [f"--input={given}", "--prompt={text}", f"--endpoint={server.url}", "--model=m"]
            settings = ["--records-per-chunk=2", "--max-concurrent-generations=1"]
            said = command("run", *job, *settings, f"--run-folder={folder}", *flags, code=code)
            return said, len(server.payloads)

    return job


@pytest.mark.parametrize("output", FORMATS)
def test_the_output_has_the_answers_alone_and_every_command_goes_without_the_rest(
    job, command, output
):
    flags = ["--rollout-results=false", f"--output-format={output}"]
    job(*flags, folder="whole")
    _, asked = job(*flags, budget=3, code=1)
    said, rest = job(*flags)
    assert asked + rest == len(ROWS) + 1, "one was refused"
    assert "5 of 5 documents are" in said
    assert outputs(Path("x/output")) == outputs(Path("whole/output"))
    for row in OutputPath("x/output").to_pandas().to_dict("records"):
        assert [*row] == ["text", "id", "year", "file_path", "answer"]
        assert row["answer"] == "fine"
    command("verify", "x", "--full")
    shown = json.loads(command("status", "x", "--json"))
    assert shown["totals"]["counts"]["written"] == 5
    assert shown["totals"]["counts"]["requests"] == 5
    assert "answer: fine" in command("show", "x")
    assert command("export", "x", "all.jsonl") == "5 documents in all.jsonl.\n"


def test_another_value_is_refused_and_names_the_setting(job):
    job(budget=3, code=1)
    said, asked = job("--rollout-results=false", code=1)
    assert "rollout_results" in said
    assert not asked


def test_items_are_shown_and_counted(job, command):
    job("--rollout-results=false", "--explode=true")
    rows = written(Path("x"))
    assert [[row["id"], row["n"], row["answer"]] for row in rows[:2]] == [
        ["id 0/0", 0, "fine"],
        ["id 1/0", 0, "fine"],
    ]
    assert "rollout_results" not in rows[0]
    assert "5 written in 3 chunks as 5 rows" in command("status", "x")
    assert "answer: fine" in command("show", "x")


def test_results_of_an_earlier_run_stay_in_the_next_ones_output(job):
    """The columns are the user's."""
    job()
    job("--rollout-results=false", "--answer=again", given="x/output", folder="y")
    first = written(Path("y"))[0]
    assert first["rollout_results"][0]["text"] == first["answer"] == first["again"] == "fine"


def test_without_a_column_for_the_answers_it_is_refused(job, server):
    said, asked = job("--rollout-results=false", "--answer=null", code=2)
    assert "rollout_results: false leaves no column for the answers. Set answer." in said.error
    assert not asked


def test_python_takes_it(server, tmp_path):
    rows = [{"id": "a", "text": "b"}]
    settings = {"prompt": "{text}", "model": "m", "endpoint": server.url}
    output = datatrove_ckpt.run(run_folder=tmp_path, input=rows, rollout_results=False, **settings)
    assert [[*row.metadata] for row in output] == [["file_path", "answer"]]
    with pytest.raises(ConfigError, match="rollout_results: 7 is not"):
        datatrove_ckpt.run(run_folder=tmp_path, input=rows, rollout_results=7, **settings)


def test_a_table_is_smaller(job):
    """The study's ports had 14 to 38 % less."""
    sizes = []
    for value in ("true", "false"):
        job(f"--rollout-results={value}", "--output-format=parquet", folder=value)
        paths = sorted(Path(value, "output").glob("*"))
        assert ("rollout_results" in pq.read_schema(paths[0]).names) == (value == "true")
        sizes.append(sum(path.stat().st_size for path in paths))
    assert sizes[1] < sizes[0]
