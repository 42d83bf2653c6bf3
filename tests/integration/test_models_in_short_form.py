"""``models`` in the short form: several models by name, with settings of their own."""

from pathlib import Path

import pytest
import yaml

from datatrove_ckpt.testing import FakeServer, outputs
from tests.yaml_jobs import write_rows

MODELS = {"writer": {"model": "w", "max_tokens": 9}, "judge": {"model": "j", "temperature": 0}}
ROLLOUT = """
async def rollout(document, generate):
    text = (await generate({"messages": [{"role": "user", "content": document.text}]})).text
    return (await generate.judge({"messages": [{"role": "user", "content": f"Judge {text}"}]})).text
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    write_rows("in.jsonl", [{"id": "a", "text": "x"}])
    Path("asks.py").write_text(ROLLOUT)


def write(server, models, **settings):
    job = {"run_folder": "x", "input": "in.jsonl", "rollout": "asks.rollout", "models": models}
    job |= {"endpoint": server.url, "max_tokens": 5, **settings}
    Path("job.yaml").write_text(yaml.safe_dump(job, sort_keys=False))


def test_each_model_has_its_own_settings_and_those_of_the_job(command):
    with FakeServer() as server, FakeServer() as other:
        judge = {**MODELS["judge"], "endpoint": other.url}
        write(server, {**MODELS, "judge": judge}, request_max_attempts=2)
        command("run", "job.yaml")
    (first,), (second,) = server.payloads, other.payloads
    assert (first["model"], first["max_tokens"]) == ("w", 9)
    assert (second["model"], second["max_tokens"], second["temperature"]) == ("j", 5, 0)
    assert outputs(Path("x/output"))
    printed = command("run", "job.yaml", "--print-config")
    assert printed.count("request_max_attempts: 2") == 2


@pytest.mark.parametrize(
    "models, message",
    [
        ({"judge": {"modl": "m"}}, 'models.judge: unknown key "modl"'),
        ({"judge": {}}, "model: is missing"),
        ({"judge": {"model": "m", "text_key": "x"}}, 'models.judge: unknown key "text_key"'),
    ],
)
def test_mistakes_name_the_model(server, command, models, message):
    write(server, models)
    assert message in command("run", "job.yaml", code=2).error
