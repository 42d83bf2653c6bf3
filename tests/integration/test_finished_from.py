"""Half-done runs are taken over with ``finished_from``: what is not finished is asked again, and
rows are the same.
"""

import base64
import json
import shutil
import signal
import tempfile
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import pyarrow.parquet as pq
import pytest
from datatrove.data import Document
from datatrove.pipeline.writers import JsonlWriter, ParquetWriter

from datatrove_ckpt import InferenceConfig, InferenceRunner
from datatrove_ckpt.checkpoint.lock import Lock
from datatrove_ckpt.errors import CheckpointLocked, CheckpointMismatch, ServerRefused
from datatrove_ckpt.readers import JsonlReader
from datatrove_ckpt.rollouts import EmbedRollout, PromptRollout
from datatrove_ckpt.testing import FakeServer, outputs
from tests.datatrove_job import SIZE, TEMPLATE, Killer, rollout, start, text_of, write_input
from tests.jobs import chat, documents, rows, runner
from tests.patience import until
from tests.yaml_jobs import write_rows

YAML = """\
executor:
  class_path: LocalPipelineExecutor
  init_args:
    tasks: TASKS
    start_method: fork
    logging_dir: FOLDER/logs
    pipeline:
      - class_path: JsonlReader
        init_args: {data_folder: input}
      - class_path: InferenceRunner
        init_args:
          rollout_fn: tests.datatrove_job.rollout
          config: {server_type: endpoint, endpoint_url: "URL", model_name_or_path: fake, max_concurrent_generations: 3}
          output_writer:
            class_path: WRITER
            init_args: {output_folder: FOLDER/output, output_filename: "TEMPLATE", OPTION}
          checkpoints_local_dir: FOLDER/checkpoints
          records_per_chunk: SIZE
          skip_bad_requests: true
          finished_from: PLACES
"""
PARQUET = {
    "TEMPLATE": "${rank}_${chunk_index}.parquet",
    "WRITER": "ParquetWriter",
    "OPTION": "expand_metadata: true",
}
GZIP = {"template": f"{TEMPLATE}.gz", "compression": "gzip"}
OLD = "[output, checkpoints]"


def write_yaml(here, url, old=OLD, folder="new", **changes):
    """Writes job.yaml."""
    values = {"URL": url, "PLACES": old, "FOLDER": folder, "SIZE": str(SIZE), "TASKS": "1"}
    text = YAML
    for name, value in (
        {"TEMPLATE": TEMPLATE, "WRITER": "JsonlWriter", "OPTION": "compression: null"}
        | values
        | changes
    ).items():
        text = text.replace(name, value)
    (here / "job.yaml").write_text(text)


def rows_of(path):
    """The whole rows of a file, of which some may be torn."""
    if path.suffix == ".parquet":
        try:
            return list(pq.read_table(path).to_pylist())
        except ValueError:  # it has no footer yet
            return []
    rows = []
    for line in path.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):
            with suppress(json.JSONDecodeError):
                rows.append(json.loads(line))
    return rows


def finished(*folders):
    """The documents that have a result in an old output."""
    found = set()
    for path in [path for folder in folders for path in folder.rglob("*.*")]:
        if path.suffix not in (".jsonl", ".parquet") or not (
            "output" in path.parts or path.match("chunk_*")
        ):
            continue
        for row in rows_of(path):
            row = row.get("document", row) or {}
            if (row.get("metadata") or row).get("rollout_results"):
                found.add(row["id"])
    return found


def assert_written(folder, number):
    """A finished run of so many documents has each in its output once."""
    found = Counter(row["id"] for path in folder.iterdir() for row in rows_of(path))
    assert found == Counter(f"id {n}" for n in range(number) if "dropped" not in text_of(n))


def asked_first(server):
    """How often the first request of each document was sent, by id."""
    firsts = {f"first {text_of(n)}": f"id {n}" for n in range(1000)}
    return Counter({firsts[text]: times for text, times in server.asked.items() if text in firsts})


def take_over(here, command, number, done, old=OLD, **changes):
    """Runs a job with ``finished_from``, and the same job without it: both have the same rows."""
    with FakeServer() as server:
        write_yaml(here, server.url, old, **changes)
        command("run", "job.yaml")
        assert asked_first(server) == Counter(
            f"id {n}" for n in range(number) if f"id {n}" not in done
        )
        command("run", "job.yaml")
        command("verify", "job.yaml", "--full")
        write_yaml(here, server.url, "null", "reference", **changes)
        command("run", "job.yaml")
    new, reference = outputs(here / "new/output"), outputs(here / "reference/output")
    assert new.keys() == reference.keys()
    for name in reference:
        if name.endswith(".parquet"):
            wanted = pq.read_table(here / "reference/output" / name)
            assert pq.read_table(here / "new/output" / name).equals(wanted)
        else:
            assert new[name] == reference[name]
    assert_written(here / "new/output", number)


# datatrove's half-done runs, and ours under another number of tasks ------------------------------


@pytest.mark.matrix("seed", [1, 2, 0])
def test_a_killed_run_of_datatroves_is_taken_over(here, command, seed):
    killer = Killer(seed)
    number = killer.chance.randint(9, 40)
    write_input(here, number)
    with killer.server:
        for _ in range(killer.chance.randint(1, 3)):
            killer.run(
                here,
                killer.chance.randint(1, number),
                concurrent=killer.chance.choice([1, 3, 9]),
            )
        # It was killed before its first line.
        while not (done := finished(here / "output", here / "checkpoints")):
            killer.run(here, number)
    take_over(here, command, number, done)


def test_a_killed_run_with_skipped_requests_and_columns_of_metadata_is_taken_over(here, command):
    """The shape of the field's production job."""
    write_input(here, 60)
    killer = Killer(4, rejected="text 9")
    with killer.server:
        killer.run(here, 25, template=PARQUET["TEMPLATE"], size=8)
    done = finished(here / "output", here / "checkpoints")
    assert 8 < len(done) < 50
    assert "id 9" not in done
    take_over(here, command, 60, done, **PARQUET)


@pytest.mark.matrix("changes", [PARQUET, {}])
def test_a_stopped_run_of_ours_is_taken_over_by_another_number_of_tasks(here, command, changes):
    write_input(here, 13, 9, 8)
    with FakeServer(status=lambda asked, times: 401 if "text 9" in str(asked) else None) as server:
        write_yaml(here, server.url, "null", "old", TASKS="2", **changes)
        command("run", "job.yaml", code=1)
    done = finished(here / "old")
    assert 6 < len(done) < 28
    assert "id 9" not in done
    take_over(here, command, 30, done, "old", TASKS="3", **changes)


DATA = Path(__file__).parents[1] / "data"


@pytest.mark.matrix("release", ["0_8_0", "0_9_0"])
def test_a_killed_run_of_an_older_release_is_taken_over(here, command, release):
    shutil.copytree(DATA / f"datatrove_{release}", here, dirs_exist_ok=True)
    with FakeServer() as server:
        write_yaml(here, server.url)
        command("run", "job.yaml")
        assert asked_first(server) == Counter(["id 5", "id 10"])
    assert_written(here / "new/output", 11)


# one old run, with what kills and people do to it ------------------------------------------------
#
# Eleven documents in chunks of four, of which the first ten are finished: datatrove's runner was
# killed while document 10 waited for the answer of its second request. Document 5 was dropped.

NUMBER = 11
CHUNK_FILE = Path("checkpoints/00000/chunk_00002.jsonl")
DONE = {f"id {n}" for n in range(10) if n != 5}


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    folder = tmp_path_factory.mktemp("left")
    make(folder)
    return folder


def make(folder, **settings):
    write_input(folder, NUMBER)
    with FakeServer(hold_after=12) as server:
        process = start(folder, server.url, concurrent=1, **settings)
        try:
            until(lambda: is_left(folder))
        finally:
            process.kill()
        assert process.wait() == -signal.SIGKILL


def is_left(folder):
    """Whether all that the server has answered is on the disk."""
    last_chunk, lines = folder / "checkpoints/last_chunk/00000.txt", folder / CHUNK_FILE
    if not lines.exists() or lines.read_bytes().count(b"\n") < 2:
        return False
    return last_chunk.exists() and last_chunk.read_text() == "1"


@pytest.fixture
def job(here, left):
    """A copy of it."""
    shutil.copytree(left, here, dirs_exist_ok=True)
    return here


@pytest.mark.matrix("cut", ["glued", "last_chunk", "line", "file"])
def test_a_run_that_died_at_any_time_is_taken_over(job, command, cut):
    first, second = (job / CHUNK_FILE).read_bytes().splitlines(keepends=True)
    (job / "output/00000_chunk_2.jsonl").unlink()  # the killed run had it in memory, or has it
    done = set(DONE)
    if cut == "last_chunk":
        shutil.rmtree(job / "checkpoints/last_chunk")
    elif cut == "line":
        (job / CHUNK_FILE).write_bytes(first + second[:-20])
        done -= {"id 9"}
    elif cut == "glued":
        (job / CHUNK_FILE).write_bytes(first[:-20] + second)
        done -= {"id 8", "id 9"}
    else:
        path = job / "output/00000_chunk_0.jsonl"
        path.write_bytes(path.read_bytes()[:-30])
        done -= {"id 3"}
    assert finished(job / "output", job / "checkpoints") == done
    take_over(job, command, NUMBER, done)


@pytest.mark.matrix(
    ("settings", "name", "end", "lost", "changes"),
    [
        (GZIP, "00000_chunk_0.jsonl.gz", -6, 0, {}),
        (GZIP, "00000_chunk_0.jsonl.gz", None, 0, {}),
        ({"template": PARQUET["TEMPLATE"]}, "000_00000_0.parquet", -10, 4, PARQUET),
    ],
    ids=["gzip, cut", "gzip", "parquet, cut"],
)
def test_output_of_other_kinds_is_taken_over_up_to_its_damage(
    here, command, settings, name, end, lost, changes
):
    make(here, **settings)
    path = here / "output" / name
    path.write_bytes(path.read_bytes()[:end])
    take_over(here, command, NUMBER, DONE - {f"id {n}" for n in range(lost)}, **changes)


def test_a_document_with_another_text_or_id_is_asked_again(job, command):
    path = job / "input/0.jsonl"
    text = path.read_text()
    path.write_text(
        text.replace('"text": "text 8"', '"text": "text 508"').replace(
            '"id": "id 2"', '"id": "id 502"'
        )
    )
    with FakeServer() as server:
        write_yaml(job, server.url)
        command("run", "job.yaml")
        assert asked_first(server) == Counter(["id 2", "id 5", "id 508", "id 10"])


def test_nothing_to_take_over_is_refused_before_the_first_request(job, command):
    with FakeServer() as server:
        for places, rollouts, says in (
            ("nowhere", 1, "finished_from: nowhere does not exist"),
            ("input", 1, "10 documents without results under 'rollout_results'"),
            (OLD, 3, "no document has over 1 result, and rollouts_per_document is 3"),
        ):
            config = f"config: {{rollouts_per_document: {rollouts}, "
            write_yaml(job, server.url, places, **{"config: {": config})
            assert says in command("run", "job.yaml", code=None).err
            shutil.rmtree(job / "new")
        assert not server.asked


def test_a_pattern_names_the_files_of_a_task_and_the_setting_may_come_and_go(job, command):
    """It is no part of the run's identity."""
    rejected = {"text 10 twice"}
    refuse = lambda asked, times: 401 if any(text in str(asked) for text in rejected) else None  # noqa: E731
    with FakeServer(status=refuse) as server:
        write_yaml(job, server.url, '"output/${rank}_*"')
        assert (
            "output/${rank}_* has 7 finished documents in 3 files"
            in command("run", "job.yaml", code=1).err
        )
        rejected.clear()
        write_yaml(job, server.url, "null")
        command("run", "job.yaml")
        assert asked_first(server).keys() >= {"id 5", "id 10"}
        assert not asked_first(server).keys() & {f"id {n}" for n in (0, 1, 2, 3, 4, 6, 7)}
        command("verify", "job.yaml", "--full")
    assert_written(job / "new/output", NUMBER)


def test_an_old_output_at_a_url_is_taken_over(job, server, empty_memory_file_system):
    fsspec.filesystem("memory").put(str(job / "output"), "/old", recursive=True)
    config = InferenceConfig("endpoint", "fake", endpoint_url=server.url)
    for number, places in enumerate(("memory://old", ["memory://old/${rank}_*"], job / "output")):
        writer = JsonlWriter(f"new{number}", TEMPLATE, compression=None)
        InferenceRunner(rollout, config, writer, finished_from=places).run(
            JsonlReader("input").run()
        )
        assert_written(job / f"new{number}", NUMBER)
        assert asked_first(server).keys() & DONE == {"id 8", "id 9"} & asked_first(server).keys()


@pytest.mark.parametrize("checkpoints", [None, "checkpoints"])
def test_vectors_keep_their_type(here, server, checkpoints):
    vector = base64.b64encode(np.arange(4, dtype="<f4") / 3).decode()
    server.paths["/v1/embeddings"] = lambda asked: {
        "data": [{"index": 0, "embedding": vector}],
        "model": "fake",
    }
    config = InferenceConfig("endpoint", "fake", endpoint_url=server.url)
    write_input(here, 9)
    found = []
    for folder, limit, old in (("old", 6, None), ("new", -1, "old"), ("reference", -1, None)):
        writer = ParquetWriter(folder, "${rank}_${chunk_index}.parquet", expand_metadata=True)
        reader = JsonlReader("input", limit=limit)
        InferenceRunner(
            EmbedRollout(),
            config,
            writer,
            finished_from=old,
            checkpoints_local_dir=checkpoints and f"{folder}-{checkpoints}",
        ).run(reader.run())
        found.append(pq.read_table(next(Path(folder).iterdir())).sort_by("id"))
    assert len(server.payloads) == 6 + 3 + 9
    assert found[1].equals(found[2])


# metadata ----------------------------------------------------------------------------------------


async def translate(document, generate):
    document.metadata["length"] = len(document.text)
    del document.metadata["raw"]
    return await generate(chat(f"{document.metadata['lang']}: {document.text}"))


def translations(*languages):
    return [
        Document(f"text {n}", f"id {n}", metadata={"lang": lang, "raw": "<p>"})
        for n in range(3)
        for lang in languages
    ]


def speak(payload, times):
    return f"in {payload['messages'][-1]['content']}"


@pytest.mark.parametrize("old", ["output", "checkpoints"])
def test_documents_of_one_id_and_text_keep_results_of_their_own_metadata(tmp_path, old):
    chunk = 5 if old == "checkpoints" else 2
    with FakeServer(
        speak, status=lambda asked, times: 401 if "text 2" in str(asked) else None
    ) as server:
        stopped = runner(tmp_path / "old", server, translate, records_per_chunk=chunk)
        with pytest.raises(ServerRefused):
            stopped.run(translations("French", "German"))
    with FakeServer(speak) as server:
        taken = runner(tmp_path / "new", server, translate, finished_from=tmp_path / "old" / old)
        taken.run(translations("French", "German"))
        assert server.asked.total() == 2
        assert taken.stats.stats["requests"].total == 6, (
            "what was taken over counts as its requests"
        )
        runner(tmp_path / "reference", server, translate).run(translations("French", "German"))
    assert outputs(tmp_path / "new/output") == outputs(tmp_path / "reference/output")


def test_a_document_with_other_metadata_is_asked_again_and_the_first_is_named(tmp_path, log):
    with FakeServer(speak) as server:
        runner(tmp_path / "old", server, translate).run(translations("French"))
        server.asked.clear()
        runner(tmp_path / "new", server, translate, finished_from=tmp_path / "old/output").run(
            translations("German")
        )
        assert server.asked.total() == 3
    assert {row["metadata"]["lang"] for row in rows(tmp_path / "new")} == {"German"}
    (warning,) = log.said("requested again")
    assert "the document 'id 0' is requested again" in warning
    assert "its old metadata has another 'lang'" in warning


def test_a_new_key_is_asked_again_or_named_where_a_function_may_have_removed_it(tmp_path, log):
    for name, rollout_fn, asked, says in (
        ("ready", PromptRollout("{text}"), 2, "its old metadata has another 'page'"),
        ("function", translate, 0, "the document 'id 1' is taken over without 'page', which"),
    ):
        with FakeServer(speak) as server:
            runner(tmp_path / f"old {name}", server, rollout_fn).run(translations("French"))
            server.asked.clear()
            new = [
                replace(document, metadata=({"page": n} if n else {}) | document.metadata)
                for n, document in enumerate(translations("French"))
            ]
            runner(
                tmp_path / name, server, rollout_fn, finished_from=tmp_path / f"old {name}/output"
            ).run(new)
            assert server.asked.total() == asked
        assert says in " ".join(log)
    assert [row["metadata"]["page"] for row in rows(tmp_path / "ready")[1:]] == [1, 2]


def test_an_old_run_at_work_is_not_taken_over(tmp_path, server):
    runner(tmp_path / "old", server).run(documents(3))
    lock = Lock(tmp_path / "old/checkpoints/00000/lock")
    try:
        for place in ("old", "old/checkpoints", "old/checkpoints/${rank}"):
            with pytest.raises(
                CheckpointLocked,
                match=r"works on the old run, in .*/old/checkpoints/00000\. Stop it",
            ):
                runner(tmp_path / "new", server, finished_from=str(tmp_path / place)).run(
                    documents(3)
                )
    finally:
        lock.release()


def test_a_rank_that_is_refused_leaves_no_temporary_file_open(tmp_path, server, monkeypatch):
    for name in ("old", "new"):
        runner(tmp_path / name, server).run(documents(1), 0, 2)
    opened = []
    temporary_file = tempfile.TemporaryFile

    def note(*arguments, **options):
        opened.append(temporary_file(*arguments, **options))
        return opened[-1]

    monkeypatch.setattr(tempfile, "TemporaryFile", note)
    other = runner(
        tmp_path / "new", server, records_per_chunk=7, finished_from=tmp_path / "old/output"
    )
    with pytest.raises(CheckpointMismatch):
        other.run(documents(1), 1, 2)
    assert [file.closed for file in opened] == [True]


# columns of the answers alone, rows of items, rows without a text ---------------------------------


def says_items(payload, times):
    """A list of as many items as the prompt's number, of more than one form."""
    number = int(payload["messages"][-1]["content"].partition("#")[2])
    forms = [{"word": "a", "n": 7}, {"word": "b", "text": None}, "plain", ["x"]]
    return json.dumps([forms[at % 4] for at in range(number)])


ROWS = [{"id": f"r{n}", "q": f"{n} #{n % 4}", "n": n % 2, "tags": [n]} for n in range(9)]


@pytest.fixture
def steps(here, command):
    """Runs jobs over rows without a text, each with its own rows and flags.

    Returns what each was asked.
    """

    def run(folder, rows, *flags, code=0):
        write_rows(here / f"{folder}.jsonl", rows)
        path = here / "in.jsonl"  # the same path, which is in the output
        shutil.copy(here / f"{folder}.jsonl", path)
        with FakeServer(says_items) as server:
            job = ["--input=in.jsonl", "--prompt={q}", "--model=m", f"--endpoint={server.url}"]
            settings = [f"--run-folder={folder}", "--records-per-chunk=4", *flags]
            said = command("run", *job, *settings, code=code)
            return server.asked, said

    return run


def equal(folder, reference, output):
    assert outputs(folder).keys() == outputs(reference).keys()
    for name, data in outputs(reference).items():
        if output == "parquet":
            assert pq.read_table(folder / name).equals(pq.read_table(reference / name))
        else:
            assert outputs(folder)[name] == data


@pytest.mark.parametrize("explode", ["true", "false"])
@pytest.mark.parametrize("results", ["true", "false"])
@pytest.mark.parametrize("output", ["jsonl", "parquet", "csv"])
def test_only_rows_that_changed_are_asked_again(here, steps, command, explode, results, output):
    flags = [f"--explode={explode}", f"--rollout-results={results}", f"--output-format={output}"]
    # Other rows of tables would give other columns: each file has all of them.
    forms = [*ROWS]
    if output == "parquet":
        forms = [{**row, "q": f"{row['id']} #2"} for row in ROWS]
    steps("old", forms, *flags)
    changed = [*forms]
    changed[2] = {**forms[2], "q": "changed #2"}
    changed.append(
        {**forms[3], "id": "added", "q": "added #3" if output != "parquet" else "added #2"}
    )
    asked, _ = steps("new", changed, *flags, "--finished-from=old/output")
    dropped = {f"{n} #0" for n in range(9) if n % 4 == 0} & {row["q"] for row in forms}
    if explode == "false":
        dropped = set()
    assert asked.keys() == {changed[2]["q"], changed[-1]["q"], *dropped}
    steps("reference", changed, *flags)
    equal(here / "new/output", here / "reference/output", output)
    command("verify", "new", "--full")


def test_rows_of_rows_of_items_keep_their_numbers(here, steps):
    """The input is the output of a run with ``explode``, whose rows have a column ``n``."""
    flags = ["--explode=true", "--rollout-results=false"]
    rows = [{"id": f"r/{n}", "q": f"x{n} #{n + 1}", "n": n, "answer": "before"} for n in range(3)]
    steps("old", rows, *flags)
    asked, _ = steps("new", rows, *flags, "--finished-from=old/output")
    assert not asked
    assert outputs(here / "new/output") == outputs(here / "old/output")


@pytest.mark.parametrize("cut", [30, 1])
@pytest.mark.parametrize("name", [str, int])
def test_a_document_whose_rows_a_damaged_file_may_lack_is_asked_again(here, steps, cut, name):
    flags = ["--explode=true", "--rollout-results=false"]
    rows = [{"id": name(n), "q": f"{n} #3"} for n in range(4)]
    steps("old", rows, *flags)
    path = here / "old/output/00000_chunk_00000.jsonl"
    shutil.copytree(here / "old", here / "reference")
    path.write_bytes(path.read_bytes()[:-cut])
    asked, _ = steps("new", rows, *flags, "--finished-from=old/output")
    assert asked == {"3 #3": 1}
    assert outputs(here / "new/output") == outputs(here / "reference/output")


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("--explode=true", "--explode=false", "wrote items. Also set explode"),
        (
            "--rollout-results=false",
            "--rollout-results=true",
            "rollout_results: false -> (not set)",
        ),
    ],
)
def test_another_form_of_rows_is_refused(steps, old, new, message):
    steps("old", ROWS, old)
    asked, said = steps("new", ROWS, new, "--finished-from=old/output", code=None)
    assert message in said.error
    assert not asked


def test_results_that_were_written_are_taken_over_without_them(here, steps):
    steps("old", ROWS)
    flags = ["--rollout-results=false", "--finished-from=old/output", "--accept-changes=true"]
    asked, _ = steps("new", ROWS, *flags)
    assert not asked
    steps("reference", ROWS, "--rollout-results=false")
    assert outputs(here / "new/output") == outputs(here / "reference/output")
