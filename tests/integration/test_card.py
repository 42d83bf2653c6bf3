"""``card.md`` of a finished run."""

import re

import pytest
import yaml

from datatrove_ckpt.testing import FakeServer
from tests.yaml_jobs import endpoint, job_yaml, write_input, write_job

RUN = (
    "run",
    "--input",
    "input/0.jsonl",
    "--prompt",
    "Say | <b>{text}",
    "--model",
    "m",
    "--run-folder",
    "r",
)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_the_card_says_what_made_the_output_and_loads_it(
    here, server, command, monkeypatch, suffix
):
    monkeypatch.setenv("MY_KEY", "sk-abcdefgh12345678abcdefgh")
    write_input(here, ["a", "b"])
    own = ("--api-key-env", "MY_KEY", "--output-format", suffix, "--seed", 0)
    flags = ("--endpoint", server.url, *own)
    with FakeServer(status=lambda payload, times: 401) as refuses:
        command(*RUN, "--endpoint", refuses.url, *own, code=1)
    assert not (here / "r/card.md").exists()
    command(*RUN, *flags)
    card = (here / "r/card.md").read_text()
    assert card.startswith("# r\n\nMade by datatrove-ckpt ")
    assert "\n| rollout_fn.prompt | Say \\| &lt;b>{text} |\n" in card
    assert f"\n| input | {here}/input/0.jsonl |\n" in card
    assert "\n- tokens of a document: 3 prompt, 2 completion on average\n" in card
    assert "GPU" not in card
    assert "\n- documents: 2 done: 2 written in 1 chunk, 0 dropped, 0 dead\n" in card
    assert "sk-abcdefgh" not in card
    code = re.search("```python\n(.*?)```", card, re.DOTALL)[1]
    names = {}
    exec(code, names)
    assert [*names["dataset"]["id"]] == ["id 0", "id 1"]
    assert "\n| seed | 0 |\n" in card
    with monkeypatch.context() as later:
        later.setattr("time.time", lambda: 4e9)
        command(*RUN, *flags)  # the card is no input and no output
    assert (here / "r/card.md").read_text() == card


@pytest.mark.slow
def test_the_card_of_local_servers_has_their_gpu_hours(here, command, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    write_input(here, ["a"])
    command(*RUN, "--server-type", "dummy", "--gpus", 2)
    card = (here / "r/card.md").read_text()
    assert re.search(r"\n- GPU hours: 0\.\d+ at most, with 2 GPUs for each task\n", card)


def test_the_card_holds_no_secret_and_replaces_nothing_of_the_user(here, server, command):
    write_input(here, ["a"])
    params = '{"extra_headers": {"X-Auth-Token": "hunter2-hunter2"}}'
    flags = ("--endpoint", server.url, "--default-generation-params", params)
    command(*RUN, *flags)
    assert "X-Auth-Token" in (here / "r/card.md").read_text()
    assert not [
        path for path in here.rglob("*.*") if path.is_file() and b"hunter2" in path.read_bytes()
    ]
    (here / "r/card.md").write_text("mine")
    said = command(*RUN, *flags)
    assert "The card was not written" in said.out
    assert (here / "r/card.md").read_text() == "mine"


MINE = "---\nlicense: mit\n---\n\n# Mein Käse\n".encode()


@pytest.mark.parametrize("before", [b"", MINE])
def test_a_dataset_repository_has_the_card_in_its_readme(hub, here, server, command, before):
    """As a section: what the user has written before and after it stays."""
    hub.put("org/data", {"README.md": before} if before else {})
    config = f"{endpoint(server)}, prices: {{prompt: 1}}"
    write_job(here, job_yaml(config, output="hf://datasets/org/data/part"), ["a", "b"])
    command("run", "job.yaml")
    readme = hub.files("org/data")["README.md"]
    assert readme.startswith(before or b"---\n")
    if not before:
        header = yaml.safe_load(readme.split(b"---\n")[1])
        assert header["configs"] == [{"config_name": "default", "data_files": "part/**/*.jsonl*"}]
    card = readme.decode()
    assert "\n| rollout_fn.prompt | Say {text} |\n" in card
    assert " 2 written in " in card
    assert "cost" not in card
    assert server.url not in card
    assert "cost" in (here / "checkpoints/card.md").read_text()
    hub.put("org/data", {"README.md": readme.replace(b"Made by", b"made by") + b"after\n"})
    command("run", "job.yaml")
    assert hub.files("org/data")["README.md"] == readme + b"after\n"
    commits = len(hub.commits("org/data"))
    command("run", "job.yaml")
    assert len(hub.commits("org/data")) == commits


@pytest.mark.slow
def test_a_finished_run_stays_finished_where_the_hub_takes_no_readme(hub, here, server, command):
    hub.put("org/data", {})
    job = job_yaml(endpoint(server), output="hf://datasets/org/data/part")
    write_job(here, f"{job}          card: false\n", ["a"])
    command("run", "job.yaml")
    (here / "job.yaml").write_text(job)
    hub.fail("commit", status=403, times=9)
    said = command("run", "job.yaml")
    assert "1 of 1 document is in 1 file" in said
    assert "The card was not written: hf://datasets/org/data: README.md cannot be changed" in said
    assert "README.md" not in hub.files("org/data")
    assert (here / "checkpoints/card.md").exists()
