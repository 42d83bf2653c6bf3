"""Which changes of a user's code make another run of it, and that a change of Python makes none."""

import json
import os
import sys
import types
from pathlib import Path

import dill
import pytest
from datatrove.executor.base import ExecutorJSONEncoder
from multiprocess.reduction import ForkingPickler

from datatrove_ckpt.checkpoint import identity
from datatrove_ckpt.checkpoint.checksummed_lines import checksummed_json
from datatrove_ckpt.checkpoint.compare import compare
from datatrove_ckpt.checkpoint.identity import FORMAT
from datatrove_ckpt.errors import CheckpointMismatch, ConfigError
from datatrove_ckpt.user_code import description, statements
from datatrove_ckpt.user_code.code_identity import code_identity
from tests import golden, processes
from tests.jobs import ask, documents, run_job, runner
from tests.kept import content_of, edit
from tests.user_modules import DESCRIBE, FOLDER, check_hashes, load, load_changed


def test_a_setting_that_json_cannot_express_counts_with_its_type(tmp_path, server):
    run_job(tmp_path, server, 1, config={"model_kwargs": {"tokenizer": Path("a"), "seed": 1}})
    assert fields_of(tmp_path)["model_kwargs"] == {"seed": 1, "tokenizer": "<pathlib.PosixPath>"}
    with pytest.raises(CheckpointMismatch, match=r"model_kwargs\.tokenizer: "):
        run_job(tmp_path, server, 1, config={"model_kwargs": {"tokenizer": "a", "seed": 1}})


# what the hash of code sees ----------------------------------------------------------------------


def code_of(rollout):
    return code_identity(rollout, None).fields["rollout_fn code"]


def tree_hash(source):
    return statements.write_tree(statements.parse(source))


@pytest.mark.parametrize(
    "one, other",
    golden.values("other_code", globals()),
)
def test_other_code_has_another_hash(one, other):
    assert tree_hash(one) != tree_hash(other)


def test_a_wrapper_of_an_installed_package_does_not_count(tmp_path):
    def wrapped(body, file):
        lines = [
            "import functools",
            "def wrap(f):",
            "    @functools.wraps(f)",
            "    def wrapper():",
            f"        {body}",
        ]
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("\n".join([*lines, "    return wrapper"]))
        return code_identity(load(tmp_path / file).wrap(load_changed), None).fields

    assert wrapped("return f()", "site-packages/a.py") == wrapped(
        "return f() or None", "site-packages/b.py"
    )
    assert wrapped("return f()", "own/a.py") != wrapped("return f() or None", "own/b.py")


def test_source_that_was_edited_after_the_import_is_not_taken_for_the_code(tmp_path):
    rollout = load_changed(tmp_path, "first").rollout
    before = code_of(rollout)
    assert before.startswith("source ")
    load_changed(tmp_path, "first", ("import json", "import json\n# asks\n"))
    assert code_of(rollout) == before
    load_changed(tmp_path, "first", ("* times", "* times + '.'"))  # in the same line
    assert code_of(rollout).startswith("bytecode ")


def test_a_type_has_one_name_on_all_python_versions():
    def of_module(module, name):
        return types.new_class(
            name, exec_body=lambda namespace: namespace.update(__module__=module)
        )

    assert description.type_name(of_module("pathlib._local", "PosixPath")) == "pathlib.PosixPath"
    assert description.type_name(of_module("_thread", "lock")) == "_thread.lock"


# every Python version ----------------------------------------------------------------------------

DESCRIBE_WITHOUT_SOURCE = (
    DESCRIBE
    + """
namespace = {}
exec("def rollout(d):\\n    return d in {'a', 'b', 'c', 'd', 'e', 'f'}", namespace)
print(walk.describe({"rollout_fn": namespace["rollout"]}).fields["rollout_fn code"])
"""
)


def test_code_has_the_same_hash_on_this_python():
    check_hashes(sys.version_info[1], sys.executable)


def test_a_function_without_source_has_the_same_hash_in_every_process_and_names_its_python():
    found = {
        processes.run(
            [sys.executable, "-c", DESCRIBE_WITHOUT_SOURCE, FOLDER],
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in "01"
    }
    assert len(found) == 1
    assert found.pop().startswith(f"bytecode {sys.implementation.cache_tag} ")


def test_a_setting_that_is_null_is_another_one_than_none():
    kept = {"identity_version": 1, "seed": None}
    (change,) = compare(kept, identity.RunIdentity({"identity_version": 1}))
    assert change.field == "seed"


# checkpoints of other versions -------------------------------------------------------------------


def run_json(folder):
    return folder / "checkpoints" / "00000" / "run.json"


def fields_of(folder):
    """The identity that is kept."""
    kept = content_of(run_json(folder))
    return {
        name: value for name, value in kept.items() if name not in ("owner", "accepted_changes")
    }


def test_a_run_that_the_version_before_described_goes_on(tmp_path, server, log):
    rollout = load_changed(tmp_path, "first").rollout
    run_job(tmp_path, server, 1, rollout)
    kept = fields_of(tmp_path)
    edit(run_json(tmp_path), **{"identity_version": 5, "uses.helper code": "source 0"})
    (run_json(tmp_path).parent.parent / "job.json").unlink()
    log.clear()
    run_job(tmp_path, server, 2, rollout)
    assert sum("another version" in line for line in log) == 1
    assert fields_of(tmp_path) == kept
    with pytest.raises(CheckpointMismatch):
        run_job(tmp_path, server, 3, load_changed(tmp_path, "other", ("Rewrite", "Write")).rollout)


def test_rollout_version_replaces_the_code(tmp_path, server):
    first, second = (
        load_changed(tmp_path, "first"),
        load_changed(tmp_path, "second", ("Rewrite", "Write")),
    )
    run_job(tmp_path, server, 1, first.rollout, rollout_version="1")
    run_job(tmp_path, server, 2, second.rollout, rollout_version="1")
    assert not {"rollout_fn", "uses.helper code"} & fields_of(tmp_path).keys()
    with pytest.raises(CheckpointMismatch, match='rollout_version: "1" -> "2"'):
        run_job(tmp_path, server, 3, second.rollout, rollout_version="2")


def test_a_prompt_that_a_program_replaces_after_it_has_made_the_step_is_another_run(
    tmp_path, server
):
    """As in a notebook."""

    async def rollout(document, generate, prompt):
        return prompt

    shared = {"prompt": "A"}
    step = runner(tmp_path, server, rollout, shared_context=shared)
    step.run(documents(2))
    shared["prompt"] = "B"
    with pytest.raises(CheckpointMismatch, match='prompt: "A" -> "B"'):
        step.run(documents(2))


SECRETS = {
    "openai_api_key": "s3cret-s3cret",
    "pad-token": "s3cret",  # 0.1.0 did not take "-" for "_"
    "options": {"headers": {"Authorization": "s3cret"}},
    "client": "sk-s3crets3crets3cret",
}


class SecretAsker:
    def __init__(self):
        self.headers = {"Authorization": "s3cret"}

    async def __call__(self, document, generate, **shared):
        return (await ask(document, generate)).text


def secret_runner(folder, server, **settings):
    params = {"extra_headers": {"Authorization": "s3cret"}}
    step = runner(folder, server, SecretAsker(), **{"shared_context": SECRETS} | settings)
    step.config.default_generation_params = params
    return step


def test_executor_json_shows_no_secret_no_file_holds_it_and_a_worker_has_it(tmp_path, server):
    step = secret_runner(tmp_path, server)
    text = json.dumps(step, cls=ExecutorJSONEncoder)
    assert "s3cret" not in text
    assert "hash scrypt" not in text  # nothing reads it there
    assert "s3cret" not in repr(step.config)
    assert step.config.model_name_or_path in text
    with pytest.raises(ConfigError, match="Authorization") as refused:
        dill.dumps(step)
    assert "s3cret" not in str(refused.value)
    copy = ForkingPickler.loads(ForkingPickler.dumps(step))
    assert copy.shared_context == SECRETS
    assert copy.config.default_generation_params == step.config.default_generation_params
    vars(copy)["shared_context"] = SECRETS  # as earlier versions pickled it
    assert copy.shared_context == SECRETS


def test_a_secret_that_an_earlier_version_kept_is_the_same_run_and_is_removed(tmp_path, server):
    job = run_json(tmp_path).parent.parent / "job.json"
    step = secret_runner(tmp_path, server)
    step.run(documents(2))
    kept = fields_of(tmp_path)
    secrets = {
        f"shared_context.{name}": value for name, value in SECRETS.items() if "api_key" not in name
    }
    secrets["rollout_fn.headers"] = {"Authorization": "s3cret"}
    secrets["default_generation_params"] = step.config.default_generation_params
    old = checksummed_json({"format": FORMAT, **step.identity(1).fields, **secrets})
    run_json(tmp_path).write_bytes(old)
    job.write_bytes(old)
    with pytest.raises(CheckpointMismatch) as refused:
        secret_runner(
            tmp_path, server, shared_context=SECRETS | {"client": "sk-anothers3crets3cret"}
        ).run(documents(3))
    assert "shared_context.client" in str(refused.value)
    assert "s3cret" not in str(refused.value)
    secret_runner(tmp_path, server).run(documents(3))
    assert fields_of(tmp_path) == kept
    assert "s3cret" not in run_json(tmp_path).read_text() + job.read_text()


def test_of_two_mappings_what_differs_is_named_even_where_it_is_cut(tmp_path, server):
    def run(end):
        params = {"stop": "x" * 400 + end, "top_p": 0.5}
        run_job(tmp_path, server, 1, config={"default_generation_params": params})

    run("a")
    with pytest.raises(CheckpointMismatch, match=r"  default_generation_params\.stop: ") as refused:
        run("b")
    assert "top_p" not in str(refused.value)
