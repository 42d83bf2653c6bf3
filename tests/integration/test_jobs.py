"""Hugging Face Jobs that are killed, evicted and reach their timeouts, against the real client of
the hub.

``tests/hub/jobs.py`` plays the service: each job is a process with an empty disk. Input, output,
logs and mirror are in a bucket of the fake hub.
"""

import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import datatrove_ckpt
from datatrove_ckpt.cli.yaml_config import build
from datatrove_ckpt.errors import CheckpointMismatch, CkptError, ConfigError
from datatrove_ckpt.executors.jobs import _Job, _wanted
from datatrove_ckpt.testing import FakeServer
from tests.golden import hold
from tests.hub.jobs import Jobs
from tests.jobs import runner
from tests.patience import until
from tests.yaml_jobs import ENDPOINT, job_yaml

BUCKET = "someone/runs"
IN_FLIGHT = 4
MIRROR_SECONDS = 0.5
# The timeout of a job that waits for such an answer; the drain begins 31 s before its end.
STUCK_SECONDS = 40.0
ROLLOUT = """
import datatrove_ckpt
from jobs_package import role
from jobs_space.deep.asks import asked

async def rollout(document, generate):
    assert "/tmp/datatrove-ckpt-" in datatrove_ckpt.__file__, datatrove_ckpt.__file__
    return await generate({"messages": [asked(role(), document)]})
"""
MODULES = {
    "jobs_rollout.py": ROLLOUT,
    "jobs_package/__init__.py": """
from pathlib import Path

def role():
    return Path(__file__).with_name("role.txt").read_text()
""",
    "jobs_package/role.txt": "user",
    "jobs_space/deep/asks.py": "def asked(role, document): return {'role': role, 'content': document.text}",
}
KEY = "a-key-of-the-endpoint-6f1d0c"


@pytest.fixture
def jobs(hub, tmp_path):
    jobs = Jobs(hub, tmp_path / "jobs")
    yield jobs
    jobs.close()


@pytest.fixture
def here(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("jobs_")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setenv("ENDPOINT_KEY", KEY)
    folder = tmp_path / "here"
    for name, text in MODULES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.chdir(folder)
    return folder


def write_job(hub, url, ranks, documents, run="run", **settings):
    """job.yaml, and its input in the bucket."""
    rows = {
        f"input/{rank:05d}.jsonl": "".join(
            json.dumps({"id": f"{rank} {n}", "text": f"document {rank} {n}"}) + "\n"
            for n in range(documents)
        ).encode()
        for rank in range(ranks)
    }
    if ("bucket", BUCKET) not in hub.repos:
        hub.put(BUCKET, rows, kind="bucket")
    config = f"{ENDPOINT.replace('URL', url)}, max_concurrent_generations: {IN_FLIGHT}, api_key_env: ENDPOINT_KEY"
    base = f"hf://buckets/{BUCKET}"
    text = job_yaml(config, ranks, f"{base}/input", f"{base}/{run}/output", "jobs_rollout.rollout")
    content = yaml.safe_load(text)
    arguments = content["executor"]["init_args"]
    content["executor"]["class_path"] = "JobsPipelineExecutor"
    del arguments["workers"]
    arguments |= {"logging_dir": f"{base}/{run}/logs", "poll_interval": 0.1, **settings}
    arguments["pipeline"][1]["init_args"] |= {
        "mirror_seconds": MIRROR_SECONDS,
        "records_per_chunk": 5,
    }
    Path("job.yaml").write_text(yaml.safe_dump(content))


def written(hub, run="run"):
    below = f"{run}/output/"
    return {
        name.removeprefix(below): data
        for name, data in hub.files(BUCKET, kind="bucket").items()
        if below in name
    }


def ids_of(files):
    return [json.loads(line)["id"] for data in files.values() for line in data.splitlines()]


def answer(payload, times):
    return f"answer to {payload['messages'][-1]['content']}"


class Ends:
    """For a server: ends the job that asks, so many answers after the last one, each time in the
    next way.
    """

    def __init__(
        self,
        jobs,
        ways,
        apart,
        seconds=0.02,
        stuck=None,
    ):
        self._spared = []
        self.jobs, self.again, self.done = jobs, Counter(), Counter()
        self._ways, self._apart, self._seconds, self._stuck = ways, apart, seconds, stuck or set()
        self._answers, self._last = 0, {}
        self._lock = threading.Lock()

    def delay(self, payload, times):
        question = payload["messages"][-1]["content"]
        job = self.jobs.of(int(question.split()[1]))
        if question in self._last:
            before = self._last[question]
            self.again[before.ended_by if before else "?"] += 1
        self._last[question] = job
        if times or question not in self._stuck:
            return self._seconds
        self._spared.append(job)
        return STUCK_SECONDS

    def answer(self, payload, times):
        with self._lock:
            self._answers += 1
            if self._ways and self._answers >= self._apart:
                job = self.jobs.of(int(payload["messages"][-1]["content"].split()[1]))
                if (
                    job is not None
                    and job not in self._spared
                    and job.end(self._ways[0], 0.0 if self._ways[0] == "kill" else 600.0)
                ):
                    self.done[self._ways.pop(0)] += 1
                    self._answers = 0
        return answer(payload, times)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "ranks, documents, per_job, ended, apart",
    [(4, 12, 2, {"kill": 1, "evict": 1}, 12), (40, 10, 10, {"kill": 8, "evict": 2}, 30)],
)
def test_jobs_that_die_are_started_again_with_what_is_left(
    hub,
    jobs,
    here,
    command,
    log,
    ranks,
    documents,
    per_job,
    ended,
    apart,
):
    ways = list(Counter(ended).elements())
    random.Random(31).shuffle(ways)
    ends = Ends(jobs, ways, apart)
    number = ranks * documents
    with FakeServer(ends.answer, delay=ends.delay) as server:
        # On a slow machine a job is killed several times before its mirror has anything: kills use
        # up no retries here.
        write_job(
            hub,
            server.url,
            ranks,
            documents,
            tasks_per_job=per_job,
            max_retries=sum(ended.values()),
        )
        said = command("run", "job.yaml", code=None)
        assert said.code == 0, said + "\n".join(job.log for job in jobs.all)
        print(f"{ranks} tasks in {len(jobs.all)} jobs: {jobs.ends}. Asked again: {ends.again}.")
        assert ends.done == ended
        assert len(server.asked) == number
        assert {*ends.again} <= {"kill"}, "a job that drains loses no answer"
        assert len(ids_of(written(hub))) == len({*ids_of(written(hub))}) == number
        assert f"{number} of {number} documents" in said.out
        assert "will be saved in this bucket" not in said
        assert f"no problem: {ranks} tasks, {number} documents" in command(
            "verify", "job.yaml", "--full"
        )
        there, started = written(hub), len(jobs.all)
        Path("other.yaml").write_text(
            Path("job.yaml").read_text().replace("run/logs", "other/logs")
        )
        assert "belongs to another run" in command("run", "other.yaml", code=1)
        assert (written(hub), len(jobs.all)) == (there, started), (
            "another job, whose output this is not"
        )
    assert not log.said("module"), "all go along"
    for name, data in hub.files(BUCKET, kind="bucket").items():
        assert KEY.encode() not in data, name
        assert hub.token.encode() not in data, name
    for job in jobs.all:
        assert KEY not in json.dumps({**job.spec, "secrets": None}) + job.log


@pytest.mark.slow
def test_an_interrupted_coordinator_leaves_its_jobs_and_the_next_one_waits_for_them(
    hub, jobs, here, command, log
):
    began, go_on = threading.Event(), threading.Event()

    def held(payload, times):
        began.set()
        go_on.wait(300)
        return answer(payload, times)

    def interrupt():
        began.wait(300)
        os.kill(os.getpid(), signal.SIGTERM)

    with FakeServer(held) as server:
        write_job(hub, server.url, 2, 3, tasks_per_job=2)
        threading.Thread(target=interrupt).start()
        said = command("run", "job.yaml", code=143)
        assert "To resume: datatrove-ckpt run job.yaml" in said
        (job,) = jobs.running
        assert any("1 job is still at work: " in line and job.id in line for line in log), log
        go_on.set()
        assert "6 of 6 documents" in command("run", "job.yaml").out
        assert jobs.all == [job], "nothing was started twice"
        command("run", "job.yaml")
        assert log.said("2 tasks are complete already.")
        assert len(jobs.all) == 1
        assert server.asked.total() == 6


def test_cancel_with_and_without_jobs(
    hub,
    jobs,
    here,
    command,
    log,
    monkeypatch,
):
    write_job(hub, "http://127.0.0.1:1", 1, 1)
    base = f"hf://buckets/{BUCKET}"
    assert "No job of this run waits or runs" in command("run", "job.yaml", "--cancel")
    alive = SimpleNamespace(id="job7", url="http://hub/job7", environment={})
    canceled = []
    monkeypatch.setattr("huggingface_hub.HfApi.list_jobs", lambda api, **_: [alive])
    monkeypatch.setattr(
        "huggingface_hub.HfApi.cancel_job", lambda api, **asked: canceled.append(asked["job_id"])
    )
    assert "Canceled 1 job. " in command("run", "job.yaml", "--cancel")
    assert canceled == ["job7"]
    assert not log.said("experimental")
    monkeypatch.setattr("datatrove_ckpt.JobsPipelineExecutor.run", lambda executor: None)
    job = {
        "input": f"{base}/input/*.jsonl",
        "prompt": "Say {text}",
        "model": "m",
        "endpoint": "http://127.0.0.1:1",
    }
    assert datatrove_ckpt.run(run_folder=f"{base}/run/", jobs={}, **job) == f"{base}/run/output"


def test_jobs_are_listed_by_a_token_without_a_login(hub, jobs, here, monkeypatch):
    executor = an_executor(hub, here, token=hub.token)
    monkeypatch.setenv("HF_TOKEN", "")
    hub.requests.clear()
    assert executor._alive() == []
    assert hub.requests
    assert {request.token for request in hub.requests} == {hub.token}


@pytest.mark.slow
@pytest.mark.parametrize(
    "refused, code, said_first, started, why",
    [
        # Rank 1 goes on, and rank 0 would fail again.
        ("document 0 0", 400, "1 of 2 tasks were given up", 1, "task 0: DocumentFailed: "),
        ("", 403, "2 of 2 tasks are not complete", 2, "(ServerRefused: "),  # that may pass
    ],
)
def test_ranks_that_would_fail_again_are_not_started_again_and_the_cause_is_named(
    hub,
    jobs,
    here,
    command,
    refused,
    code,
    said_first,
    started,
    why,
):
    def status(payload, times):
        return code if payload["messages"][-1]["content"].startswith(refused) else None

    with FakeServer(answer, status=status) as server:
        write_job(hub, server.url, 2, 12, tasks_per_job=2, max_retries=1)
        said = command("run", "job.yaml", code=1)
    assert len(jobs.all) == started
    assert said.error.startswith(f"error: {said_first}")
    assert why in said.error


@pytest.mark.slow
def test_a_job_whose_token_expires_stops_instead_of_paying_for_what_its_disk_loses(
    hub, jobs, here, command
):
    def expires(payload, times):
        if (payload["messages"][-1]["content"], times) == ("document 0 12", 0):
            hub.tokens[hub.token].expired = True
        return answer(payload, times)

    # It stops by then: later requests are never answered.
    with FakeServer(expires, delay=lambda payload, times: 0.05, hold_after=140) as server:
        write_job(hub, server.url, 1, 300)
        records = "--pipeline.1.records_per_chunk=300"
        said = command("run", "job.yaml", records, code=1)
        assert (
            "log in (hf auth login, or export HF_TOKEN). The same command waits for the running jobs."
            in said.error
        )
        until(lambda: not jobs.running)
        assert "refuses this job's token" in jobs.all[0].log
        server.release()
        hub.tokens[hub.token].expired = False
        command("run", "job.yaml", records)
    assert len(ids_of(written(hub))) == len({*ids_of(written(hub))}) == 300


def an_executor(hub, here, **settings):
    sys.path.insert(0, str(here))
    write_job(hub, "http://127.0.0.1:1", 4, 1, tasks_per_job=2, **settings)
    return build(yaml.safe_load(Path("job.yaml").read_text()))


def test_jobs_with_other_settings_are_refused(hub, here, monkeypatch):
    executor = an_executor(hub, here)
    monkeypatch.setattr(executor, "_alive", lambda: [_Job("theirs", "url", settings="other")])
    with pytest.raises(CheckpointMismatch, match="with other settings, code or package: url"):
        executor._running()


def test_a_cancellation_between_two_jobs_starts_no_other(hub, jobs, here, monkeypatch):
    executor = an_executor(hub, here)
    began = time.time()
    monkeypatch.setattr(executor, "_submit", lambda reached, retries: _Job("1", "url"))
    alive = {}
    assert executor.cancel() == 0
    with pytest.raises(CkptError, match="This run was canceled"):
        executor._start(alive, 1, 0, began)
    executor._start(alive, 1, 0, time.time())  # the same command again
    assert alive.keys() == {"1"}


def test_jobs_that_cannot_be_canceled_are_named_and_the_others_are(hub, here, monkeypatch):
    executor, canceled = an_executor(hub, here), []

    def cancel_job(api, job_id, **whose):
        if job_id == "1":
            raise PermissionError("not yours")
        canceled.append(job_id)

    monkeypatch.setattr("huggingface_hub.HfApi.cancel_job", cancel_job)
    monkeypatch.setattr(executor, "_alive", lambda: [_Job(str(n), f"url{n}") for n in range(4)])
    with pytest.raises(
        CkptError,
        match=r"1 of 4 jobs could not be canceled: url1 \(PermissionError: not",
    ):
        executor.cancel()
    assert canceled == ["0", "2", "3"]


@pytest.mark.slow
@pytest.mark.parametrize("grace", [0.0, 5.0])
def test_a_job_drains_before_its_timeout(hub, jobs, here, command, grace):
    jobs.grace = grace
    stuck = {"document 0 7"}
    ends = Ends(jobs, [], 1, 0.0, stuck)
    with FakeServer(ends.answer, delay=ends.delay) as server:
        write_job(hub, server.url, 1, 12, timeout=int(STUCK_SECONDS))
        command(
            "run", "job.yaml", "--pipeline.1.drain_seconds=0.2", "--pipeline.1.mirror_seconds=600"
        )
        assert server.asked.total() == 12 + 1
    assert jobs.ends == {("", "ERROR"): 1, ("", "COMPLETED"): 1}
    assert "the end of the job's time limit" in jobs.all[0].log


TOKEN = "hf_aB3dE5gH7jK9mN1pQ3sT5vX7zA9bC1dE3x"
REFUSED = {
    "output here": "--pipeline.1.output_writer.output_folder=output",
    "a mirror here": "--pipeline.1.checkpoints_remote_dir=file:///mirror",
    "logs in a repository": "--executor.logging_dir=hf://datasets/a/b/x",
    "logs here": "--executor.logging_dir=logs",
    "a variable that may be a secret": "--executor.env={MY_TOKEN: x}",
    "a password in a variable": "--executor.env={DATABASE_URL: 'postgres://bob:hunter2pass@host/x'}",
    "a token in a variable": f"--executor.env={{NOPE: {TOKEN}}}",
    "a token in a label": f"--executor.labels={{auth: {TOKEN}}}",
    "a token in a dependency": (
        "--executor.dependencies=['mine @ git+https://bob:ghp_0123456789abcdefghijABCDEFGHIJ012345@github.com/x/y.git']"
    ),
    "an input that is not there": f"--pipeline.0.data_folder=hf://buckets/{BUCKET}/other",
    "a key that is not set": "--executor.poll_interval=0.1",
    "a large file": "--executor.poll_interval=0.1",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_or_would_be_lost_is_refused_before_anything_starts(
    hub, jobs, here, command, monkeypatch, name
):
    write_job(hub, "http://127.0.0.1:1", 1, 1)
    if name == "a key that is not set":
        monkeypatch.delenv("ENDPOINT_KEY")
    if name == "a large file":
        Path("jobs_package/large").write_bytes(bytes(10 * 2**20))
    hold("jobs", name, command("run", "job.yaml", REFUSED[name], code=2).error)
    assert not jobs.all


def test_the_short_form_and_datatroves_own_executor(
    hub,
    jobs,
    here,
    command,
    log,
    monkeypatch,
):
    """What each would start. Jobs of datatrove's script unpack no package."""
    started = []

    def run_uv_job(*words, **arguments):
        started.append({"script": Path(words[-1]).name, **arguments})
        raise ConfigError("enough")

    for ours_or_theirs in ("huggingface_hub.HfApi", "huggingface_hub"):
        monkeypatch.setattr(f"{ours_or_theirs}.run_uv_job", run_uv_job)
    write_job(hub, "http://127.0.0.1:1", 2, 1)
    run = f"hf://buckets/{BUCKET}/short"
    short = {
        "run_folder": run,
        "input": f"hf://buckets/{BUCKET}/input/*.jsonl",
        "prompt": "Say {text}",
        "model": "m",
    }
    short |= {
        "endpoint": "http://127.0.0.1:1",
        "jobs": {"flavor": "a10g-small", "timeout": "2h", "poll_interval": 0},
    }
    Path("short.yaml").write_text(yaml.safe_dump(short))
    assert "run_folder: must be a folder of this machine" in command(
        "run", "short.yaml", "--jobs=null", code=2
    )
    assert "refuses to start a job" in command("run", "short.yaml", code=1)
    (job,) = started
    assert job["flavor"] == "a10g-small"
    assert job["env"]["DATATROVE_CKPT_JOB_SECONDS"] == "7200"
    assert job["script"] == "job_launch.py"
    assert any(one.startswith("datatrove") for one in job["dependencies"])
    assert "short.yaml: nothing has started yet" in command("status", "short.yaml")

    content = yaml.safe_load(Path("job.yaml").read_text())
    content["executor"]["class_path"] = "datatrove.executor.JobsPipelineExecutor"
    content["executor"]["init_args"]["pipeline"][1]["init_args"]["checkpoints_remote_dir"] = (
        f"{run}/mirror"
    )
    content["executor"]["init_args"]["poll_interval"] = 1
    Path("theirs.yaml").write_text(yaml.safe_dump(content))
    command("run", "theirs.yaml", code=None)
    assert started[1]["script"] == "launch_pickled_pipeline.py"
    assert len(log.said("datatrove's JobsPipelineExecutor resumes only with")) == 1


@pytest.mark.parametrize(
    "alive, at_work, free, wanted",
    [
        (0, 0, 4, 3),  # at most three
        (0, 0, 2, 2),
        (2, 1, 2, 1),  # one of two will take one of the two ranks
        (1, 2, 0, 0),  # another one was killed, and its claims look alive
        (0, 2, 1, 1),
        (3, 3, 0, 0),
    ],
)
def test_so_many_jobs_are_started_as_ranks_are_free(alive, at_work, free, wanted):
    assert _wanted(3, alive, at_work, free) == wanted


def test_a_step_in_two_jobs_has_a_mirror_below_the_logs_of_each(tmp_path, server):
    step = runner(tmp_path, server)
    jobs = [
        datatrove_ckpt.JobsPipelineExecutor([step], 1, logging_dir=f"memory://{name}")
        for name in ("first", "second")
    ]
    mirrors = [job.pipeline[0].checkpoints_remote_dir for job in jobs]
    assert mirrors == ["memory:///first/checkpoints", "memory:///second/checkpoints"]
    assert step.checkpoints_remote_dir is None
