"""A task that an earlier version has queued runs with this one: what its executor.pik names is
still there.

tests/data/queued has the files: see tests/make_queued.py.
"""

import json
import os
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import dill
import pytest

from datatrove_ckpt.common import LAUNCH
from datatrove_ckpt.old_paths import MOVED
from tests import processes
from tests.jobs import ids
from tests.make_queued import (
    QUEUED,
    SITE,
    TASKS,
    TEXTS,
    identity,
    queue,
    runners,
    settings,
    write_input,
)

PICKLES = sorted(str(path.relative_to(QUEUED).with_suffix("")) for path in QUEUED.glob("*/*.pik"))


@pytest.mark.parametrize("pickle", PICKLES)
def test_what_is_queued_is_the_job_that_it_was(pickle, here, monkeypatch):
    monkeypatch.syspath_prepend(SITE)
    made = json.loads(
        (QUEUED / pickle).with_name("made.json").read_text().replace("EnvironmentSecret", "Secret")
    )[Path(pickle).name]
    steps = runners(dill.loads((QUEUED / pickle).with_suffix(".pik").read_bytes()))
    for then, step in zip(made, steps, strict=True):
        assert known(then["settings"], settings(step)) == then["settings"]
        assert identity(step) == then["identity"]


def test_a_file_that_names_classes_by_their_modules_is_the_job_that_it_was(here, monkeypatch):
    monkeypatch.setenv("PATH", os.environ["PATH"])
    monkeypatch.setenv(LAUNCH, "")  # which a submission sets
    made = json.loads((QUEUED / "0.2.0-71ea9718" / "made.json").read_text())["paths"]
    (step,) = queue("paths", here)[1]
    (then,) = made
    assert known(then["settings"], step["settings"]) == then["settings"]
    assert step["identity"] == then["identity"]


@pytest.mark.parametrize(
    "old, new",
    [
        ("readers.batch:BatchReader", "readers"),
        ("readers.input_progress:FileProgress", "readers.inputs"),
        ("readers.pages:PageReader", "readers"),
        ("readers.positions:FileState", "readers.inputs"),
        ("readers.positions:PositionedDocument", "readers.inputs"),
        ("readers.texts:TextReader", "readers"),
        ("rollouts.batch:BatchRollout", "rollouts"),
        ("testing.server:FakeServer", "testing"),
    ],
)
def test_a_class_is_found_where_it_was_when_a_task_was_queued(old, new):
    module, _, name = old.partition(":")
    pickled = f"cdatatrove_ckpt.{module}\n{name}\n.".encode()
    assert dill.loads(pickled) is getattr(import_module(f"datatrove_ckpt.{new}"), name)


@pytest.mark.parametrize(
    "pickled",
    [
        b"cdatatrove_ckpt.checkpoint.skipped\nSkippedLines\n(I1\nI0\ntR.",
        b"ccopyreg\n_reconstructor\n(cdatatrove_ckpt.readers.extent\nFileExtent\n"
        b"c__builtin__\nobject\nNtR(dVbefore\nF0.0\nsb.",
    ],
)
def test_what_a_reader_that_was_used_left_in_a_queued_job_is_read_and_forgotten(pickled):
    assert vars(dill.loads(pickled)) == {}


def test_each_module_that_has_moved_is_there():
    assert [new for new in MOVED.values() if not find_spec(f"datatrove_ckpt.{new}")] == []


def known(then, now):
    """Without the settings that were added since."""
    return (
        {name: known(then[name], now[name]) for name in then if name in now}
        if isinstance(then, dict)
        else now
    )


@pytest.mark.slow
@pytest.mark.real_process
@pytest.mark.parametrize(
    "pickle", [name for name in PICKLES if name.endswith(("/script", "/yaml"))]
)
def test_a_queued_task_runs(pickle, here, server):
    write_input(here)
    (here / "logs").mkdir()
    (here / "logs/ranks_to_run.json").write_text(json.dumps([*range(TASKS)]))
    (here / "logs/executor.pik").write_bytes((QUEUED / pickle).with_suffix(".pik").read_bytes())
    processes.write_program(here / "bin/scontrol", "#!/bin/sh\necho node1\n")
    environment = {
        "SLURM_ARRAY_TASK_ID": "0",
        "SLURM_NODELIST": "node1",
        "PATH": f"bin:{os.environ['PATH']}",
    }
    environment |= {"QUEUED_URL": server.url, "QUEUED_KEY": "k3y"}
    environment["PYTHONPATH"] = os.pathsep.join([str(SITE), str(Path(__file__).parents[2])])
    command = [sys.executable, "-m", "datatrove.tools.launch_pickled_pipeline", "logs/executor.pik"]
    done = processes.run(command, env={**os.environ, **environment}, timeout=300)
    assert done.returncode == 0, done.stderr
    is_script = pickle.endswith("/script")
    if is_script:
        assert ids(here) == [f"0/{index}" for index, text in enumerate(TEXTS[0]) if text != "no"]
    else:  # a worker, which takes all tasks
        assert ids(here) == [
            f"{task}/{index}" for task, texts in enumerate(TEXTS) for index in range(len(texts))
        ]
    assert list(server.asked) == (["Say a0 plainly", "Say a1 plainly"] if is_script else [])
    assert (here / "logs/completions/00000").exists()
    assert (here / "mirror").exists() == is_script
