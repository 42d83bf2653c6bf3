"""A YAML file is never called another run's because it says the same in another way."""

from __future__ import annotations

from pathlib import Path

import pytest

from datatrove_ckpt import InferenceRunner
from datatrove_ckpt.checkpoint.fields import as_kept
from datatrove_ckpt.cli.yaml_config import build, load
from datatrove_ckpt.maintenance.config_check import config_differences
from datatrove_ckpt.maintenance.where import Place
from tests.pages import ROOT

FILES = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.mark.matrix
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_configuration_differs_from_the_run_that_it_makes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT / "configs"))
    executor = build(load(path))
    (step,) = [step for step in executor.pipeline if isinstance(step, InferenceRunner)]
    kept = as_kept(step.identity(executor.world_size).fields)
    place = Place("checkpoints", Path(), str(path), tasks=executor.world_size, config=load(path))
    assert config_differences(place, [kept]) == []
    assert config_differences(place, [kept | {"records_per_chunk": -1, "model": "x"}, kept]) == []
    (found,) = config_differences(place, [kept | {"tasks": 999}])
    assert found.startswith("tasks: 999 -> ")
