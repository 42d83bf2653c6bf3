"""``run --dry-run`` prints the configuration as YAML that can be run again."""

import re
import sys
from pathlib import Path

import pytest

from datatrove_ckpt.cli.main import main
from datatrove_ckpt.cli.yaml_config import MASK, read_value
from tests.yaml_jobs import job_yaml, write_job

CONFIGS = Path(__file__).parents[2] / "configs"

JOB = (
    job_yaml('server_type: dummy, model_name_or_path: m, request_timeout: "90"')
    + "          records_per_chunk: 2\n"
)

MINE = """
import re
from datatrove_ckpt.readers import JsonlReader

class Rollout:
    def __init__(self, token, prompt_key="question", stop=("a", "b"), pattern=re.compile("x"), api_key="sk-in-source",
                 limits: tuple[int, ...] = (1, 2), words={"a"}, **others):
        self.token = token
        self.others = "found elsewhere: hunter3"

    async def __call__(self, document, generate, **shared):
        return await generate({"messages": [{"role": "user", "content": document.text}]})

class Reader(JsonlReader):
    def __init__(self, data_folder, text_key="text", auth_key="none", **others):
        super().__init__(data_folder, text_key=text_key, **others)
"""


@pytest.fixture
def printed(tmp_path, monkeypatch, capsys):
    """What ``run FILE --dry-run`` prints, in a folder with JOB, its documents and my_module."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_module", raising=False)
    write_job(tmp_path, JOB, [f"Rain {number}." for number in range(5)])
    Path("my_module.py").write_text(MINE)

    def dry_run(file="job.yaml", *overrides):
        capsys.readouterr()
        assert main(["run", str(file), "--dry-run", *overrides]) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return dry_run


def runner(text):
    return read_value(text)["executor"]["init_args"]["pipeline"][-1]["init_args"]


@pytest.mark.matrix("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_is_printed_and_what_is_printed_prints_itself(printed, path):
    Path("configs").symlink_to(CONFIGS)  # an input of one of them
    before = sorted(Path().rglob("*"))
    text = printed(path)
    assert sorted(Path().rglob("*")) == before
    runs = [text]
    if path.stem == "steps":
        documents = [document.partition("\n")[2] for document in text.split("--- # ")]
        runs = [document for document in documents if document]  # a query has none
        assert len(runs) == 3
    for run in runs:
        Path("full.yaml").write_text(run)
        assert printed("full.yaml") == run


def test_secrets_are_hidden_and_a_file_without_them_is_refused_until_they_are_given(
    printed, capsys
):
    rollout = "{class_path: my_module.Rollout, init_args: {token: hunter2, auth: {password: p4ss}}}"
    reader = "{class_path: my_module.Reader, init_args: {data_folder: input, text_key: body, auth_key: s3cret}}"
    changes = [f"--pipeline.1.rollout_fn={rollout}", f"--pipeline.0={reader}"]
    changes += ["--pipeline.1.shared_context={client: {api_key: sk-abcdefghijklmn}}"]
    changes += [
        "--pipeline.1.config.default_generation_params={extra_headers: {X-Team: t3am}, stop: [a]}"
    ]
    text = printed("job.yaml", *changes)
    for secret in ("hunter2", "p4ss", "sk-", "t3am", "s3cret"):
        assert secret not in text
    arguments = runner(text)
    assert arguments["config"]["default_generation_params"]["stop"] == ["a"]
    assert (
        read_value(text)["executor"]["init_args"]["pipeline"][0]["init_args"]["text_key"] == "body"
    )
    Path("full.yaml").write_text(text)
    assert main(["run", "full.yaml"]) == 2
    assert capsys.readouterr().err == (
        "error: pipeline.0.auth_key: --dry-run hid its value. Write it into a file that only you can read.\n"
    )
    places = re.findall(f"^ *([^ ]+): '{re.escape(MASK)}'$", text, re.MULTILINE)
    assert places == ["auth_key", "token", "password", "X-Team", "api_key"]
    for secret in ("s3cret", "hunter2", "p4ss", "t3am", "sk-abcdefghijklmn"):
        Path("full.yaml").write_text(Path("full.yaml").read_text().replace(MASK, secret, 1))
    assert printed("full.yaml") == text


def test_a_script_for_slurm_shows_no_secret(printed):
    text = printed(
        CONFIGS / "slurm.yaml", "--executor.env_command=export HF_TOKEN=hf_abcdefghijklmnop"
    )
    assert "hf_abc" not in text
    assert f"\n# {MASK}\n" in text
