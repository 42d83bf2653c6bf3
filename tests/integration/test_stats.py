"""stats.json, which datatrove's card and benchmark read, has the numbers of all attempts, and of
each rank once.
"""

import json

import pytest
from datatrove.executor import LocalPipelineExecutor as DatatroveExecutor
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.inference.dataset_card_generator import load_job_stats
from datatrove.pipeline.readers import JsonlReader as DatatroveReader

from datatrove_ckpt.executors.local import LocalPipelineExecutor
from datatrove_ckpt.readers import JsonlReader
from datatrove_ckpt.testing import FakeServer
from tests.crashes import CrashingDisk, assert_same_output_after_crash, disk_in_place
from tests.jobs import ask, chat, runner
from tests.yaml_jobs import write_rows

pytestmark = pytest.mark.usefixtures("code_described_once")
TIMES = ("inference_time",)


class WithoutDrop(PipelineStep):
    """Counts as datatrove's filters do. Those need packages that are not there."""

    name = "without drop"
    type = "filter"

    def run(self, data, rank=0, world_size=1):
        for document in data:
            self.stat_update("total")
            with self.track_time():
                dropped = "drop" in document.text
            self.stat_update("dropped" if dropped else "forwarded")
            if not dropped:
                self.update_doc_stats(document)
                yield document


def write_input(folder, rows=10, files=2):
    """Texts of different lengths.

    Every third row, the last one included, is dropped by the filter.
    """
    (folder / "input").mkdir(parents=True)
    for file in range(files):
        lines = [
            {
                "id": f"{file} {row}",
                "text": f"row {file} {row} " + "drop " * (row % 3 == rows % 3 - 1) + "x " * row,
            }
            for row in range(rows)
        ]
        write_rows(folder / "input" / f"{file}.jsonl", lines)


def pipeline(folder, server, rollout=ask, **changes):
    reader = JsonlReader(str(folder / "input"), add_file_path=False)
    return [reader, WithoutDrop(), runner(folder, server, rollout, seek=True, **changes)]


def run(steps, rank=0, world_size=1):
    """Runs a rank as an executor does. Returns what it would save, without times."""
    data = None
    for step in steps:
        data = step(data, rank, world_size)
    return numbers(steps)


def numbers(steps):
    return [
        {
            name: metric.to_dict()
            for name, metric in step.stats.stats.items()
            if metric.n and name not in TIMES
        }
        for step in steps
    ]


def flat(found):
    """Each number by its name, to be compared up to the rounding of floats in means and
    variances.
    """
    return {
        f"{step} {label} {name}": value
        for step, metrics in enumerate(found)
        for label, metric in metrics.items()
        for name, value in (metric if isinstance(metric, dict) else {"total": metric}).items()
        if name != "unit"
    }


async def two_questions(document, generate):
    """The second one is rejected for some documents."""
    first = await generate(chat(document.text))
    await generate(chat(f"again: {document.text}"))
    return first


def rejects_some(payload, times):
    text = payload["messages"][-1]["content"]
    return 400 if text.startswith("again") and text.split()[3] == "3" else None


@pytest.mark.matrix(
    "counted", [("rename", "remove"), ("create", "write", "rename", "remove", "commit")]
)
def test_stats_of_all_steps_are_those_of_one_attempt_after_a_crash_at_every_effect(ram, counted):
    """Each crash is followed by a resume, and each of those that completes has the same stats."""
    write_input(ram / "job", rows=5)
    expected = []
    completed = 0

    with FakeServer(status=rejects_some) as server:

        def attempt(folder):
            nonlocal completed
            steps = pipeline(
                folder, server, two_questions, records_per_chunk=3, skip_bad_requests=True
            )
            found = run(steps)
            if expected:
                assert flat(found) == pytest.approx(flat(expected))
            else:
                expected.extend(found)
            completed += 1

        report = assert_same_output_after_crash(attempt, ram / "job", counted=counted, recoveries=0)
    print(report)
    reader, filtered, inference = expected
    assert (reader["documents"]["total"], reader["doc_len"]["n"], reader["input_files"]) == (
        10,
        10,
        2,
    )
    assert (filtered["dropped"], filtered["forwarded"]) == (4, 6)
    assert (
        inference["documents_processed"]["total"] + inference["skipped_bad_requests"]["total"] == 6
    )
    assert inference["failed_requests"]["total"] == 2
    assert completed > 5 * len(counted)


def test_each_rank_of_one_step_object_has_stats_of_its_own(tmp_path, server):
    """datatrove's Slurm executor runs the ranks of a task with the same steps."""
    write_input(tmp_path, files=3)
    steps = pipeline(tmp_path, server)
    found = [run(steps, rank, 3) for rank in range(3)]
    assert [each[0]["documents"]["total"] for each in found] == [10, 10, 10]
    assert [each[2]["documents_processed"]["total"] for each in found] == [6, 6, 6]


@pytest.mark.matrix("kind", [LocalPipelineExecutor, DatatroveExecutor])
def test_a_finished_rank_that_starts_again_has_the_same_stats(tmp_path, server, kind):
    write_input(tmp_path, files=2)
    stats, saved = tmp_path / "logs/stats.json", []
    for _ in range(2):
        steps = pipeline(tmp_path, server)
        kind(steps, tasks=2, workers=1, logging_dir=str(tmp_path / "logs")).run()
        saved.append(json.loads(stats.read_text()))
        for marker in (tmp_path / "logs/completions").iterdir():
            marker.unlink()
    assert saved[0][2] == saved[1][2]
    assert saved[0][0]["stats"] == saved[1][0]["stats"]
    card = load_job_stats(stats)
    assert card is not None
    assert (card.document_count, card.prompt_tokens_total) == (
        20,
        sum(len(text.split()) for text in server.asked),
    )


def total(metric):
    return metric["total"] if isinstance(metric, dict) else metric


def test_readers_that_count_need_nothing_added(tmp_path, server):
    """They read all documents again."""
    write_input(tmp_path)

    def steps():
        return [
            DatatroveReader(str(tmp_path / "input")),
            WithoutDrop(),
            runner(tmp_path, server),
        ]

    disk = CrashingDisk(4, tmp_path, False, ("rename",))  # two chunks of several are committed
    with disk_in_place(disk):
        run(steps())
    assert disk.crashed_at is not None
    next(disk.survivors())
    reader, filtered, inference = run(steps())
    assert (reader["documents"]["total"], filtered["forwarded"], filtered["dropped"]) == (20, 12, 8)
    assert inference["documents_processed"]["total"] == 12


def test_an_input_that_grew_after_its_end_was_committed(tmp_path, server):
    write_input(tmp_path, files=1)
    run(pipeline(tmp_path, server))
    with (tmp_path / "input/0.jsonl").open("a") as file:
        file.writelines(
            json.dumps({"id": f"new {row}", "text": f"new row {row}"}) + "\n" for row in range(4)
        )
    reader, _, inference = run(pipeline(tmp_path, server))
    assert inference["documents_processed"]["total"] == 6 + 4
    assert reader["documents"]["total"] == 14
    assert set(server.asked.values()) == {1}


@pytest.mark.slow
def test_a_retry_of_dead_letters_adds_to_the_stats(tmp_path):
    """Whatever comes last: the retry, one that finds nothing to do, or a run that begins again."""
    write_input(tmp_path)
    bad, logs = {"row 0 4", "row 1 4"}, tmp_path / "logs"

    def status(payload, times):
        return 400 if payload["messages"][-1]["content"][:7] in bad else None

    def execute(retry):
        one = runner(tmp_path, server, skip_bad_requests=True, retry_dead_letters=retry)
        steps = [JsonlReader(str(tmp_path / "input")), WithoutDrop(), one]
        LocalPipelineExecutor(
            steps, tasks=2, workers=1, logging_dir=str(logs), skip_completed=False
        ).run()
        return [entry["stats"] for entry in json.loads((logs / "stats.json").read_text())]

    def expect(found, processed, requests):
        inputs, filtered, inference = found
        assert (total(inputs["documents"]), filtered["forwarded"]) == (20, 12)
        assert total(inference["documents_processed"]) == processed
        assert total(inference.get("skipped_bad_requests", 0)) == 12 - processed
        assert total(inference["requests"]) == requests

    with FakeServer(status=status) as server:
        expect(execute(retry=False), 10, 12)
        bad.remove("row 0 4")
        expect(execute(retry=True), 11, 14)
        bad.clear()
        for retry in (True, False):
            expect(execute(retry), 12, 15)
