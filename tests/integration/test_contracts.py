"""What users and their scripts rely on, as tests/data/contracts has it (and tests/data/texts, the
messages): messages, names of settings and flags, keys.

    refusals.txt    what `run`, `doctor` and `verify` say of the same job when something is wrong,
                    word by word
    run.json        of a run whose settings hold secrets: it says which of them are hidden
    names.json      settings of a YAML file, flags of the commands, and the keys of each `--json`

Who means to change something writes them anew, and reads the difference:

    DATATROVE_CKPT_WRITE_GOLDEN=1 python -m pytest -n 0 -m "" tests/integration/test_contracts.py

What old checkpoints and queued tasks rely on is in test_releases.py, test_files_on_disk.py (the keys
of every file) and test_queued_tasks.py.
"""

import argparse
import fcntl
import json
import re
import shutil
import socket
import tempfile
from contextlib import ExitStack, chdir
from pathlib import Path

import pytest
from datatrove.io import DataFolder

from datatrove_ckpt import __version__
from datatrove_ckpt.cli.job_settings import ShortJob
from datatrove_ckpt.cli.main import main, make_parser
from datatrove_ckpt.cli.yaml_config import SHORT_NAMES, import_name
from datatrove_ckpt.common.setting_types import parameters_of
from datatrove_ckpt.errors import ServerRefused
from datatrove_ckpt.executors.kubernetes import KubernetesJob
from datatrove_ckpt.rollouts import PromptRollout
from datatrove_ckpt.testing import FakeServer
from tests import golden
from tests.golden import DATA, IS_WRITTEN
from tests.jobs import Budget, documents, runner
from tests.kept import content_of, edit
from tests.patience import until
from tests.settings_page import PAGE
from tests.yaml_jobs import endpoint, job_yaml, write_job

NAMES = DATA / "contracts/names.json"
TASKS = 2
TEXTS = (("a", "b", "c", "d", "e"), ("f", "g", "h"))
STEP = "--pipeline.1"
_MACHINE = re.compile(r"^\w+ +\w+, (room|file system|open files):")
"""What the doctor says of this machine."""


def rank(number, name):
    return lambda job: job / "checkpoints" / f"{number:05d}" / name


def only(folder, pattern="*"):
    return lambda job: min((job / folder).glob(pattern))


def cut(path, size=-10):
    return lambda job: path(job).write_bytes(path(job).read_bytes()[:size])


def gone(path):
    return lambda job: shutil.rmtree(path(job)) if path(job).is_dir() else path(job).unlink()


def add(name, text=""):
    def change(job):
        (job / name).parent.mkdir(parents=True, exist_ok=True)
        with (job / name).open("a") as file:
            file.write(text)

    return change


def swap(path, old, new):
    return lambda job: path(job).write_bytes(path(job).read_bytes().replace(old, new, 1))


def folder(name):
    return lambda job: job / name


def moved(job):
    (job / "output").rename(job / "elsewhere")


def no_documents(job):
    for path in (job / "input").iterdir():
        path.write_text('{"content": "a"}')


def locked(job):
    file = rank(0, "lock")(job).open("r+")
    fcntl.flock(file, fcntl.LOCK_EX)
    return file.close


def datatroves(job):
    shutil.copytree(DATA / "datatrove_0_9_0/checkpoints", job / "checkpoints")


def copied_over(job):
    shutil.copyfile(rank(0, "commits.jsonl")(job), rank(1, "commits.jsonl")(job))


class Refusal:
    """For the server: once it is asked to, it refuses the fourth document's request, when a chunk
    is committed.
    """

    commits = None

    def __call__(self, payload, times):
        if self.commits is None or not payload["messages"][-1]["content"].endswith(" d"):
            return None
        until(lambda: self.commits.exists() and self.commits.read_bytes())
        return 401


NEW, DONE, STOPPED = "new", "done", "stopped"
SITUATIONS = {code.partition("  # ")[2]: code for code in golden.sections("refusals")}


BY_DEFAULT = """no input file matches; the output would be read; the key is not set; the checkpoints are datatrove's;
another prompt, done; an output file is missing; an output file of no commit; an input file has grown; commits are cut;
run.json is gone; run.json is of a newer version; the checkpoints of a task are gone; another prompt, stopped;
a file of no commit, stopped; the task runs""".replace("\n", " ").split("; ")


@pytest.fixture(scope="module")
def jobs():
    """The folder "job", and beside it what it holds in each state: run.json holds its path.

    Sizes and messages hold its path, too, so that is equally long each time.
    """
    top, refusal = Path(tempfile.mkdtemp(prefix="refusals-", dir="/tmp")), Refusal()
    job = top / "job"
    with FakeServer(status=refusal) as server:
        text = job_yaml(endpoint(server) + ", max_concurrent_generations: 1", TASKS)
        for state in (NEW, DONE, STOPPED):
            shutil.rmtree(job, ignore_errors=True)
            job.mkdir()
            write_job(job, text + "          records_per_chunk: 2\n", *TEXTS)
            refusal.commits = rank(0, "commits.jsonl")(job) if state == STOPPED else None
            DataFolder.clear_instance_cache()
            with chdir(job):
                assert state == NEW or main(["run", "job.yaml"]) == (state == STOPPED)
            shutil.copytree(job, top / state)
        refusal.commits = None
        yield job, server
    shutil.rmtree(top)


def test_those_by_default_are_there():
    assert set(BY_DEFAULT) <= SITUATIONS.keys()


@pytest.mark.xdist_group("contracts")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in BY_DEFAULT else pytest.mark.slow)
        for name in SITUATIONS
    ],
)
def test_what_three_doors_say(name, jobs, command, monkeypatch):
    state, change, overrides = eval(SITUATIONS[name])
    job, server = jobs
    restore(job, state)
    monkeypatch.chdir(job)
    with ExitStack() as stack:
        undo = change(job) if change is not None else None
        if callable(undo):
            stack.callback(undo)
        found = ""
        for door in ("verify", "doctor", "run"):
            DataFolder.clear_instance_cache()
            said = command(door, "job.yaml", *overrides, code=None)
            found += f"--- {door}: exit code {said.code}\n{shown(door, said, job, server)}"
    golden.hold("refusals", SITUATIONS[name], found)


def restore(job, state):
    shutil.rmtree(job)
    shutil.copytree(job.parent / state, job)
    DataFolder.clear_instance_cache()


def shown(door, said, job, server):
    """What counts of it, without what differs from run to run."""
    text = said.out + said.err
    if door == "doctor" and said.out:
        lines = said.out.splitlines(keepends=True)[:-1]
        text = (
            "".join(
                line for line in lines if not line.startswith("ok ") and not _MACHINE.search(line)
            )
            or "nothing"
        )
    if door == "run":
        text = said.error if "error: " in said.err else said.out
    for old, new in (
        (str(job), "JOB"),
        (server.url, "URL"),
        (socket.gethostname(), "HOST"),
        (__version__, "VERSION"),
    ):
        text = text.replace(old, new)
    return re.sub("probe-[0-9a-f]+", "probe", text).strip() + "\n"


# names -------------------------------------------------------------------------------------------


def hold(what, found):
    """Holds what was found against names.json."""
    names = json.loads(NAMES.read_bytes())
    if IS_WRITTEN:
        NAMES.write_text(json.dumps({**names, what: found}, indent=1, sort_keys=True) + "\n")
    else:
        assert found == names[what]


def test_names_of_settings_in_a_yaml_file():
    """Of our classes that docs/settings.md does not have; others are datatrove's."""
    page = PAGE.read_text()
    named = [
        import_name(name, name)
        for name, module in SHORT_NAMES.items()
        if module.startswith("datatrove_ckpt")
    ]
    classes = [cls for cls in named if isinstance(cls, type)]
    classes += [KubernetesJob, ShortJob]
    found = {
        cls.__name__: " ".join(sorted(parameters_of(cls)[0]))
        for cls in classes
        if f"\n## {cls.__name__}\n" not in page
    }
    hold("settings", found)


def test_commands_and_their_flags():
    (commands,) = [
        one for one in make_parser()._actions if isinstance(one, argparse._SubParsersAction)
    ]
    hold("flags", {name: flags(one) for name, one in commands.choices.items()})


def flags(command):
    return " ".join(" ".join(one.option_strings) or str(one.metavar) for one in command._actions)


JSON = {
    "status": (STOPPED, "status checkpoints --json"),
    "verify": (STOPPED, "verify job.yaml --json"),
    "doctor": (NEW, "doctor job.yaml --json"),
}
BY_NAME = ("states", "errors", "dead_letters", "journals", "reasons")
"""Keys whose own keys are data."""


@pytest.mark.xdist_group("contracts")
@pytest.mark.parametrize("name", JSON)
def test_keys_of_json(name, jobs, command, monkeypatch):
    state, words = JSON[name]
    restore(jobs[0], state)
    monkeypatch.chdir(jobs[0])
    if name == "verify":
        only("output", "*.jsonl")(jobs[0]).unlink()
    found = json.loads(command(*words.split(), code=None).out)
    hold(f"{name} --json", " ".join(sorted({one[1:] for one in keys(found)})))


def keys(content, path=""):
    if isinstance(content, list):
        for one in content:
            yield from keys(one, f"{path}[]")
    elif isinstance(content, dict):
        for name, one in content.items():
            inner = f"{path}.*" if path.rpartition(".")[2] in BY_NAME else f"{path}.{name}"
            yield from (inner, *keys(one, inner))


# secrets in run.json -----------------------------------------------------------------------------

RUN = DATA / "contracts/run.json"
HIDDEN = {
    "api_key": "abcd1234",
    "hf_token": "hf_abcdefghij0123456789",
    "passphrase": "hunter2hunter2",
    "extra_headers": {"Authorization": "Bearer abcdef0123456789xyz", "X-Org": "team-7-of-many"},
    "callback": "https://me:pa55word@example.org/x",
    "session_cookie": "q1w2e3r4t5y6",
    "text_key": "b0dy-column",
    "cookie_jar": "of-the-monster",
    "keys_of_it": "only-by-its-name",
    "note": "sk-abcdefghijkl0123456789",
}
SHOWN = {
    "eos_token_text": "</s>",
    "keyword": "short",
    "variable_env": "NAME_OF_IT",
    "monkey": "tree",
}


def test_run_json_with_secrets_is_continued_and_shows_none(tmp_path, command, log):
    """What is hidden is compared by its hash: a version that hides less would refuse the runs of
    this one.
    """
    budget = Budget()
    path = rank(0, "run.json")(tmp_path)
    with FakeServer(status=budget) as server:

        def step():
            rollout = PromptRollout("Say {text}", generation_params=HIDDEN | SHOWN)
            return runner(
                tmp_path, server, rollout, shared_context={"hf_token": HIDDEN["hf_token"], **SHOWN}
            )

        with pytest.raises(ServerRefused):
            step().run(documents(4))
        found = path.read_text()
        content = content_of(path)
        if IS_WRITTEN:
            RUN.write_text(
                json.dumps({**content, "output_folder": "", "owner": {}}, indent=1) + "\n"
            )
        edit(
            path,
            **json.loads(RUN.read_bytes())
            | {name: content[name] for name in ("output_folder", "owner")},
        )
        kept = path.read_text()
        budget.left = 99
        step().run(documents(4))
    said = "".join(
        [
            command("status", tmp_path / "checkpoints"),
            command("verify", tmp_path / "checkpoints"),
            *log,
        ]
    )
    said += "".join(file.read_text() for file in (tmp_path / "checkpoints").rglob("*.json"))
    for secret in [*HIDDEN.values(), *HIDDEN["extra_headers"].values()]:
        assert str(secret) not in found + kept + said
    assert all(value in found for value in SHOWN.values())
