"""The short form of a job: what it is written out as, what it refuses, and that it runs and
resumes.
"""

import io
import itertools
import json
import pickle
import re
import shlex
import shutil
from pathlib import Path

import fsspec
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from datatrove.io import DataFolder
from fsspec.implementations.memory import MemoryFileSystem

import datatrove_ckpt
from datatrove_ckpt.cli import job_input
from datatrove_ckpt.cli.main import main
from datatrove_ckpt.cli.short_form import read_config
from datatrove_ckpt.cli.yaml_config import dump
from datatrove_ckpt.errors import CheckpointMismatch, ConfigError, written_in
from datatrove_ckpt.generation.datatrove_errors import DocumentFailed
from datatrove_ckpt.inference.servers.host import ServerHost
from datatrove_ckpt.readers import JsonlReader, position_state
from datatrove_ckpt.run_folder.documents import OutputPath
from datatrove_ckpt.testing import FakeServer, outputs
from tests import golden
from tests.jobs import Budget, chat, rejects, rejects_documents
from tests.jobs import rows as written
from tests.unit.tables import write_table
from tests.yaml_jobs import write_rows

JOB = {
    "run_folder": "runs/x",
    "input": "documents",
    "prompt": "Say {text}",
    "model": "m",
    "endpoint": "http://x",
}
ROWS = [{"id": f"id {number}", "text": f"text {number}"} for number in range(3)]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("documents").mkdir()
    write_rows("documents/a.jsonl", ROWS)
    return tmp_path


@pytest.fixture
def in_two(command):
    """A run that ends at a refused text, and the same again: what they asked, and the
    second one said.
    """

    def run(refused, *words, first=(), **settings):
        fails = [*refused]
        with FakeServer(status=rejects(fails, 401)) as server:
            # One after the other, so that they arrive in order.
            write(server, records_per_chunk=1, max_concurrent_generations=1, **settings)
            command("run", "job.yaml", *first, *words, code=1)
            fails.clear()
            said = command("run", "job.yaml", *words)
        return [payload["messages"][0]["content"] for payload in server.payloads], said

    return run


@pytest.fixture
def listings(monkeypatch):
    """The folders that were listed."""
    found = []
    for name in ("list_files", "find", "glob"):
        listed = getattr(DataFolder, name)

        def noted(folder, *given, _listed=listed, **options):
            found.append(folder.path)
            return _listed(folder, *given, **options)

        monkeypatch.setattr(DataFolder, name, noted)
    return found


def write(server=None, **settings):
    """Writes job.yaml: JOB with other settings, at the server if one is given."""
    job = {**JOB, **({"endpoint": server.url} if server else {}), **settings}
    Path("job.yaml").write_text(yaml.safe_dump(job))
    return job


def expanded(*overrides, **settings):
    """The executor's arguments; and those of reader and runner as ``reader`` and ``runner``."""
    write(**settings)
    node = read_config("job.yaml", list(overrides))["executor"]
    reader, runner = node["init_args"]["pipeline"]
    return {
        "class_path": node["class_path"],
        **node["init_args"],
        "reader": reader,
        "runner": runner["init_args"],
    }


WRITTEN_OUT = {
    "": (
        "--input=documents/a.jsonl",
        "--input=documents/*.jsonl",
        "--input=zipped",
        "--input=tables",
        "--input=a[1].jsonl",
        "--input=arrow/*",
        "--input=sheet.csv",
        "--input=notes",
        "--input=mixed",
        "--input=mixed/*.txt",
        "--input=notes/a.md",
        "--input=old",
        "--input=old/A.CSV",
        "--input=saved",
        "--input=hf://datasets/o/n",
        "--limit=2 --max-tokens=60 --pipeline.1.drain_seconds=3 --keep-answers=true",
        "--max-concurrent-generations=8 --answers-from=old/checkpoints",
        "'--finished-from=[old/output, \"old/${rank}\"]'",
        "--json-schema=@schema.json",
        "--prompt=null --prompt-column=a",
        "--rollout=ChunkedRollout --max-chars-per-part=9",
        "'--prompt=# {text}' --regex=#x",
        "--prompt=null --rollout=mine.rollout",
        "--prompt=null --rollout=mine.rollout --text-key=null",
        "--prompt=null --task=embed --normalize=true",
        "--task=classify --threshold=0.5",
        "--endpoint=null --task=embed --server-type=sglang",
        "--endpoint=null --task=embed '--model-kwargs={pooling_type: cls}'",
        "--endpoint=null --model=o/m",
        "--endpoint=null --model=o/m.gguf",
        "'--types={day: date32}'",
        "'--slurm={partition: gpu, workers: 40}' --slurm.time=1:00:00 --input=many",
        "'--slurm={partition: gpu}' --endpoint=null --model=o/m",
        "'--slurm={partition: gpu}' --endpoint=null '--endpoints=[{url: http://e}]'",
    ),
    "0,1": (
        "--endpoint=null --model=package://p/m.gguf",
        "--endpoint=null",
        "--endpoint=null --tp=2",
        "--endpoint=null --workers=2",
        "--endpoint=null --task=embed '--model-kwargs={seed: 1, runner: auto}'",
        "--endpoint=null --task=classify",
    ),
}
"""Flags, by the GPUs of the machine."""


def test_a_job_is_written_out_in_the_long_form(monkeypatch):
    for name in (
        "zipped/a.jsonl.gz",
        "tables/deep/a.parquet",
        "tables/README.md",
        "arrow/a.arrow",
        "sheet.csv",
        "a[1].jsonl",
        "notes/a.md",
        "notes/picture.png",
        "mixed/a.md",
        "mixed/b.txt",
        "old/A.CSV",
        "saved/dataset_info.json",
        "many/a.jsonl",
        "many/b.jsonl",
    ):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    Path("schema.json").write_text('{"type": "object"}')
    write()
    plain = dump(read_config("job.yaml", []))
    golden.hold("long_form", "the job itself", plain)
    for gpus, jobs in WRITTEN_OUT.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
        for flags in jobs:
            lines = dump(read_config("job.yaml", shlex.split(flags))).splitlines()
            changed = [line for line in lines if line not in plain.splitlines()]
            golden.hold("long_form", f"{gpus} {flags}".strip(), "\n".join(changed))


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"input": ["documents/a.jsonl"]}, "input: .* is not a text"),
        ({"prompt": {"text": None}}, "is not a text; write '{text}', in quotes"),
        ({"input": "https://user:word@b c/x.jsonl"}, r"b c cannot be listed"),
    ],
)
def test_values_of_a_file_that_cannot_be(settings, message):
    with pytest.raises(ConfigError, match=message) as refused:
        expanded(**settings)
    assert "word" not in str(refused.value)


# tasks -------------------------------------------------------------------------------------------


def test_embeddings_are_tried_run_resumed_and_shown(server, command):
    def answer(payload):
        return {
            "data": [{"index": 0, "embedding": [0.25, -1.0, 3.0, 4.0, 5.0]}],
            "usage": {"prompt_tokens": 2},
        }

    server.paths = {"/v1/embeddings": answer}
    write(server, model="fake", task="embed", prompt="query: {text}")
    shown = 'answer: {"column":"embedding","dimensions":5}'
    sample = command("run", "job.yaml", "--sample=2")
    assert sample.count(shown) == 2
    assert "question: query: text 0" in sample
    command("run", "job.yaml")
    assert {payload["input"] for payload in server.payloads} == {
        f"query: text {number}" for number in range(3)
    }
    assert len(server.payloads) == 3
    table = pq.read_table("runs/x/output")
    assert table["embedding"].to_pylist() == [[0.25, -1.0, 3.0, 4.0, 5.0]] * 3
    assert table["id"].to_pylist() == [row["id"] for row in ROWS]
    assert command("show", "runs/x").count(shown) == 3
    long = command("run", "job.yaml", "--print-config").out
    Path("long.yaml").write_text(long)
    assert "3 of 3 documents" in command("run", "long.yaml")
    assert len(server.payloads) == 3, "the long form is the same run"
    assert "no problem" in command("verify", "runs/x", "--full")


NAMED = [
    "documents/*.jsonl",
    "documents/a.jsonl",
    "deep/**/*.parquet",
    "s3://b/*.csv",
    "hf://datasets/o/n/x.arrow",
]


@pytest.mark.parametrize("given", NAMED)
def test_what_its_name_tells_is_not_listed(given, listings):
    expanded(input=given, tasks=3)
    expanded(input=given, slurm={"partition": "gpu"}, tasks=3)
    assert listings == []


def test_a_run_is_looked_at_without_its_input(listings, capsys):
    with FakeServer() as server:
        write(server)
        assert main(["run", "job.yaml"]) == 0
    Path("documents").rename("gone")
    listings.clear()
    commands = ["verify", "status", "show", "report"]
    for given in ("documents", *NAMED):
        setting = "limit" if "." in given else "batch_size"  # of some reader
        for command in commands if given == "documents" else commands[:1]:
            assert main([command, "job.yaml", "--input", given, f"--{setting}=5"]) == 0, command
        assert "3 documents" in capsys.readouterr().out
        assert main(["status", "job.yaml", "--input", given, "--batch-siz=5"]) == 2
    assert [path for path in listings if "runs/x" not in path] == []


def test_a_job_for_gpus_is_looked_at_where_there_are_none(capsys, monkeypatch):
    monkeypatch.setattr("datatrove_ckpt.config.inference_config.visible_gpus", list)
    Path("job.yaml").write_text(
        "{input: a.jsonl, prompt: '{text}', model: m, run_folder: r, tp: 2}"
    )
    main(["status", "job.yaml"])
    assert "nothing has started yet" in capsys.readouterr().out
    assert main(["run", "job.yaml"]) == 2


def test_the_percentage_of_a_run_of_more_tasks_than_files_is_that_of_the_files(command):
    Path("in").mkdir()
    for number in range(4):
        Path(f"in/{number}.jsonl").write_text(json.dumps({"text": f"file {number}"}) + "\n")
    with FakeServer(status=lambda body, times: 400 * ("file 2" in str(body)) or None) as server:
        job = ["--input", "in", "--endpoint", server.url, "--model", "fake", "--prompt", "{text}"]
        command("run", *job, "--run-folder", "r", "--tasks", "20", "--workers", "1", code=1)
    assert "75.0 % of the input" in command("status", "r"), "others decide whose fault it is"


def test_each_file_is_a_task_here_if_that_is_worth_it():
    assert expanded()["tasks"] == 1
    for number in range(3):
        with Path(f"documents/{number}.jsonl").open("w") as file:
            file.truncate(job_input.LEAST_BYTES)
    assert expanded()["tasks"] == expanded(input="documents/*.jsonl")["tasks"] == 3
    assert expanded(input="documents/0.jsonl")["tasks"] == 1
    Path("documents/b.jsonl").write_text("")
    Path("documents/0.jsonl").write_text("")
    assert expanded()["tasks"] == 2
    with Path("documents/0.jsonl").open("w") as file:
        file.truncate(job_input.LEAST_BYTES * 200)
    assert expanded()["tasks"] == 5
    for number in range(100):
        Path(f"documents/more-{number}.jsonl").touch()
    assert expanded()["tasks"] == 100


def test_a_job_on_the_command_line_runs_resumes_and_keeps_its_tasks(capfd):
    Path("prompt.txt").write_text("Say {text}")
    with FakeServer() as server:
        job = f"run --input documents --prompt @prompt.txt --endpoint {server.url} --model m"
        command = [*job.split(), "--run-folder", "runs/x", "--tasks", "2"]
        assert main(command) == 0
        assert main(command[:-2]) == 0, capfd.readouterr().err  # without --tasks: the run's own
        assert server.asked.total() == len(ROWS)
    found = outputs(Path("runs/x/output"))
    assert len(found) == 1
    assert "3 of 3 documents" in capfd.readouterr().out
    write(server, prompt="@prompt.txt", tasks=2, run_folder=str(Path("runs/x").absolute()))
    # As elsewhere: who only looks needs none, and calls it no other run.
    Path("prompt.txt").unlink()
    assert main(["verify", "job.yaml"]) == 0
    assert "no problem" in capfd.readouterr().out


# words -------------------------------------------------------------------------------------------

LONG = re.compile(
    r"checkpoints_local_dir|output_folder|logging_dir|default_generation_params|pipeline[.\[]|executor|rollout_fn|"
    r"InferenceConfig|InferenceRunner|adapter|model_name_or_path|endpoint_url|data_folder"
)


@pytest.fixture
def job(server):
    """job.yaml, whose run is finished."""
    job = write(server, model="fake")
    assert main(["run", "job.yaml"]) == 0
    return job


REFUSED = (
    "--prompt=Tell {text}",
    "--max-tokens=5",
    "--tasks=2",
    "--limit=2",
    "--max-tokens=-4",
    "--max-concurrent-generations=0",
    "--max-chars=1",
    "--limit=x",
    "--endpoint=foo",
    "--workers=0",
    "--limit=-3",
    "--run-folder=job.yaml",
    "--run-folder=documents",
)


def test_a_refusal_names_what_the_user_has_written(job, command):
    for flag, name in itertools.product(REFUSED, ("run", "doctor")):
        printed = command(name, "job.yaml", flag, code=None)
        told = "".join(re.findall("problem .*\n", printed.out))
        if "error: " in printed.err:
            told = printed.error
        assert printed.code in (1, 2)
        assert not LONG.search(told), told
        golden.hold("short_form", f"{name} {flag}", re.sub("probe-[0-9a-f]+", "probe", told))


@pytest.mark.parametrize("form", ["", "run()", "job.yaml"])
def test_an_error_arrives_from_a_worker_process_as_it_was_raised(form):
    with written_in(form):
        error = DocumentFailed("x", None, KeyError("y"), changes=[{"retry_errors": True}])
        over = CheckpointMismatch("x.", starts_over="anew")
    sent = pickle.loads(pickle.dumps(error))
    assert (str(sent), sent.changes) == ("x", error.changes)
    other = "run_folder" if form else "checkpoints_local_dir, output_folder and logging_dir"
    over = pickle.loads(pickle.dumps(over))
    assert str(over) == f"x. To start over, choose another {other}."


def test_python_names_what_to_pass_and_starts_over(job):
    assert datatrove_ckpt.run(**job).is_dir()
    with pytest.raises(CheckpointMismatch) as refused:
        datatrove_ckpt.run(**{**job, "prompt": "Tell {text}"})
    assert str(refused.value).endswith("To start over, choose another run_folder.")
    folder = Path("runs/x").absolute()
    assert refused.value.__notes__ == [
        f"To start over, move it aside while no task runs: mv {folder} {folder}.1"
    ]
    assert not LONG.search(str(refused.value))
    with pytest.raises(CheckpointMismatch, match=r"Go on with 1 task \(tasks: 1\)"):
        datatrove_ckpt.run(**job, tasks=2)
    with pytest.raises(ConfigError, match=r"^run\(\): max_tokens: -4 is not"):
        datatrove_ckpt.run(**job, max_tokens=-4)
    Path("runs/x").rename("runs/x.1")
    datatrove_ckpt.run(**{**job, "prompt": "Tell {text}"})
    assert {*outputs(Path("runs/x/output"))} == {*outputs(Path("runs/x.1/output"))}


def test_a_run_folder_with_the_input_in_it_is_not_to_be_moved_aside(job, command):
    changed = ["job.yaml", "--prompt=Tell {text}"]
    said = command("run", *changed, code=1).err
    assert said.endswith(
        f"\nTo start over, move it aside while no task runs: "
        f"mv {Path('runs/x').absolute()} {Path('runs/x.1').absolute()}\n"
    )
    shutil.copytree("documents", "runs/x/documents")
    assert " mv " not in command("run", *changed, "--input=runs/x/documents", code=1).err


# the first document and the input's files --------------------------------------------------------


@pytest.mark.matrix(
    "setting, columns",
    [
        ("prompt=Say {txt}", 'text, id, file_path, did you mean "text"?'),
        ("prompt_column=txt", "file_path."),
    ],
)
def test_a_prompt_that_the_first_document_does_not_fit_starts_no_server(
    setting, columns, command, monkeypatch
):
    write()

    def lend(*arguments):
        raise AssertionError("a server would have been started")

    monkeypatch.setattr(ServerHost, "lend", lend)
    said = f"document 'id 0' has no column 'txt'; its columns: {columns} Correct the name;"
    assert said in command("run", "job.yaml", f"--{setting}", code=1).error
    assert said in command("doctor", "job.yaml", f"--{setting}", code=1)
    assert said not in command(
        "doctor", "job.yaml", f"--{setting}", "--on-document-error=dead_letter", code=1
    )


def test_a_second_job_uses_the_earlier_answers_and_never_replaces_them(server, command):
    write(server)
    command("run", "job.yaml", "--answer=summary")
    sent = len(server.payloads)
    parts = "{summary} {rollout_results[0].text} {rollout_results[0].usage}"
    again = ("run", "job.yaml", "--input=runs/x/output", f"--prompt={parts}")
    said = command(*again, "--answer=summary", "--run-folder=runs/same", code=1).error
    assert "has 'summary' and 'rollout_results' in its metadata already" in said
    assert "Give other names: answer summary_2 and metadata_key rollout_results_2.\n" in said
    assert said.endswith(" --answer summary_2 --metadata-key rollout_results_2")
    other = command(*again, "--run-folder=runs/other", code=1).error
    assert other.endswith(" --metadata-key rollout_results_2")
    with pytest.raises(ConfigError, match=r"names: metadata_key rollout_results_2\.$"):
        datatrove_ckpt.run(
            **{**JOB, "endpoint": server.url, "input": "runs/x/output", "run_folder": "runs/py"}
        )
    assert "'rollout_results' in its metadata" in command(
        "doctor", *again[1:], "--run-folder=runs/other", code=1
    )
    assert len(server.payloads) == sent
    command(*again, *said.split()[-4:], "--run-folder=runs/y")
    rows = [document.metadata for document in OutputPath("runs/y/output")]
    for row in rows:
        first = row["rollout_results"][0]
        asked = (
            f"{row['summary']} {first['text']} {json.dumps(first['usage'], separators=(',', ':'))}"
        )
        assert server.asked[asked] == 1
        second = row["rollout_results_2"][0]
        assert row["summary_2"] == second["text"] != row["summary"] == first["text"]
    assert len(rows) == 3
    # As in datatrove, without a name.
    warned = command(*again, "--answer=null", "--run-folder=runs/z")
    assert "the new results replace it" in warned


def test_a_table_goes_in_and_comes_out_with_the_answers_as_a_column(command):
    """Parquet is read by pandas and ``datasets``, as people go on with it."""
    import datasets
    import pandas

    Path("tables").mkdir()
    table = pa.table({"id": ["1", "2"], "text": ["a", "b"], "stars": [4, 5]})
    pq.write_table(table, "tables/in.parquet")
    with FakeServer(lambda payload, times: '{"mood": "good"}') as server:
        schema = {"type": "object", "required": ["mood"]}
        write(server, input="tables/in.parquet", json_schema=schema)
        command("run", "job.yaml", "--answer=summary", "--rollouts-per-document=2")
        changed = command("run", "job.yaml", "--answer=other", code=1).error
    assert 'answer: "summary" -> "other"' in changed
    frame = pandas.read_parquet("runs/x/output")
    assert [*frame] == ["text", "id", "stars", "file_path", "rollout_results", "summary"]
    assert frame["stars"].tolist() == [4, 5]
    assert [[one["mood"] for one in row] for row in frame["summary"]] == [["good"] * 2] * 2
    dataset = datasets.load_dataset("parquet", data_dir="runs/x/output", split="train")
    assert dataset["summary"][0] == [{"mood": "good"}] * 2
    assert "Columns: text, id, stars, file_path, rollout_results, summary." in command(
        "show", "runs/x"
    )


TABLES = {
    "sheet.csv": "question,answer\nWhy?,So\nHow?,Thus\n",
    "part.jsonl": '{"chunks": ["Why?"]}\n{"chunks": ["How?", "x"]}\n',
    "empty.jsonl": '{"text": "", "question": "Why?"}\n{"question": "How?", "text": null}\n',
    "text.jsonl": '{"text": "a", "question": "Why?"}\n{"text": "b", "question": "How?"}\n',
}


async def of_question(document, generate):
    """A user's rollout that reads no text, unless there is one."""
    return await generate(chat(document.text + document.metadata["question"]))


ROLLOUT = ["--rollout=tests.integration.test_short_form.of_question"]


@pytest.mark.parametrize(
    "name, flags",
    [
        ("sheet.csv", ROLLOUT),
        ("table.parquet", ROLLOUT),
        ("saved", [*ROLLOUT, "--answer=said"]),
        ("sheet.csv", ["--prompt={question}"]),
        ("sheet.csv", ["--prompt={question}", "--text-key=question"]),
        ("table.parquet", ["--prompt={question}"]),
        ("stream.arrow", ["--prompt={question}"]),
        ("saved", ["--prompt={question}", "--answer=said"]),
        ("part.jsonl", ["--prompt={chunks[0]}"]),
        ("empty.jsonl", ["--prompt={question}"]),
        ("text.jsonl", ["--prompt={question}"]),
        ("chats.jsonl", ["--prompt-column=messages"]),
        ("chats.csv", ["--prompt-column=messages"]),
    ],
)
def test_the_prompt_says_which_columns_it_needs(in_two, name, flags):
    """And the same table comes out, in one try, also after a stop."""
    import datasets

    table = pa.table({"question": ["Why?", "How?"], "answer": ["So", "Thus"]})
    pq.write_table(table, "table.parquet")
    with pa.ipc.new_stream("stream.arrow", table.schema) as stream:
        stream.write(table)
    datasets.Dataset(table).save_to_disk("saved")
    chats = [{"messages": [{"role": "user", "content": text}]} for text in ("Why?", "How?")]
    write_rows("chats.jsonl", chats)
    cells = {"messages": [json.dumps(row["messages"]) for row in chats]}
    pandas.DataFrame(cells).to_csv("chats.csv", index=False)
    for file, content in TABLES.items():
        Path(file).write_text(content)
    asked, _ = in_two(["How?"], *flags, input=name, prompt=None)
    assert asked == ["Why?", "How?", "How?"]
    if name in ("table.parquet", "stream.arrow"):
        frame = pandas.read_parquet("runs/x/output")
        assert [*frame][1:3] == ["question", "answer"]
        assert frame["answer"].tolist() == ["So", "Thus"]
        assert "answer_2" in frame
        assert "text" not in frame
    else:
        rows = written(Path("runs/x"))
        texts = ["a", "b"] if name == "text.jsonl" else [None, None]
        assert [row.get("text") for row in rows] == texts
        assert ("answer_2" in rows[0]) == (name == "sheet.csv")


def test_rows_of_an_input_with_a_column_of_texts_need_one(in_two):
    """Also for a rollout, which would be paid for an empty text."""
    Path("documents/a.jsonl").write_text(
        '{"text": "a", "question": "1"}\n{"question": "2"}\n{"text": "c", "question": "3"}\n'
    )
    asked, said = in_two(["c3"], *ROLLOUT, prompt=None)
    assert asked == ["a1", "c3", "c3"]
    assert "skipped_rows_without_text: 1" in said


def test_standard_input_is_kept_for_the_next_start(command, monkeypatch):
    def given(content):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))

    rows = Path("documents/a.jsonl").read_bytes()
    flags = ["--prompt={text}", "--model=m", "--run-folder=runs/x", "--records-per-chunk=1"]
    fails = ["text 2"]
    with FakeServer(status=rejects(fails, 401)) as server:
        run = ["run", "--input", "-", *flags, "--endpoint", server.url]
        given(b"")
        assert "standard input is empty" in command(*run, code=2).error
        given(b"question,answer\nWhy?,So")
        assert "is no JSON lines. Name a file" in command(*run, code=2).error
        given(rows)
        command(*run, code=1)
        fails.clear()
        given(rows + rows)
        assert "differ from runs/x/input/stdin.jsonl" in command(*run, code=2).error
        given(b"")
        command(*run)
        given(rows)
        command(*run)
        assert len(server.payloads) == 4
    assert len(outputs(Path("runs/x/output"))) == 3
    assert "no problem" in command("verify", "runs/x", "--full")


@pytest.mark.parametrize("prompt", ["{text}", "{file_path}"])
def test_a_folder_of_texts_is_an_input(in_two, command, prompt):
    Path("notes/deep").mkdir(parents=True)
    for name, text in {"a.md": "# A\n", "b.md": "", "deep/c.md": "C"}.items():
        Path("notes", name).write_text(text)
    fails = ["C", str(Path("notes/deep/c.md").absolute())]
    asked, said = in_two(fails, input="notes/", prompt=prompt)
    assert len(asked) == 3
    assert "skipped_rows_without_text: 1" in said
    rows = written(Path("runs/x"))
    assert [(row["id"], row["text"]) for row in rows] == [("a.md", "# A\n"), ("deep/c.md", "C")]
    Path("notes/a.md").write_text("changed")
    assert "a.md" in command("run", "job.yaml", code=1).error
    assert rows[0]["file_path"] == str(Path("notes/a.md").absolute())


def test_a_run_that_began_with_texts_alone_goes_on_so(in_two):
    """As an earlier version began it."""
    Path("documents/a.jsonl").write_text(
        '{"text": "a", "q": "1"}\n{"q": "2"}\n{"text": "c", "q": "3"}\n'
    )
    asked, _ = in_two(["3"], first=["--text-key=text"], prompt="{q}")
    assert asked == ["1", "3", "3"]


def test_another_text_key_is_refused_though_it_is_null(tmp_path):
    reader = JsonlReader("documents")
    first = next(reader.run())
    other = JsonlReader("documents", text_key=None)
    other.load_state_dict(position_state(first))
    with pytest.raises(CheckpointMismatch, match="was made with text_key='text', now None"):
        list(other.run())


def test_a_run_that_has_begun_keeps_the_form_of_its_output(in_two):
    """One that an earlier version began: JSON lines of Parquet files, without a name of the
    answers.
    """
    Path("tables").mkdir()
    pq.write_table(pa.table({"id": ["1", "2"], "text": ["a", "b"]}), "tables/in.parquet")
    in_two(["Say b"], first=["--answer=null", "--output-format=jsonl"], input="tables")
    rows = written(Path("runs/x"))
    assert [[*row] for row in rows] == [["text", "id", "metadata"]] * 2
    assert [[*row["metadata"]] for row in rows] == [["file_path", "rollout_results"]] * 2


def test_what_run_returns_is_a_path_that_reads_what_is_there(job):
    output = datatrove_ckpt.run(**{**job, "run_folder": "runs/y"}, output_format="jsonl.zst")
    assert output == Path("runs/y/output")
    assert [path.name for path in output.iterdir()] == ["00000_chunk_00000.jsonl.zst"]
    answers = [document.metadata["answer"] for document in output]
    assert [document.id for document in output] == [row["id"] for row in ROWS]
    assert output.to_pandas()["answer"].tolist() == answers == output.to_dataset()["answer"][:]
    assert (output.counts.written, output.counts.requests) == (3, 3)


def test_a_key_of_the_documents_is_never_replaced_by_an_answer(server, command):
    rows = [*ROWS, {"id": "last", "text": "text", "answer": "mine"}]
    write_rows("documents/a.jsonl", rows)
    write(server)
    said = command("run", "job.yaml", code=1).error
    assert "document 'last' has 'answer' in its metadata already" in said


def test_keys_of_the_metadata_never_replace_columns_of_the_document(server, command):
    row = {"id": 1, "body": "a", "key": "k", "text": "other", "metadata_text": "mine"}
    Path("documents/a.jsonl").write_text(json.dumps(row))
    write(server)
    for form in ("jsonl", "parquet"):
        folder = f"runs/{form}"
        names = ["--text-key=body", "--id-key=key", f"--output-format={form}"]
        command("run", "job.yaml", *names, f"--run-folder={folder}")
        (document,) = OutputPath(folder, "output")
        (found,) = OutputPath(folder, "output").to_pandas().to_dict("records")
        assert (found["id"], found["text"]) == ("k", "a") == (document.id, document.text)
        assert (found["metadata_id"], found["metadata_text"]) == (1, "mine")
        assert found["metadata_metadata_text"] == "other"
        assert found["answer"]


def test_a_parquet_column_of_two_types_is_refused_and_the_advice_keeps_the_answers(server, command):
    rows = [{"id": f"id {n}", "text": "a", "n": value} for n, value in enumerate([1, "one"])]
    write_rows("documents/a.jsonl", rows)
    write(server, max_concurrent_generations=1)
    for size in (1, 2):  # between chunks, and in one
        words = ["run", "job.yaml", f"--run-folder=runs/{size}", f"--records-per-chunk={size}"]
        said = command(*words, "--output-format=parquet", code=1).error
        assert "document 'id 1' (number 1 of this task): column 'n' is string there" in said
        assert "or continue with output_format: jsonl" in said
        command(*words, "--output-format=jsonl", "--accept-changes=true")
        output = OutputPath(f"runs/{size}/output")
        assert [document.metadata["n"] for document in output] == [1, "one"]
    assert server.asked.total() == 4


class Far(MemoryFileSystem):
    """A storage that is not there, or lets nobody in."""

    protocol, error, asked = "far", Exception(), 0

    def info(self, path, **options):
        type(self).asked += 1
        raise self.error

    find = info


@pytest.mark.parametrize(
    "error, looks, said",
    [
        (ConnectionResetError("no route"), range(5, 20), "no route"),
        (PermissionError("closed"), range(1, 9), "closed"),
        (FileNotFoundError("no such bucket"), range(1, 9), ""),
    ],
)
def test_an_input_that_cannot_be_reached_ends_a_start_within_a_minute(
    error, looks, said, policy, command, monkeypatch
):
    waits = []
    policy("OPENING", sleep=waits.append, clock=lambda: sum(waits))
    policy("READING", sleep=lambda seconds: pytest.fail("a run that has begun has more patience"))
    monkeypatch.setattr(Far, "error", error)
    monkeypatch.setattr(Far, "asked", 0)
    fsspec.register_implementation("far", Far, clobber=True)
    write(input="far://b/*.jsonl")
    refused = command("run", "job.yaml", code=1)
    assert said in refused.error
    assert sum(waits) == (pytest.approx(60) if isinstance(error, ConnectionError) else 0)
    assert Far.asked in looks
    assert Path("runs").exists() != isinstance(error, ConnectionError)


def test_the_whole_command_that_helps_is_printed(capfd):
    """A refused document, and a number of tasks that is not that of the run."""

    def refuse(payload, times):
        return 400 if payload["messages"][-1]["content"] == "Say text 1" else None

    skip = "--skip-bad-requests true"
    with FakeServer(status=refuse) as server:
        write(server, tasks=3)
        assert main(["run", "job.yaml"]) == 1
        said = capfd.readouterr().err
        assert "dead letters of rejected documents, set skip_bad_requests." in said
        command = "datatrove-ckpt run job.yaml"
        assert f"The whole command: {command} {skip}\nor: {command} --retry-errors true\n" in said
        assert main(["run", "job.yaml", "--worker", "--tasks", "2"]) != 0
        said = capfd.readouterr().err
        assert "Go on with 3 tasks (tasks: 3). To start over, choose another run_folder" in said
        assert f"The whole command: {command} --tasks 3\n" in said
        assert "set finished_from to the old run_folder" in said
        assert main(["run", "job.yaml", "--print-config"]) == 0
        Path("long.yaml").write_text(capfd.readouterr().out)
        assert main(["run", "long.yaml", "--executor.tasks=2"]) == 1
        long = "datatrove-ckpt run long.yaml --executor.tasks=3"
        assert f"The whole command: {long}\n" in capfd.readouterr().err
        assert main(["run", "long.yaml", "--pipeline.1.rollout_fn.prompt=Tell {text}"]) == 1
        assert " --pipeline.1.accept_changes=true\n" in capfd.readouterr().err
        assert main(["run", "job.yaml", *skip.split()]) == 0


_REQUESTED = (
    "This model's maximum context length is 2048 tokens. However, you requested {total} tokens "
    "({prompt} in the messages, {asked} in the completion)."
)


@pytest.mark.matrix(
    "words, prompt, asked",
    [
        (_REQUESTED, 17, 2040),
        ("This model's maximum context length is 2048 tokens", 1, 9000),
        (_REQUESTED, 1900, 200),
        (
            "You passed {prompt} input tokens and requested {asked} output tokens. However, the "
            "model's context length is only 2048 tokens, resulting in a maximum input length of 8 "
            "tokens.",
            17,
            2040,
        ),
        (
            "Requested token count exceeds the model's maximum context length of 2048 tokens. You "
            "requested a total of {total} tokens: {prompt} tokens from the input messages and "
            "{asked} tokens for the completion.",
            17,
            2040,
        ),
    ],
)
def test_the_command_that_is_printed_for_a_max_tokens_above_the_context_continues_the_run(
    words, prompt, asked, capfd
):
    def refuse(payload, times):
        return 400 if prompt + payload["max_tokens"] > 2048 else None

    with FakeServer(status=refuse) as server:
        server.error = words.format(prompt=prompt, asked=asked, total=prompt + asked)
        write(server)
        assert main(["run", "job.yaml", "--max-tokens", str(asked)]) == 1
        said = capfd.readouterr().err
        assert "the same command" not in said
        assert "run again" not in said
        assert "The prompt is longer" not in said
        printed = said.partition("The whole command: datatrove-ckpt ")[2].splitlines()[0]
        assert main(shlex.split(printed)) == 0


@pytest.mark.parametrize(
    "error, settings, said, unsaid",
    [
        (
            _REQUESTED.format(prompt=2060, asked=10, total=2070),
            {"max_tokens": 10},
            "The prompt is longer than the model's context.",
            "max_tokens is",
        ),
        (
            "Invalid schema for response_format 'answer'",
            {"json_schema": {"type": "object", "properties": {"a": {}}}},
            "Correct the schema, and set accept_changes. A strict schema",
            "If the server was at fault",
        ),
    ],
)
def test_a_refused_request_is_explained_by_what_the_server_says(
    error, settings, said, unsaid, command
):
    with FakeServer(status=Budget(0, 400) if "schema" in error else rejects_documents) as server:
        server.error = error
        write(server, **settings)
        told = command("run", "job.yaml", code=1).err
    assert said in told
    assert unsaid not in told


def test_documents_without_a_valid_answer_are_left_out_by_the_command_that_is_printed(capfd):
    """In the form of the file, which is the long one."""
    leave = "--pipeline.1.on_document_error=dead_letter"
    with FakeServer(lambda payload, times: "no" if "text 1" in str(payload) else "a") as server:
        write(server, choice=["a"], engine="none")
        main(["run", "job.yaml", "--print-config"])
        Path("job.yaml").write_text(capfd.readouterr().out)
        assert main(["run", "job.yaml"]) == 1
        said, asked = capfd.readouterr().err, len(server.payloads)
        assert "so the same command fails again" in said
        assert "If you change the rollout" not in said
        assert f"The whole command: datatrove-ckpt run job.yaml {leave}\n" in said
        assert main(["run", "job.yaml"]) == 1
        assert main(["run", "job.yaml", leave]) == 0
        assert len(server.payloads) == asked


@pytest.fixture
def to_csv(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(table, *flags, code=0, suffix="jsonl", folder="x", form="csv", **settings):
        write_table(Path(f"in.{suffix}"), table)
        with FakeServer(**settings) as server:
            job = f"run --input in.{suffix} --prompt {{id}} --endpoint {server.url} --model m"
            job += f" --run-folder {folder} --records-per-chunk 2 --output-format {form}"
            return command(*job.split(), *flags, code=code), len(server.payloads)

    return run


def written_csv():
    """The files, and their rows."""
    files = sorted(Path("x/output").glob("*.csv"))
    whole = pandas.concat(map(pandas.read_csv, files))
    assert json.loads(whole["rollout_results"].tolist()[0])[0]["finish_reason"] == "stop"
    return files, whole


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_csv_files_have_their_columns_in_the_first_line_and_lists_as_json(to_csv, command, suffix):
    text = 'a "b",\r\nc'
    tags = [["a", 'b"'], [], ["c"]]
    table = pa.table({"id": ["0", "1", "2"], "text": [text] * 3, "n": [None, 1.5, 2], "tags": tags})
    to_csv(table, suffix=suffix)
    files, whole = written_csv()
    assert len(files) == 2
    assert whole["text"].tolist() == [text] * 3
    assert whole["n"].tolist()[1:] == [1.5, 2]
    assert len({*whole["answer"]}) == 3
    command("verify", "x", "--full")
    command("export", "x", "all.parquet")
    command("export", "x", "all.csv")
    for frame in (whole, pandas.read_csv("all.csv")):
        assert [json.loads(cell) for cell in frame["tags"]] == tags
    assert "finish_reason" in command("show", "x") or "Columns: " in command("show", "x")
    before = [path.read_bytes() for path in files]
    to_csv(table, suffix=suffix)
    assert [path.read_bytes() for path in files] == before
    old = "--finished-from=x/output"
    said, _ = to_csv(table, old, suffix=suffix, folder="y", form="jsonl", code=2)
    assert "the old run wrote CSV" in said


@pytest.mark.parametrize("flag", [(), ("--explode=true",)])
def test_all_that_load_csv_load_texts(to_csv, command, flag):
    table = pa.table(
        {"id": ["007", "1e3", "-0"], "text": ["NA", "null", " "], "n": [2**53 + 1, None, 1]}
    )
    to_csv(table.append_column("none", pa.nulls(3)), *flag)
    found = OutputPath("x/output").to_pandas()
    assert found["n"].tolist() == [str(2**53 + 1), "", "1"]
    card = re.search("```python\n(.*?)```", Path("x/card.md").read_text(), re.DOTALL)[1]
    names = {}
    exec(card, names)
    command("export", "x", "all.parquet")
    whole = pq.read_table("all.parquet").to_pydict()
    for rows in (OutputPath("x/output").to_dataset()[:], names["dataset"][:], whole):
        for name in ("id", "text", "n", "none", "answer"):
            assert rows[name] == found[name].tolist()


_OF_SCHEMA = """{"type": "object", "properties": {"tags": {"type": "array"}}}"""


@pytest.mark.parametrize(
    "flags, column, value",
    [
        ([f"--json-schema={_OF_SCHEMA}"], "answer", {"tags": ["a", 'b"']}),
        (["--rollouts-per-document=3"], "answer", ['{"tags": ["a", "b\\""]}'] * 3),
        ([f"--json-schema={_OF_SCHEMA}", "--explode=true"], "tags", ["a", 'b"']),
    ],
)
def test_csv_has_answers_that_are_no_texts_as_json_after_a_stop_too(
    to_csv, command, flags, column, value
):
    def answer(payload, times):
        return '{"tags": ["a", "b\\""]}'

    names = [str(number) for number in range(7)]
    table = pa.table({"id": names, "text": names})
    stop = Budget()
    stop.left = 14 if column == "answer" and isinstance(value, list) else 4
    flags = [*flags, "--max-concurrent-generations=1", "--server-patience-seconds=1"]
    to_csv(table, *flags, code=1, answer=answer, status=stop)
    to_csv(table, *flags, answer=answer)
    files, whole = written_csv()
    assert [json.loads(cell) for cell in whole[column]] == [value] * 7
    command("verify", "x", "--full")
    command("export", "x", "all.csv")
    assert pandas.read_csv("all.csv")[column].tolist() == whole[column].tolist()
    if "--explode=true" not in flags:
        before = [path.read_bytes() for path in files]
        _, sent = to_csv(table, *flags, "--finished-from=x/output", folder="y", answer=answer)
        assert sent == 0
        assert [path.read_bytes() for path in sorted(Path("y/output").glob("*.csv"))] == before
