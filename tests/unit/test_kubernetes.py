"""What ``datatrove-ckpt k8s`` prints and refuses, and the exit codes of ``run --worker``, which its
Job relies on.

``tests/data/kubernetes_1_33.json`` has the definitions of the API's published schema
(api/openapi-spec of github.com/kubernetes/kubernetes, v1.33.0) that a Job and a ConfigMap need:
without descriptions, and strict, so that unknown fields are errors.
"""

import json
import signal
import sys
from pathlib import Path

import httpx
import pytest
import yaml
from jsonschema import Draft202012Validator

from datatrove_ckpt import errors
from datatrove_ckpt.cli.short_form import read_config
from datatrove_ckpt.cli.yaml_config import build
from datatrove_ckpt.common import LAUNCH
from datatrove_ckpt.common.retrying import code_of_rank
from datatrove_ckpt.testing import FakeServer
from tests.golden import hold
from tests.yaml_jobs import ENDPOINT, job_yaml, write_job

ROOT = Path(__file__).parents[2]
CONFIG = str(ROOT / "configs/kubernetes.yaml")
SCHEMA = json.loads((ROOT / "tests/data/kubernetes_1_33.json").read_text())
ON_VOLUME = """\
          checkpoints_remote_dir: /data/mirror
kubernetes:
  image: an-image
  volumes: {shared: /data}
"""


@pytest.fixture(autouse=True)
def _here(here):
    """No test leaves its modules to the next."""
    yield
    for name in [name for name in sys.modules if name.startswith("k8s_")]:
        del sys.modules[name]


def manifests(printed):
    """ConfigMap and Job, which are as the API wants them."""
    config_map, job = yaml.safe_load_all(printed.out)
    check("core.v1.ConfigMap", config_map)
    check("batch.v1.Job", job)
    return config_map, job


def check(kind, manifest):
    Draft202012Validator({"$ref": f"#/$defs/io.k8s.api.{kind}", **SCHEMA}).validate(manifest)


def on_volume(rollout=None, more=""):
    """Writes job.yaml, whose folders are on a volume; checkpoints are not."""
    given = {} if rollout is None else {"rollout": rollout}
    text = job_yaml(
        ENDPOINT.replace("URL", "http://model"), 4, "/data/input", "/data/output", **given
    )
    Path("job.yaml").write_text(
        text.replace("logging_dir: logs", "logging_dir: /data/logs") + ON_VOLUME + more
    )


# what is printed ---------------------------------------------------------------------------------


def a_module():
    Path("k8s_mine.py").write_text(
        "import k8s_helper\nasync def rollout(document, generate): ...\n"
    )
    Path("k8s_helper.py").write_text("# é\n")
    on_volume("k8s_mine.rollout")


def a_module_elsewhere():
    Path("elsewhere").mkdir()
    Path("elsewhere/k8s_away.py").write_text("async def rollout(document, generate): ...\n")
    sys.path.append("elsewhere")
    on_volume("k8s_away.rollout")


def packages(name="prompt.txt", content=b"text"):
    for folder in ("k8s_package/deep", "k8s_odd"):
        Path(folder).mkdir(parents=True)
    Path("k8s_package/deep/x.py").write_text(
        "import k8s_odd\nasync def rollout(document, generate): ...\n"
    )
    Path("k8s_odd/__init__.py").touch()
    Path("k8s_odd", name).write_bytes(content)
    on_volume("k8s_package.deep.x.rollout")


def section():
    on_volume(
        more="  namespace: ours\n  env: {HF_HOME: /data/hf}\n  pod: {nodeSelector: {spot: 'yes'}}\n"
    )


def short_form():
    data = Path("data").absolute()
    (data / "input").mkdir(parents=True)
    for name in "abc":
        (data / "input" / f"{name}.jsonl").write_text('{"text": "x", "id": "x"}\n')
    Path("job.yaml").write_text(
        f"run_folder: {data}/run\ninput: {data}/input/*.jsonl\nprompt: 'Say {{text}}'\nmodel: org/model\n"
        f"kubernetes: {{image: i, volumes: {{shared: {data}}}}}\n"
    )


PRINTED = {
    "the config": (lambda: Path("job.yaml").write_bytes(Path(CONFIG).read_bytes()), ()),
    "settings of the section": (
        section,
        ("--kubernetes.gpus=2", "--kubernetes.workers=9", "--kubernetes.cpu=500m"),
    ),
    "absolute checkpoints": (on_volume, ("--pipeline.1.checkpoints_local_dir=/tmp/c",)),
    "modules beside the file": (a_module, ()),
    "a module elsewhere": (a_module_elsewhere, ()),
    "packages beside the file": (packages, ()),
    "a package with bytes": (lambda: packages(content=b"\xff"), ()),
    "a package that is too large": (lambda: packages(content=b"much" * 60_000), ()),
    "a package with an odd name": (lambda: packages("a..b", b""), ()),
    "the short form": (short_form, ()),
}


@pytest.mark.parametrize("name", PRINTED)
def test_what_is_printed_is_as_the_api_wants_it(command, log, name):
    set_up, flags = PRINTED[name]
    set_up()
    printed = command("k8s", "job.yaml", *flags)
    config_map, job = manifests(printed)
    config_map["data"].pop("job.yaml")  # see below
    held = yaml.safe_dump([config_map, job], allow_unicode=True)
    hold("k8s", name, held + printed.err + "".join(log))


def test_the_file_in_the_config_map_is_the_same_run(command):
    config_map, _ = manifests(command("k8s", CONFIG, "--pipeline.1.records_per_chunk=10"))
    Path("job.yaml").write_text(config_map["data"]["job.yaml"])
    read = build(read_config("job.yaml", []))
    changed = build(read_config(CONFIG, ["--pipeline.1.records_per_chunk=10"]))
    other = build(read_config(CONFIG, []))
    assert (
        read.pipeline[1].identity(40)
        == changed.pipeline[1].identity(40)
        != other.pipeline[1].identity(40)
    )
    assert manifests(command("k8s", "job.yaml"))[0] == config_map


# what is refused ---------------------------------------------------------------------------------


def another_writer():
    on_volume()
    step = "      - {class_path: JsonlWriter, init_args: {output_folder: here}}\n"
    text = Path("job.yaml").read_text()
    Path("job.yaml").write_text(text.replace("kubernetes:", f"{step}kubernetes:"))


def input_elsewhere():
    short_form()
    Path("data/input").rename("input")


def a_key():
    Path("k8s_key.py").write_text(
        "KEY = 'hf_A1b2C3d4E5f6G7h8'\nasync def rollout(document, generate): ...\n"
    )
    on_volume("k8s_key.rollout")


REFUSED = {
    "logs on the disk of the pod": (on_volume, "--executor.logging_dir=logs"),
    "output on it": (on_volume, "--pipeline.1.output_writer.output_folder=out"),
    "no mirror": (on_volume, "--pipeline.1.checkpoints_remote_dir=null"),
    "few seconds": (on_volume, "--kubernetes.grace_seconds=39"),
    "a long drain": (on_volume, "--pipeline.1.drain_seconds=41"),
    "depends": (on_volume, "--executor.depends={class_path: LocalPipelineExecutor, init_args: {pipeline: []}}"),
    "a secret variable": (on_volume, "--kubernetes.env={AWS_SECRET_ACCESS_KEY: x}"),
    "a secret in a value": (on_volume, "--kubernetes.env={PROXY: 'http://me:word@proxy'}"),
    "a secret in the pod": (on_volume, "--kubernetes.pod={schedulerName: hf_A1b2C3d4E5f6G7h8}"),
    "a secret in a request": (on_volume,
        "--pipeline.1.config.default_generation_params.extra_headers={X-Api-Key: abcdefgh}"),
    "a repository": (on_volume, "--executor.logging_dir=hf://datasets/org/job/logs"),
    "another writer on it": (another_writer, "--kubernetes.gpus=1"),
    "a key in a module": (a_key, "--kubernetes.gpus=1"),
    "an unknown key": (short_form, "--kubernetes.imag=x"),
    "a run folder on it": (short_form, "--run-folder=run"),
    "an input on it": (input_elsewhere, "--input=input"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused(command, name):
    set_up, flag = REFUSED[name]
    set_up()
    hold("k8s", name, command("k8s", "job.yaml", flag, code=2).error)


# exit codes --------------------------------------------------------------------------------------


def test_the_exit_code_of_a_worker_tells_what_happened(command, monkeypatch):
    statuses = {"document 2": 400, "document 3": 503}
    with FakeServer(
        status=lambda payload, times: statuses.get(payload["messages"][-1]["content"][4:])
    ) as server:
        config = f"{ENDPOINT.replace('URL', server.url)}, server_patience_seconds: 1"
        write_job(Path(), job_yaml(config, 4), *([f"document {rank}"] for rank in range(4)))
        run = ("run", "job.yaml", "--worker", "--executor.ranks_at_once=1")
        codes = [command(*run, code=None).code for _ in range(3)]
        assert codes == [1, 1, 3]
        assert sorted(path.name for path in Path("output").iterdir()) == [
            "00000_00000.jsonl",
            "00001_00000.jsonl",
        ]
        said = command(*run, code=3).error
        assert "task 2: DocumentFailed" in said
        assert "task 3: ServerUnavailable" in said
        monkeypatch.setenv(LAUNCH, "the next one")
        command(*run, "--pipeline.1.rollout_fn.prompt=Sing {text}", code=2)


def from_server():
    error = errors.DocumentFailed("a request failed")
    error.__cause__ = errors.RequestFailed("503")
    return error


def from_network(error):
    error.__cause__ = httpx.ConnectError("no route")
    return error


def test_a_hub_that_is_away_before_a_worker_starts_does_not_fail_the_job(command, monkeypatch):
    def check(executor):
        raise from_network(errors.ConfigError("generation_config: the hub does not give it"))

    monkeypatch.setattr("datatrove_ckpt.run_folder.preflight.check_before_run", check)
    monkeypatch.setattr("datatrove_ckpt.run_folder.preflight.check_before_worker", check)
    write_job(Path(), job_yaml(ENDPOINT.replace("URL", "http://model")), ["a document"])
    command("run", "job.yaml", "--worker", code=1)
    command("run", "job.yaml", code=2)


@pytest.mark.parametrize(
    "error, code",
    [
        (errors.ConfigError("found by the worker"), 2),
        (errors.VersionMismatch("newer"), 2),
        (errors.DocumentFailed("its rollout raised"), 3),
        (errors.GivenUp("2 of 4 tasks"), 3),
        (errors.TooManyDeadLetters("11"), 3),
        (errors.InputError("damaged"), 3),
        (errors.OutputMismatch("gone"), 3),
        (from_server(), 1),
        (from_network(errors.ConfigError("generation_config: the hub does not give it")), 1),
        (errors.OutputFailed("the bucket is away"), 1),
        (errors.StorageFailed("full"), 1),
        (errors.ServerRefused("401"), 1),
        (errors.CheckpointLocked("another pod"), 1),
        (errors.Preempted("the node goes away"), 128 + signal.SIGTERM),
    ],
)
def test_exit_codes_of_a_worker_are_told_apart(error, code):
    assert code_of_rank(error) == code
