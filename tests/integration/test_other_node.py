"""A node that comes back: its disk has an old checkpoint, and another node has continued from the
mirror.
"""

import shutil
from unittest.mock import Mock

import pandas
import pytest
from datatrove.io import get_datafolder

from datatrove_ckpt.common.object_store import ObjectStore
from datatrove_ckpt.testing import FakeServer
from tests.jobs import Budget
from tests.yaml_jobs import endpoint, job_yaml, write_job, write_rows

MORE = """\
          records_per_chunk: 2
          checkpoints_remote_dir: MIRROR
          mirror_seconds: 1000
"""
ONE_BY_ONE = "max_concurrent_generations: 1, max_concurrent_documents: 1"
LETTERS = "--pipeline.1.on_document_error=dead_letter"
DOCUMENTS = 8
ALL = ["00000", "00001"]


class Bills(Budget):
    """Counts what is answered. What is in ``bad`` never is."""

    def __init__(self):
        super().__init__(1000)
        self.paid = 0
        self.bad = set()

    def __call__(self, payload, times):
        if payload["messages"][-1]["content"] in self.bad:
            return 400
        refused = super().__call__(payload, times)
        self.paid += refused is None
        return refused


class Cluster:
    """Nodes with disks of their own, which share a mirror, an output folder and one for logs. Two
    tasks of four documents, one after the other.
    """

    def __init__(self, folder, command, server, bills, where="local"):
        self.bills = bills
        self._command = command
        self._folder = folder
        self._where = where
        base = folder
        if where == "remote":
            base = f"memory://{folder}"
        self._output = f"{base}/output"
        text = job_yaml(f"{endpoint(server)}, {ONE_BY_ONE}", tasks=2, output=self._output)
        text = text.replace("workers: 1\n", "workers: 1\n    ranks_at_once: 1\n")
        texts = [f"text {n}" for n in range(DOCUMENTS)]
        mirrored = MORE.replace("MIRROR", f"{base}/mirror")
        write_job(folder, text + mirrored, texts[:4], texts[4:])

    def __call__(self, node, name, *options, code=0):
        settings = [f"--pipeline.1.checkpoints_local_dir={self.disk(node)}"]
        if self._where == "shared":  # and mounted elsewhere on each node
            mount = self._folder / f"mounted-on-{node}"
            if not mount.exists():
                (self._folder / "output").mkdir(exist_ok=True)
                mount.symlink_to(self._folder / "output")
            settings.append(f"--pipeline.1.output_writer.output_folder={mount}")
        return self._command(name, "job.yaml", *settings, *options, code=code)

    def disk(self, node):
        return self._folder / node

    def run_until(self, node, answers):
        """The node is lost after so many answers."""
        self.bills.left = answers
        self(node, "run", code=1)
        self.bills.left = 1000

    def files(self, output=None):
        folder = get_datafolder(output or self._output)
        return {name: folder.cat_file(name) for name in sorted(folder.find(""))}

    def expected(self):
        """The output of a run that nothing interrupts."""
        folders = ["checkpoints_local_dir", "checkpoints_remote_dir", "output_writer.output_folder"]
        settings = [f"--pipeline.1.{name}=whole/{name}" for name in folders]
        self._command("run", "job.yaml", "--executor.logging_dir=whole/logs", *settings)
        self.bills.paid = 0
        return self.files("whole/output_writer.output_folder")

    def markers(self):
        return sorted(path.name for path in (self._folder / "logs/completions").glob("*"))


@pytest.fixture
def bills():
    return Bills()


@pytest.fixture
def server(bills):
    with FakeServer(status=bills) as server:
        yield server


@pytest.fixture
def cluster(here, command, server, bills):
    return Cluster(here, command, server, bills)


DONE = {
    "finish": lambda cluster: cluster("b", "run"),
    "kill": lambda cluster: cluster.run_until("b", 2),
    "worker": lambda cluster: cluster("b", "run", "--worker"),
}
"""What the other node did."""


@pytest.mark.matrix("done", DONE)
@pytest.mark.parametrize("where", ["local", "shared", "remote"])
def test_a_node_goes_on_where_another_one_has_continued(
    here, command, server, bills, where, done, empty_memory_file_system
):
    cluster = Cluster(here, command, server, bills, where)
    expected = cluster.expected()
    cluster.run_until("a", 5)  # one of the second task
    DONE[done](cluster)
    before = cluster.markers()
    assert before == ALL[: 1 + (done != "kill")]
    assert "another node has continued 1 task" in cluster("a", "doctor")
    assert "no problem" in cluster("a", "verify", code=3 * (done == "kill"))
    assert "There is nothing to repair" in cluster("a", "repair")
    assert cluster.markers() == before
    assert f"{DOCUMENTS} of {DOCUMENTS} documents" in cluster("a", "run")
    assert (cluster.markers(), bills.paid) == (ALL, DOCUMENTS)
    assert cluster.files() == expected
    assert (cluster.disk("a") / "00001.replaced-1").exists(), "what it had is kept"


def test_dead_letters_that_another_node_has_retried_are_known(cluster, bills):
    bills.bad.add("Say text 1")
    cluster("a", "run", LETTERS)
    cluster("b", "run", LETTERS)
    bills.bad.clear()
    cluster("a", "run", LETTERS, "--retry-dead-letters")
    for node in ("b", "c"):
        assert f"{DOCUMENTS} of {DOCUMENTS} documents" in cluster(node, "run", LETTERS)
    assert bills.paid == DOCUMENTS


def test_a_mirror_that_cannot_be_read_costs_no_file_that_another_node_has_written(
    cluster, command, monkeypatch
):
    cluster.run_until("a", 5)
    cluster("b", "run")
    before = cluster.files()
    with monkeypatch.context() as patched:
        unreachable = Mock(side_effect=ConnectionError("no route to host"))
        patched.setattr(ObjectStore, "names", unreachable)
        error = cluster("a", "run", code=1).error
    assert "Keep them until the mirror" in error
    said = command("verify", cluster.disk("a"), code=1)
    assert "If the run has a mirror, verify that" in said
    assert "delete" not in said
    assert (cluster.markers(), cluster.files()) == (ALL, before)
    cluster("a", "run")


@pytest.mark.parametrize("where", ["the configuration", "the folder"])
def test_repair_pays_for_nothing_that_the_mirror_has(cluster, where):
    disk = cluster.disk("a")
    cluster("a", "run")
    (disk / "00000/commits.jsonl").unlink()
    before = cluster.files()
    if where == "the folder":
        said = cluster._command(
            "repair", str(disk), "--logging-dir", str(disk.parent / "logs"), code=1
        )
    else:
        said = cluster("a", "repair", code=1)
    assert f"mv {disk}/00000 {disk}/00000.damaged" in said.out
    assert "Repair can do nothing." in said.out
    (disk / "00000").rename(disk / "00000.damaged")
    paid = cluster.bills.paid
    cluster("a", "run")
    assert cluster.bills.paid == paid
    assert cluster.files() == before


def test_settings_that_nobody_gave_are_those_of_the_mirror_on_a_new_node(
    here, command, server, bills
):
    write_rows("in.jsonl", [{"text": f"text {n}", "answer": "old"} for n in range(40)])
    job = ["--run-folder=r", "--input=in.jsonl", "--prompt={text}", "--model=m"]
    job.append("--checkpoints-remote-dir=mirror")
    several = f"--endpoints=[{{url: '{server.url}', model: one}}]"
    command("run", *job, several, "--output-format=parquet", "--until=20")
    for until in ("--until=30", "--until=40"):
        shutil.rmtree("r/checkpoints")
        command("run", *job, f"--endpoint={server.url}", until)
    answers = pandas.concat(map(pandas.read_parquet, sorted(here.glob("r/output/*"))))
    assert set(answers["answer_2_endpoint"]) == {server.url}
    assert bills.paid == len(answers) == 40


def test_a_mirror_that_was_away_for_the_end_of_a_run_gets_it_at_the_next_start(here, cluster):
    mirror = here / "mirror"
    cluster.run_until("a", 3)
    mirror.rename(here / "away")
    cluster("a", "run")
    before = cluster.files()
    shutil.rmtree(mirror)
    (here / "away").rename(mirror)
    versions = []
    for _ in range(2):
        cluster("a", "run")
        versions.append(sorted(mirror.glob("*/generation-*")))
    assert versions[0] == versions[1], "a whole mirror is left as it is"
    shutil.rmtree(cluster.disk("a"))
    assert f"{DOCUMENTS} of {DOCUMENTS} documents" in cluster("a", "run")
    assert (cluster.bills.paid, cluster.files()) == (DOCUMENTS, before)
