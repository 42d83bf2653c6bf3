"""YAML files: every config of the project builds, and every mistake is one line that a stranger
understands.
"""

import inspect
import sys
from pathlib import Path

import numpy as np
import pytest
from datatrove.executor import LocalPipelineExecutor as DatatroveExecutor

from datatrove_ckpt import InferenceConfig, LocalPipelineExecutor
from datatrove_ckpt.cli.short_form import read_config
from datatrove_ckpt.cli.yaml_config import build, load, read_value
from datatrove_ckpt.config.inference_config import ENGINES
from datatrove_ckpt.errors import ConfigError
from tests import golden
from tests.yaml_jobs import job_yaml

JOB = job_yaml(
    "server_type: dummy, model_name_or_path: m", data="documents", output="out", rollout="chat"
)


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Builds JOB with pieces of its text replaced; my_module is importable."""
    (tmp_path / "my_module.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "from datatrove.pipeline.base import PipelineStep\n"
        "if TYPE_CHECKING:\n    from nowhere import Nothing\n"
        "async def my_rollout(document, generate): ...\n"
        "def adapter(self, data, path, id_in_file): ...\n"
        "class Step(PipelineStep):\n"
        "    def __init__(self, size: int, nothing: 'Nothing' = None, **others): self.got = size, nothing, others\n"
        "    def run(self, data, rank=0, world_size=1): ...\n"
        "NUMBER = 7\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_module", raising=False)

    def from_text(*replacements):
        text = JOB
        for old, new in replacements:
            assert old in text
            text = text.replace(old, new)
        Path("job.yaml").write_text(text)
        return build(load("job.yaml"))

    return from_text


def mistake(build_job, *replacements):
    with pytest.raises(ConfigError) as refused:
        build_job(*replacements)
    return str(refused.value)


# --------------------------------------------------------------------------- what is built


@pytest.mark.parametrize("given", ["null", "{a: 1}", "my_module.my_rollout"])
def test_shared_context_may_be_a_mapping_or_an_import_path(job, given):
    runner = job(
        ("rollout_fn: chat", f"rollout_fn: chat\n          shared_context: {given}")
    ).pipeline[1]
    expected = sys.modules["my_module"].my_rollout if "my" in given else read_value(given)
    assert runner.shared_context == expected


def test_functions_are_import_paths_and_may_be_steps(job):
    reader, runner = job(
        ("chat", "my_module.my_rollout"), ("documents}", "d, adapter: my_module.adapter}")
    ).pipeline
    assert inspect.iscoroutinefunction(runner.rollout_fn)
    assert reader.adapter.__func__ is sys.modules["my_module"].adapter
    executor = job(
        (
            "- class_path: JsonlReader\n        init_args: {data_folder: documents}",
            "- my_module.my_rollout",
        )
    )
    assert executor.pipeline[0] is sys.modules["my_module"].my_rollout


def test_a_class_of_mine_gets_its_further_arguments(job):
    reader, step = (
        "JsonlReader\n        init_args: {data_folder: documents}",
        "my_module.Step\n        init_args: ",
    )
    executor = job((reader, f"{step}{{size: 3, other: [1, x]}}"))
    assert executor.pipeline[0].got == (3, None, {"other": [1, "x"]})


def test_a_folder_may_come_with_storage_options(job):
    reader = job(
        ("data_folder: documents", "data_folder: [memory://d, {skip_instance_cache: true}]")
    ).pipeline[0]
    assert not reader.data_folder.is_local()


def test_the_short_name_of_the_executor_means_ours_and_the_long_one_datatroves(job):
    assert type(job()) is LocalPipelineExecutor
    assert (
        type(job(("LocalPipelineExecutor", "datatrove.executor.LocalPipelineExecutor")))
        is DatatroveExecutor
    )


# --------------------------------------------------------------------------- mistakes

CONFIG = "config: {server_type: dummy, model_name_or_path: m}"
READER = "class_path: JsonlReader\n        init_args: {data_folder: documents}"


@pytest.mark.parametrize(
    "old, new",
    golden.values("mistakes_in_yaml", globals()),
)
def test_a_mistake_is_one_line_with_its_place(job, old, new):
    said = mistake(job, (old, new))
    assert "\n" not in said
    assert "hunter2" not in said
    place = new.rpartition("\n")[2].strip() or old
    golden.hold("yaml", place, said, ENGINES=", ".join(ENGINES))


def test_a_number_of_numpy_and_a_path_are_what_they_stand_for():
    config = InferenceConfig("dummy", Path("m"), tp=np.int64(2), hang_timeout=np.float32(1))
    assert (config.tp, config.hang_timeout) == (2, 1.0)


@golden.rows("broken_yaml")
def test_a_file_that_cannot_be_read_is_named_with_the_line(tmp_path, monkeypatch, code):
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(eval(code))
    with pytest.raises(ConfigError) as refused:
        load("job.yaml")
    golden.hold("broken_yaml", code, str(refused.value))


def test_texts_in_an_open_mapping_stay_texts(job):
    params = 'default_generation_params: {stop: "no", user: "1:00:00", n: 2}'
    config = job(("server_type: dummy,", f"server_type: dummy, {params},")).pipeline[1].config
    assert config.default_generation_params == {"stop": "no", "user": "1:00:00", "n": 2}


def test_a_whole_number_is_sent_as_earlier_releases_sent_it(tmp_path):
    """Kept answers are found by the bytes of their request, in which 0 is not 0.0."""
    (tmp_path / "input.jsonl").write_text('{"text": "a"}\n')
    job = ["temperature=0", "top_p='1'", "max_tokens=5", "prompt=Sum up: {text}", "model=m"]
    job += ["endpoint=http://127.0.0.1:1/v1", f"run_folder={tmp_path}/run"]
    runner = build(read_config(None, [*job, f"input={tmp_path}/input.jsonl"])).pipeline[1]
    sent = runner.config.default_generation_params
    assert repr([sent["temperature"], sent["top_p"], sent["max_tokens"]]) == "[0.0, 1.0, 5]"
