"""What ``datatrove-ckpt k8s`` prints and refuses, and the exit codes of ``run --worker``, which its
Job relies on.

``tests/data/kubernetes_1_33.json`` has the definitions of the API's published schema
(api/openapi-spec of github.com/kubernetes/kubernetes, v1.33.0) that a Job and a ConfigMap need:
without descriptions, and strict, so that unknown fields are errors.
"""

import json
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
from tests import golden
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


@golden.rows("k8s")
def test_what_is_printed_is_as_the_api_wants_it(command, log, code):
    set_up, flags = eval(code)
    set_up()
    printed = command("k8s", "job.yaml", *flags)
    config_map, job = manifests(printed)
    config_map["data"].pop("job.yaml")  # see below
    held = yaml.safe_dump([config_map, job], allow_unicode=True)
    hold("k8s", code, held + printed.err + "".join(log))


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


@golden.rows("k8s_refused")
def test_what_cannot_work_is_refused(command, code):
    set_up, flag = eval(code)
    set_up()
    hold("k8s_refused", code, command("k8s", "job.yaml", flag, code=2).error)


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


test_exit_codes_of_a_worker_are_told_apart = golden.shows(
    "exit_codes", globals(), {"code_of_rank": code_of_rank}
)
