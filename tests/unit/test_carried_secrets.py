"""No pickle of a job holds a secret, wherever the script has it."""

import copy

import dill
import pytest
from datatrove.executor import SlurmPipelineExecutor

from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.user_code import script_names
from tests import golden
from tests.user_modules import as_main, step_of

SECRETS = [
    "hunter2hunter2",
    "passw0rdXYZ",
    "defaulttok3n99999",
    "kwtok3n9999999",
    "objapikey123456",
    "sk-abc0123456789abcdef",
]
SCRIPT = """
import functools
from typing import NamedTuple

EOS_TOKEN = "<|end|>"
SPECIAL = {"pad_token": "</s>", "max_tokens": 4, "text_key": "content"}
PROMPT = "Give a basic explanation of hf_hub_download."
KEYS = {"openai": "sk-abc0123456789abcdef"}

class Settings:
    password = "hunter2hunter2"
    url = "https://user:passw0rdXYZ@host/x"

class Fine:
    eos_token = EOS_TOKEN
    key = "text"

class Client:
    def __init__(self, **values):
        vars(self).update(values)
    async def __call__(self, document, generate):
        return None

class Row(NamedTuple):
    password: str

def default(text, token="defaulttok3n99999"):
    return text

def keyword_only(text, *, token="kwtok3n9999999"):
    return text

client = Client(api_key="objapikey123456")
nested = [{"a": (Client(inner={"api_key": "objapikey123456"}),)}]
row = Row("hunter2hunter2")
bound = functools.partial(print, password="hunter2hunter2")

def closed():
    password = "hunter2hunter2"
    return lambda: password
closure = closed()

def written():
    return "sk-abc0123456789abcdef"

async def rollout(document, generate):
    first = EOS_TOKEN, SPECIAL, PROMPT, Fine, KEYS, Settings, default, keyword_only, client
    return first, nested, row, bound, closure, written

async def plain(document, generate, **shared):
    return Fine

async def asks(document, generate, api_key="objapikey123456"):
    return None

def make(api_key):
    async def rollout(document, generate):
        return api_key
    return rollout
"""
LEFT = [
    "KEYS",
    "Settings",
    "bound",
    "client",
    "closure",
    "default",
    "keyword_only",
    "nested",
    "row",
    "written",
]


@pytest.fixture
def script(tmp_path, monkeypatch):
    return as_main(tmp_path, SCRIPT, monkeypatch)


def slurm_job(folder, step):
    return SlurmPipelineExecutor([[], step], 1, "1:00:00", "any", logging_dir=str(folder / "logs"))


def test_what_holds_a_secret_stays_behind_and_what_only_sounds_like_one_does_not(tmp_path, script):
    found = script_names.collect(script.rollout)
    assert sorted(found.left_out) == LEFT
    assert sorted(found.values) == ["EOS_TOKEN", "Fine", "PROMPT", "SPECIAL"]
    assert "Settings.password, Settings.url" in found.left_out["Settings"]
    assert "default.token" in found.left_out["default"]
    assert "Client.api_key" in found.left_out["client"]
    pickled = dill.dumps(step_of(tmp_path, script.rollout))
    assert [secret for secret in SECRETS if secret.encode() in pickled] == []
    assert b"<|end|>" in pickled


@golden.rows("carried_secrets")
def test_a_rollout_that_holds_a_secret_is_refused_before_a_file_is_opened(tmp_path, script, code):
    step = step_of(tmp_path, eval(code, vars(script)))
    with pytest.raises(ConfigError) as refused:
        slurm_job(tmp_path, step).run()
    golden.hold("carried_secrets", code, str(refused.value))
    assert not (tmp_path / "logs" / "executor.pik").exists()
    with pytest.raises(ConfigError):
        dill.dumps(step)


@pytest.mark.parametrize(
    "context, place",
    [
        ({"clients": [{"api_key": "objapikey123456"}]}, r": shared_context.clients.api_key. "),
        ({"header": "x-quite-ordinary-text"}, "the environment variable SOME_SERVICE_API_KEY"),
    ],
)
def test_a_secret_in_shared_context_is_refused(tmp_path, script, monkeypatch, context, place):
    monkeypatch.setenv("SOME_SERVICE_API_KEY", "quite-ordinary-text")
    with pytest.raises(ConfigError, match=place):
        dill.dumps(step_of(tmp_path, script.plain, shared_context=context))
    dill.dumps(step_of(tmp_path, script.plain, shared_context={"eos_token": "</s>", "key": "text"}))


def test_what_stays_behind_is_said_where_the_job_is_submitted(tmp_path, script, log):
    copy.deepcopy(slurm_job(tmp_path, step_of(tmp_path, script.rollout)))
    said = [
        line.removeprefix("WARNING The script's ").split()[0]
        for line in log
        if "is not pickled with" in line
    ]
    assert sorted(said) == LEFT
