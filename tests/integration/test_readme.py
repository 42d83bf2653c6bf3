"""README does what it says: its Python runs, its YAML builds, its commands exist, its table is the code's."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from datatrove.io import DataFolder

from datatrove_ckpt.checkpoint import recovery
from datatrove_ckpt.checkpoint.interval import SYNC_TUNING
from datatrove_ckpt.cli.main import main
from datatrove_ckpt.preflight.plan import describe_table, make_table
from datatrove_ckpt.preflight.probes import Quantiles
from tests.readme import README, blocks, commands

ROOT = Path(__file__).parents[2]


def test_the_python_example_runs_on_a_real_model(tmp_path: Path) -> None:
    (tmp_path / "documents").mkdir()
    lines = (ROOT / "configs/quickstart_documents.jsonl").read_text().splitlines()
    (tmp_path / "documents/a.jsonl").write_text("\n".join(lines[:3]))
    (tmp_path / "example.py").write_text(blocks("python")[0])
    subprocess.run([sys.executable, "example.py"], cwd=tmp_path, check=True, capture_output=True, timeout=100)
    written = (tmp_path / "summaries/00000_chunk_00000.jsonl").read_text().splitlines()
    assert len(written) == 2
    assert json.loads(written[0])["metadata"]["rollout_results"][0]["tokens"] > 0


def test_the_other_python_blocks_run() -> None:
    for block in blocks("python")[1:]:
        if "torchdata" in block:  # tests/real/test_torch.py runs it
            continue
        exec(compile(block, "README.md", "exec"), {})


def test_the_yaml_example_builds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "documents").mkdir()
    (tmp_path / "job.yaml").write_text(blocks("yaml")[0])
    assert main(["run", "--dry-run", "job.yaml"]) == 0, capsys.readouterr().err


def test_the_slurm_example_builds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(blocks("yaml")[1])
    assert main(["run", "--dry-run", "job.yaml"]) == 0, capsys.readouterr().err
    assert "#SBATCH --signal=USR1@180\n" in capsys.readouterr().out


def test_the_yaml_of_a_mirror_builds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "documents").mkdir()
    job, mirror = blocks("yaml")[0], blocks("yaml")[2].replace("s3://", "memory://")
    (tmp_path / "job.yaml").write_text(job.replace("          checkpoints_local_dir: checkpoints\n", mirror))
    assert "checkpoints_remote_dir" in (tmp_path / "job.yaml").read_text()
    assert main(["run", "--dry-run", "job.yaml"]) == 0, capsys.readouterr().err


def test_every_command_is_one_of_the_two_lines_or_runs_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    monkeypatch.chdir(tmp_path)
    DataFolder.clear_instance_cache()  # which knows folders by the names they had elsewhere
    small = ["--pipeline.0.limit=2", "--pipeline.1.config.default_generation_params.max_tokens=5"]
    assert main(["run", "configs/quickstart.yaml", *small]) == 0, capsys.readouterr().err
    known = [*commands(), ".venv/bin/python -m pytest -m full"]
    blocks_of_commands = [block for block in blocks("bash") if block.strip() not in known]
    lines = [line for block in blocks_of_commands for line in block.splitlines()]
    assert (len(commands()), len(lines)) == (2, 7)
    for line in lines:
        name, *arguments = line.split()
        assert name == "datatrove-ckpt"
        own = small if "--retry-dead-letters" in arguments else []
        assert main([*arguments, *own]) == 0, (line, capsys.readouterr())
    said = capsys.readouterr().out
    assert "\nno problem, " in said  # of doctor
    assert "\nsettings for this machine:\n  sync_seconds: " in said  # of plan


def test_the_crash_table_is_the_one_in_the_code() -> None:
    in_readme = re.findall(r"^\| (\d) \| (.*?) \| (.*?) \|$", README, re.MULTILINE)
    in_code = re.findall(r"^    (\d) +(journal|output)(.*?)  +(\S.*)$", recovery.__doc__ or "", re.MULTILINE)
    assert [(row[0], row[1].replace("answers", "cache rows")) for row in in_readme] == [
        (number, (first + rest).strip()) for number, first, rest, _ in in_code
    ]
    assert len(in_code) == 5


def test_the_table_of_plan_is_laid_out_and_reckoned_as_in_the_code() -> None:
    block = README[README.index("    sync_seconds: a save costs") :].split("\n\n")[0]
    in_readme = [line.removeprefix("    ") for line in block.splitlines()]
    table = make_table("sync_seconds", Quantiles(0.0116, 0.0076, 0.0156, 25), 6 * 3600, 1.0, SYNC_TUNING)
    in_code = list(describe_table(table))
    assert set(in_readme) <= set(in_code), in_code
    assert len(in_readme) == 7


def test_every_file_that_is_named_is_there() -> None:
    for name in re.findall(r"`(configs/\S+?|\w+\.yaml)`", README):
        assert (ROOT / name).exists() or (ROOT / "configs" / name).exists(), name
    assert os.access(ROOT / ".ci/run", os.X_OK)
