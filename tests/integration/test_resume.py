"""Where a resumed run continues: by seeking if the reader can, else by counting, and never at a
wrong document.
"""

import asyncio
import itertools
import json
import pickle

import pytest
from datatrove.pipeline.readers import JsonlReader as OriginalJsonl

from datatrove_ckpt.checkpoint.commits import read_commits
from datatrove_ckpt.errors import ConfigError, DocumentFailed
from datatrove_ckpt.readers import JsonlReader, SeekingReader
from datatrove_ckpt.readers.inputs import RowBlock
from tests.crashes import EFFECTS, assert_same_output_after_crash
from tests.jobs import ask, ids, runner
from tests.patience import until
from tests.yaml_jobs import write_input, write_rows

NUMBER = 20


@pytest.fixture
def folder(ram):
    """Three files of documents, below an empty job."""
    texts = [f"text {index}" for index in range(NUMBER)]
    write_input(ram / "job", texts[:9], texts[9:10], texts[10:])
    return ram / "job"


def read(folder, reader=JsonlReader, step=None, counter=None):
    data = reader(str(folder / "input"), add_file_path=False).run()
    data = step(data) if step else data
    for document in data:
        if counter is not None:
            counter.append(document.id)
        yield document


class StopsAt:
    """A rollout that fails at one document until ``state`` names another."""

    def __init__(self, bad, folder=None):
        self.state = {"bad": bad}
        self.folder = folder

    async def __call__(self, document, generate):
        if document.id == self.state["bad"]:
            while self.folder and not committed(self.folder):
                await asyncio.sleep(0.001)
            raise RuntimeError("as asked")
        return await ask(document, generate)


def interrupted(folder, server, data, bad="id 15", **settings):
    """A step whose first attempt ended at a document."""
    rollout = StopsAt(bad, folder)
    step = runner(
        folder,
        server,
        rollout,
        records_per_chunk=4,
        config={"max_concurrent_generations": 1},
        **settings,
    )
    with pytest.raises(DocumentFailed):
        step.run(data)
    rollout.state["bad"] = ""
    return step


def committed(folder):
    """How many documents lie in the unbroken run of commits; everything beyond is read again."""
    commits = read_commits(folder / "checkpoints/00000/commits.jsonl")
    return max((commit.next_ordinal for commit in commits.values()), default=0)


def drop_odd(data):
    yield from (document for document in data if int(document.id.split()[1]) % 2 == 0)


def in_batches(data):
    """A filter that reads ahead."""
    batch = []
    for document in data:
        batch.append(document)
        if len(batch) == 3:
            yield from batch
            batch = []
    yield from batch


@pytest.mark.matrix("step", [drop_odd, in_batches])
def test_a_seeking_reader_is_asked_only_for_what_comes_after_the_last_commit(
    folder, server, log, step
):
    again = interrupted(folder, server, read(folder, step=step), "id 14", seek=True)
    done = committed(folder)
    seen = []
    again.run(read(folder, step=step, counter=seen))
    assert done >= 4
    assert seen[0] == f"id {2 * done if step is drop_odd else done}"
    expected = [f"id {index}" for index in range(NUMBER) if step is not drop_odd or index % 2 == 0]
    assert ids(folder) == expected
    assert set(server.asked.values()) == {1}
    assert log.said(", by seeking")


class FirstFive:
    """A step that keeps count."""

    def run(self, data):
        yield from itertools.islice(data, 15)


class Once:
    """A user's function that keeps the ids it has seen."""

    def __init__(self):
        self.seen = set()

    def __call__(self, document):
        key = str(document.metadata["key"])
        is_new = key not in self.seen
        self.seen.add(key)
        return is_new


class Filter:
    """As datatrove's filters, which need packages that are not installed here."""

    exclusion_writer = None

    def __init__(self, keeps=lambda document: document.id != "id 1"):
        self.keeps = keeps

    def run(self, data):
        yield from (document for document in data if self.keeps(document))


def datatroves(name):
    """A filter with the name of one of datatrove's steps."""
    module, _, kind = name.rpartition(".")
    return type(kind, (Filter,), {"__module__": f"datatrove.pipeline.{module}"})


class OwnReader(JsonlReader):
    pass


def numbered():
    """An adapter that numbers the documents."""
    numbers = itertools.count()

    def adapter(self, data, path, id_in_file):
        return {"text": data["text"], "id": f"id {next(numbers)}"}

    return adapter


def documents(folder, kind=JsonlReader, **options):
    return kind(str(folder / "input"), add_file_path=False, **options).run()


def key(self, data, path, id_in_file):
    return {**data, "metadata": {"key": int(data["id"].split()[1]) % 18}}


_STEPS = {
    "a class of the user": (lambda folder: FirstFive().run(documents(folder)), 15, "FirstFive"),
    "a filter of datatrove": (
        lambda folder: datatroves("filters.regex_filter.RegexFilter")().run(documents(folder)),
        NUMBER,
        None,
    ),
    "a function in a filter": (
        lambda folder: datatroves("filters.lambda_filter.LambdaFilter")(Once()).run(
            documents(folder, adapter=key)
        ),
        18,
        "LambdaFilter, the adapter key of JsonlReader",
    ),
    "an adapter": (
        lambda folder: documents(folder, adapter=numbered()),
        NUMBER,
        "the adapter numbered.<locals>.adapter of JsonlReader",
    ),
    "a reader of the user": (lambda folder: documents(folder, OwnReader), NUMBER, "OwnReader"),
}


@pytest.mark.matrix("case", _STEPS)
def test_a_resume_seeks_only_past_steps_that_are_known_to_keep_nothing(folder, server, log, case):
    data, count, name = _STEPS[case]
    interrupted(folder, server, data(folder), "id 12").run(data(folder))
    expected = [f"id {index}" for index in range(count)]
    assert ids(folder) == [one for one in expected if name is not None or one != "id 1"]
    assert bool(log.said(", by seeking")) is (name is None)
    assert name is None or log.said(f"because {name} may keep state")


class ReaderOfTheRecipe(SeekingReader, OriginalJsonl):
    """A format of its own, as "How to add a reader" says; its place is the number of a line."""

    format = "lines"
    read = 0

    def blocks(self, name, at):
        self._file_extent.per = 40.0
        (first,) = at or (0,)
        lines = self.data_folder.open(name, "rb").read().splitlines()
        for number, line in enumerate(lines[first:], first + 1):
            type(self).read += 1
            yield RowBlock("line {}", [(json.loads(line), number - 1, (number,), number)])


def test_a_reader_that_is_made_by_the_recipe_seeks_at_a_resume(folder, server, log):
    step = interrupted(folder, server, documents(folder, ReaderOfTheRecipe))
    done = committed(folder)
    ReaderOfTheRecipe.read = 0
    step.run(documents(folder, ReaderOfTheRecipe))
    assert ids(folder) == [f"id {index}" for index in range(NUMBER)]
    assert done >= 4
    assert ReaderOfTheRecipe.read == NUMBER - done
    assert "by seeking" in log.said(f"Skipped {done} finished documents")[0]


def twice(data):
    for document in data:
        yield document
        yield document


def twice_by_other_processes(data):
    for document in data:
        yield pickle.loads(pickle.dumps(document))
        yield pickle.loads(pickle.dumps(document))


@pytest.mark.parametrize("step", [twice, twice_by_other_processes])
def test_documents_that_do_not_come_in_order_are_counted(folder, server, log, step):
    undisturbed = [document.id for document in read(folder, step=step)]
    again = interrupted(folder, server, read(folder, step=step), seek=True)
    again.run(read(folder, step=step))
    assert ids(folder) == undisturbed
    assert log.said("reorders or multiplies documents")


def test_an_order_that_breaks_behind_a_saved_position_stops_the_rank(folder, server):
    def last_first_again(data):
        kept = list(data)
        yield from kept
        until(lambda: committed(folder))
        yield kept[0]

    rows = [{"id": f"id {index}", "text": f"text {index}"} for index in range(200)]
    write_rows(folder / "input/3.jsonl", rows)
    # Each takes two of the 1,024 files that a user may usually open.
    few = {"max_concurrent_generations": 50}
    with pytest.raises(ConfigError, match="a resume would lose some"):
        runner(folder, server, records_per_chunk=4, seek=True, config=few).run(
            read(folder, step=last_first_again)
        )


@pytest.mark.matrix("counted", [("rename",), EFFECTS], ids=["some", "all"])
@pytest.mark.usefixtures("code_described_once")
def test_a_seeking_job_ends_the_same_after_a_crash_at_every_effect(folder, server, counted):
    def attempt(folder):
        runner(folder, server, records_per_chunk=8).run(read(folder))

    assert_same_output_after_crash(attempt, folder, counted=counted, recoveries=0)
