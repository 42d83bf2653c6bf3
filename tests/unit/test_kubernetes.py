"""What ``datatrove-ckpt k8s`` prints and refuses, and the exit codes of ``run --worker``, which its
Job relies on.

``tests/data/kubernetes_1_33.json`` has the definitions of the API's published schema
(api/openapi-spec of github.com/kubernetes/kubernetes, v1.33.0) that a Job and a ConfigMap need:
without descriptions, and strict, so that unknown fields are errors.
"""

import json
import re
import signal
import sys
from pathlib import Path

import httpx
import pytest
import yaml
from jsonschema import Draft202012Validator

from datatrove_ckpt import errors
from datatrove_ckpt.claims.claims import LAUNCH
from datatrove_ckpt.cli.short_form import read_config
from datatrove_ckpt.cli.yaml_config import build
from datatrove_ckpt.common.retrying import code_of_rank
from datatrove_ckpt.testing import FakeServer
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


def job_of(printed):
    return manifests(printed)[1]


def pod_of(printed):
    return job_of(printed)["spec"]["template"]["spec"]


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


def test_the_config_is_a_job_that_the_api_takes(command):
    config_map, job = manifests(command("k8s", CONFIG))
    spec = job["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 8, 8)
    assert (config_map["metadata"], job["metadata"]) == (
        {"name": "summaries"},
        {"name": "summaries"},
    )
    pod = spec["template"]["spec"]
    assert (pod["restartPolicy"], pod["terminationGracePeriodSeconds"]) == ("Never", 60)
    (container,) = pod["containers"]
    assert container["command"] == [
        "datatrove-ckpt",
        "run",
        "/etc/datatrove-ckpt/job.yaml",
        "--worker",
    ]
    assert container["env"][-1]["name"] == LAUNCH
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 1}
    assert container["envFrom"] == [{"secretRef": {"name": "s3-credentials"}}]


def test_what_follows_from_an_exit_code(command):
    """The API server also checks what the schema cannot say:
    https://kubernetes.io/docs/concepts/workloads/controllers/job/#pod-failure-policy
    """
    spec = job_of(command("k8s", CONFIG))["spec"]
    assert spec["backoffLimitPerIndex"] >= 0, "FailIndex needs it"
    found = {}
    for rule in spec["podFailurePolicy"]["rules"]:
        assert ("onExitCodes" in rule) != ("onPodConditions" in rule)
        codes = rule.get("onExitCodes", {"values": ["lost"]})["values"]
        assert codes == sorted({*codes} - {0})
        found |= dict.fromkeys(codes, rule["action"])
    ignored = dict.fromkeys((129, 130, 138, 143, "lost"), "Ignore")
    assert found == {**ignored, 2: "FailJob", 3: "FailIndex"}


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


def test_modules_beside_the_file_go_along_and_others_are_named(command):
    Path("k8s_mine.py").write_text(
        "import k8s_helper\nasync def rollout(document, generate): ...\n"
    )
    Path("k8s_helper.py").write_text("# é\n")
    on_volume("k8s_mine.rollout")
    printed = command("k8s", "job.yaml")
    assert manifests(printed)[0]["data"].keys() == {"job.yaml", "k8s_mine.py", "k8s_helper.py"}
    assert manifests(printed)[0]["data"]["k8s_helper.py"] == "# é\n"
    assert not printed.err
    assert "items" not in pod_of(printed)["volumes"][0]["configMap"]
    Path("elsewhere").mkdir()
    Path("elsewhere/k8s_away.py").write_text("async def rollout(document, generate): ...\n")
    sys.path.append("elsewhere")
    on_volume("k8s_away.rollout")
    assert (
        "k8s_away: is not in the ConfigMap: it must be in the image."
        in command("k8s", "job.yaml").err
    )


def test_packages_beside_the_file_lie_where_pods_import_them(command):
    for name in ("k8s_package/deep/x.py", "k8s_odd/__init__.py", "k8s_odd/prompt.txt"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("é")
    Path("k8s_package/deep/x.py").write_text(
        "import k8s_odd\nasync def rollout(document, generate): ...\n"
    )
    Path("k8s_odd/__init__.py").write_text("")
    on_volume("k8s_package.deep.x.rollout")
    printed = command("k8s", "job.yaml")
    assert not printed.err
    data = manifests(printed)[0]["data"]
    items = {
        one["path"]: data[one["key"]] for one in pod_of(printed)["volumes"][0]["configMap"]["items"]
    }
    assert items.keys() == {
        "job.yaml",
        "k8s_package/deep/x.py",
        "k8s_odd/__init__.py",
        "k8s_odd/prompt.txt",
    }
    assert items["k8s_odd/prompt.txt"] == "é"
    for name, content in (("prompt.txt", b"\xff"), ("prompt.txt", b"much" * 60_000), ("a..b", b"")):
        Path("k8s_odd", name).write_bytes(content)
        printed = command("k8s", "job.yaml")
        assert "k8s_odd/__init__.py" not in str(pod_of(printed)["volumes"])
        assert printed.err == "k8s_odd: is not in the ConfigMap: it must be in the image.\n"
        Path("k8s_odd", name).unlink()


def test_settings_of_the_section_are_settings_of_the_pod(command, log):
    on_volume(
        more="  namespace: ours\n  env: {HF_HOME: /data/hf}\n  pod: {nodeSelector: {spot: 'yes'}}\n"
    )
    printed = command(
        "k8s", "job.yaml", "--kubernetes.gpus=2", "--kubernetes.workers=9", "--kubernetes.cpu=500m"
    )
    config_map, job = manifests(printed)
    assert config_map["metadata"] == job["metadata"] == {"name": "job", "namespace": "ours"}
    assert job["spec"]["parallelism"] == job["spec"]["completions"] == 4, "as many as tasks"
    assert "workers is 9, but there is work for 4" in log[0]
    pod = pod_of(printed)
    assert pod["nodeSelector"] == {"spot": "yes"}
    (container,) = pod["containers"]
    assert container["resources"]["requests"]["cpu"] == "500m"
    assert {"name": "HF_HOME", "value": "/data/hf"} in container["env"]
    mounts = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
    assert mounts == {
        "/etc/datatrove-ckpt": "job",
        "/work": "work",
        "/data": "claim-0",
        "/dev/shm": "shm",
    }
    named = {one["name"]: one for one in pod["volumes"]}
    assert named["claim-0"]["persistentVolumeClaim"] == {"claimName": "shared"}
    assert named["work"]["emptyDir"] == {}


def test_absolute_checkpoints_are_on_the_empty_disk_too(command):
    on_volume()
    (container,) = pod_of(command("k8s", "job.yaml", "--pipeline.1.checkpoints_local_dir=/tmp/c"))[
        "containers"
    ]
    assert {"name": "work", "mountPath": "/tmp/c", "subPath": "checkpoints-0"} in container[
        "volumeMounts"
    ]


def test_the_short_form_runs_on_a_volume(command):
    Path("data/input").mkdir(parents=True)
    for name in "abc":
        Path(f"data/input/{name}.jsonl").write_text('{"text": "x", "id": "x"}\n')
    data = Path("data").absolute()
    Path("short.yaml").write_text(
        f"run_folder: {data}/run\ninput: {data}/input/*.jsonl\nprompt: 'Say {{text}}'\nmodel: org/model\n"
        f"kubernetes: {{image: i, volumes: {{shared: {data}}}}}\n"
    )
    printed = command("k8s", "short.yaml")
    assert job_of(printed)["spec"]["completions"] == 3, "one for each file"
    assert pod_of(printed)["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 1}
    assert "server_type: vllm" in manifests(printed)[0]["data"]["job.yaml"], (
        "whatever this machine has"
    )
    said = command("k8s", "short.yaml", "--kubernetes.imag=x", code=2).err
    assert 'unknown key "imag", did you mean "image"?' in said
    said = command("k8s", "short.yaml", "--run-folder=run", f"--input={data}/input", code=2).error
    assert said.endswith(
        "of kubernetes.volumes: run_folder; checkpoints_remote_dir (the mirror of run_folder)."
    )
    Path("data/input").rename("input")
    assert command("k8s", "short.yaml", "--input=input", code=2).error.endswith("volumes: input.")


# what is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("--executor.logging_dir=logs", r"a folder on a claim of kubernetes.volumes: logging_dir\."),
        ("--pipeline.1.output_writer.output_folder=out", r"of pipeline\[1\] InferenceRunner: output_writer\."),
        ("--pipeline.1.checkpoints_remote_dir=null", r": checkpoints_remote_dir \(the mirror"),
        ("--kubernetes.grace_seconds=39", r"39 s are too few.* 20 s \(drain_seconds\).* least 40, or .* most 19"),
        ("--pipeline.1.drain_seconds=41", "Set it to at least 61, or drain_seconds to at most 40"),
        ("--executor.depends={class_path: LocalPipelineExecutor, init_args: {pipeline: []}}", "depends: each worker"),
        ("--kubernetes.env={AWS_SECRET_ACCESS_KEY: x}", "secrets: \\[NAME\\]"),
        ("--kubernetes.env={PROXY: 'http://me:word@proxy'}", r"job.yaml: holds what may be a secret"),
        ("--kubernetes.pod={schedulerName: hf_A1b2C3d4E5f6G7h8}", "job.yaml: holds what may be a secret"),
        ("--pipeline.1.config.default_generation_params.extra_headers={X-Api-Key: abcdefgh}", "job.yaml: holds"),
        ("--executor.logging_dir=hf://datasets/org/job/logs", "Set it to a bucket: hf://buckets/org/job/logs"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(command, change, says):
    on_volume()
    assert re.search(says, command("k8s", "job.yaml", change, code=2).error)


def test_a_step_that_writes_to_the_disk_of_the_pod_is_refused(command):
    on_volume()
    step = "      - {class_path: JsonlWriter, init_args: {output_folder: here}}\n"
    Path("job.yaml").write_text(
        Path("job.yaml").read_text().replace("kubernetes:", f"{step}kubernetes:")
    )
    assert (
        "volumes: output_folder of pipeline[2] JsonlWriter."
        in command("k8s", "job.yaml", code=2).error
    )


def test_a_key_in_a_module_is_refused(command):
    Path("k8s_key.py").write_text(
        "KEY = 'hf_A1b2C3d4E5f6G7h8'\nasync def rollout(document, generate): ...\n"
    )
    on_volume("k8s_key.rollout")
    assert (
        "ConfigMap.k8s_key.py: holds what may be a secret"
        in command("k8s", "job.yaml", code=2).error
    )


# exit codes --------------------------------------------------------------------------------------


def test_the_exit_code_of_a_worker_tells_what_happened(command, monkeypatch):
    statuses = {"document 2": 400, "document 3": 503}
    with FakeServer(
        status=lambda payload, times: statuses.get(payload["messages"][-1]["content"][4:])
    ) as server:
        config = f"{ENDPOINT.replace('URL', server.url)}, server_patience_seconds: 0.1"
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

    monkeypatch.setattr("datatrove_ckpt.cli.execution.check_before_run", check)
    monkeypatch.setattr("datatrove_ckpt.preflight.before_run.check_before_worker", check)
    write_job(Path(), job_yaml(ENDPOINT.replace("URL", "http://model")), ["a document"])
    command("run", "job.yaml", "--worker", code=1)
    command("run", "job.yaml", code=2)


@pytest.mark.parametrize(
    ("error", "code"),
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
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_exit_codes_of_a_worker_are_told_apart(error, code):
    assert code_of_rank(error) == code
