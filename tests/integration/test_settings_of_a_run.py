"""Each setting does to a run that has begun what its docstring says in brackets.

A setting that changes answers and is left out of the identity would mix two runs in silence.
"""

import copy
import inspect
import shutil
import sys

import pytest
from datatrove.pipeline.writers import JsonlWriter

from datatrove_ckpt.checkpoint.compare import compare
from datatrove_ckpt.common.setting_types import meanings
from datatrove_ckpt.config import InferenceConfig, MonitoringConfig
from datatrove_ckpt.errors import CheckpointMismatch, ServerRefused
from datatrove_ckpt.generation import provider_passes
from datatrove_ckpt.generation.requests import hash_payload
from datatrove_ckpt.rollouts import (
    ChunkedRollout,
    ClassifyRollout,
    CompletionRollout,
    EmbedRollout,
    JudgeRollout,
    PromptRollout,
)
from datatrove_ckpt.runner import InferenceRunner
from datatrove_ckpt.testing import outputs
from datatrove_ckpt.user_code.code_identity import code_identity
from tests.jobs import Budget, chat, documents, writer
from tests.provider import FakeProvider

CLASSES = ("identity", "request", "free")
CHOOSE = """\
{0}: the docstring must say in brackets what another value does to a run that has begun, as in "seed (request): ...".
Choose
    identity    it may change answers or output: it belongs to the identity (InferenceConfig.compared, or generation/run_identity.py)
    request     likewise, and it is a part of the payload, whose hash is the key of an answer
    free        it changes neither
"""


async def rollout(document, generate, **shared):
    return await generate(chat(document.text))


async def another(document, generate, **shared):
    return await generate(chat(document.text + "."))


OTHER = {
    # of the config
    "server_type": "dummy",
    "model_name_or_path": "another",
    "endpoint_url": lambda job: job.server.url.replace("127.0.0.1", "localhost"),
    "endpoints": lambda job: [{"url": job.server.url, "requests_per_minute": 600, "prices": {"prompt": 1}}],
    "api_key": "key-of-a-test",
    "api_key_env": "PATH",
    "default_generation_params": {"temperature": 0.5},
    "max_concurrent_documents": 1,
    "request_timeout": 500.0,
    "half_answers": False,
    "model_kwargs": {"dtype": "half"},
    "server_log_folder": lambda job: str(job.folder / "logs"),
    "seed": 1,
    "gpus": 8,
    "server_python": sys.executable,
    "prices": {"prompt": 1},
    "on_cut_off": "drop",
    "on_loop": {"retry": 2, "temperature": 0.9},
    "on_refusal": "dead_letter",
    "refusals": ["no"],
    "until": 1000,
    "max_cost": 1000.0,
    "max_total_tokens": 1000,
    # of the runner
    "rollout_fn": another,
    "output_writer": lambda job: JsonlWriter(str(job.folder / "output"), "x_${rank}_${chunk_index}.jsonl", compression=None),
    "shared_context": {"style": "plain"},
    "checkpoints_local_dir": lambda job: str(shutil.copytree(job.folder / "checkpoints", job.folder / "moved")),
    "metadata_key": "results",
    "on_document_error": "dead_letter",
    "max_dead_letters": 1,
    "seek": True,
    "drain_signals": ("SIGTERM",),
    "checkpoints_remote_dir": lambda job: str(job.folder / "mirror"),
    "monitoring": MonitoringConfig(run_name="another"),
    "finished_from": lambda job: str(job.reference),
    "answers_from": lambda job: str(job.reference),
    "preemption_notice": {"command": ["false"]},
    "rollout_version": "1",
    "answer": "answer",
}  # fmt: skip
"""Another value of each setting whose type alone gives none."""
OF_SERVERS = {"replicas", "server_python"}
"""Settings that no endpoint takes."""


CONFIG = inspect.signature(InferenceConfig).parameters
RUNNER = inspect.signature(InferenceRunner).parameters
EFFECTS = {
    name: effect
    for cls in (InferenceConfig, InferenceRunner)
    for name, (effect, _) in meanings(cls).items()
    if effect
}
SETTINGS = [name for name in (*CONFIG, *RUNNER) if EFFECTS.get(name) != "below"]


class Job:
    """A run of five documents, of which three are done, in a folder of its own."""

    def __init__(self, folder, server, reference):
        self.folder = folder
        self.server = server
        self.reference = reference

    def step(self, changed=None, server_type="endpoint"):
        """With another value of a setting."""
        config = {
            "server_type": server_type,
            "model_name_or_path": "fake",
            "endpoint_url": self.server.url,
            "max_concurrent_generations": 1,
            "server_patience_seconds": 60.0,
        }
        arguments = {
            "rollout_fn": rollout,
            "output_writer": writer(self.folder),
            "checkpoints_local_dir": str(self.folder / "checkpoints"),
            "records_per_chunk": 2,
            "keep_answers": True,
        }
        if changed in CONFIG:
            config[changed] = self._other(changed, config.get(changed, CONFIG[changed].default))
        elif changed is not None:
            usual = arguments.get(changed, RUNNER[changed].default)
            arguments[changed] = self._other(changed, usual)
        if changed == "endpoints":
            del config["endpoint_url"]
        if changed == "rollout_results":
            arguments["answer"] = "answer"
        if changed == "max_cost":
            config["prices"] = {"prompt": 1, "completion": 2}
        return InferenceRunner(config=InferenceConfig(**config), **arguments)

    def _other(self, name, usual):
        if name in OTHER:
            value = OTHER[name]
            return value(self) if inspect.isfunction(value) and value is not another else value
        if isinstance(usual, bool):
            return not usual
        assert isinstance(usual, int | float), f"add another value of {name} to OTHER"
        return usual + 1

    def payloads(self):
        """Hashes of what the server was sent since the last look."""
        found = {hash_payload(payload)[0] for payload in self.server.payloads}
        self.server.payloads.clear()
        return found


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The run, and beside it the same run without a stop."""
    top = tmp_path_factory.mktemp("settings")
    budget = Budget()
    with FakeProvider() as server, pytest.MonkeyPatch.context() as patch:
        for name in ("POLL_SECONDS", "LOOK_SECONDS"):
            patch.setattr(provider_passes, name, 0.01)
        server._status = budget
        budget.left = 3
        job = Job(top / "job", server, top / "reference")
        with pytest.raises(ServerRefused):
            job.step().run(documents(5))
        budget.left = 10**9
        Job(job.reference, server, None).step().run(documents(5))
        yield job


@pytest.fixture
def job(stopped, tmp_path):
    shutil.copytree(stopped.folder, tmp_path / "job")
    stopped.payloads()
    return Job(tmp_path / "job", stopped.server, stopped.reference)


def test_each_setting_says_what_another_value_does_and_the_identity_has_those_that_are_compared(
    job,
):
    undecided = [name for name in SETTINGS if EFFECTS.get(name) not in CLASSES]
    assert not undecided, CHOOSE.format(", ".join(undecided))
    for name in SETTINGS:
        server = {"server_type": "vllm"} if name in OF_SERVERS else {}
        usual = job.step(**server).identity(1)
        changes = compare(usual.stored, job.step(name, **server).identity(1))
        assert bool(changes) is (EFFECTS[name] != "free"), CHOOSE.format(name)


@pytest.mark.matrix(
    "name", [name for name in SETTINGS if name not in {*OF_SERVERS, "retry_dead_letters"}]
)
def test_another_value_is_refused_or_changes_no_byte(job, name):
    step = job.step(name)
    if EFFECTS[name] == "free":
        step.run(documents(5))
        assert outputs(job.folder / "output") == outputs(job.reference / "output"), name
        assert len(job.server.payloads) <= 2
        return
    with pytest.raises(CheckpointMismatch):
        step.run(documents(5))
    assert not job.payloads()


@pytest.mark.parametrize("name", [name for name in SETTINGS if EFFECTS.get(name) == "request"])
def test_a_setting_of_requests_is_in_the_hash_of_the_payload(tmp_path, stopped, name):
    stopped.payloads()
    Job(tmp_path / "usual", stopped.server, None).step().run(documents(1))
    usual = stopped.payloads()
    Job(tmp_path / "other", stopped.server, None).step(name).run(documents(1))
    assert usual.isdisjoint(stopped.payloads())


ROLLOUTS = [
    PromptRollout("{text}"),
    CompletionRollout("{text}"),
    ChunkedRollout("{text}"),
    JudgeRollout("{text}", judge_prompt="{answer}"),
    EmbedRollout(),
    ClassifyRollout(),
]


@pytest.mark.parametrize("made", ROLLOUTS)
def test_each_setting_of_a_ready_made_rollout_is_compared(made):
    """They are its attributes, so none can be left out."""
    usual = code_identity(made, None).fields
    for name in inspect.signature(type(made)).parameters:
        changed = copy.copy(made)
        setattr(changed, name, "another value")
        assert code_identity(changed, None).fields != usual, name
