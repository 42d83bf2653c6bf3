"""``~`` and ``$VAR`` in paths: expanded where the task runs, or refused; never a folder of that
name.
"""

from pathlib import Path

import pytest

from datatrove_ckpt.cli.main import main
from datatrove_ckpt.common.redaction import refuse_variables
from datatrove_ckpt.config.engines import resolve_model_path
from datatrove_ckpt.config.paths import expand_path
from datatrove_ckpt.errors import ConfigError
from tests import golden
from tests.jobs import documents, runner
from tests.yaml_jobs import endpoint, job_yaml


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, with a document; home is another folder."""
    work = tmp_path / "work"
    (work / "documents").mkdir(parents=True)
    (work / "documents/a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SCRATCH", str(tmp_path / "scratch"))
    monkeypatch.delenv("UNSET_HERE", raising=False)
    return work


def run(
    data="documents",
    output="output",
    logs="logs",
    checkpoints="checkpoints",
    config="server_type: dummy, model_name_or_path: m",
):
    text = job_yaml(config, data=f'"{data}"', output=f'"{output}"')
    text = text.replace("dir: logs", f"dir: {logs}").replace(
        "dir: checkpoints", f'dir: "{checkpoints}"'
    )
    Path("job.yaml").write_text(text)
    return main(["run", "job.yaml"])


def odd_names(folder):
    return [path.name for path in folder.rglob("*") if "$" in path.name or "~" in path.name]


@pytest.mark.parametrize(
    "places, message",
    golden.values("paths_that_nothing_expands", globals()),
)
def test_a_path_that_nothing_expands_is_an_error_and_no_folder(folder, capsys, places, message):
    assert run(**places) in (1, 2)
    assert message in capsys.readouterr().err
    assert odd_names(folder.parent) == []
    assert not (folder.parent / "scratch").exists()


@pytest.mark.matrix("checkpoints", ["$SCRATCH/checkpoints", "~/checkpoints"])
def test_variables_and_the_home_folder_are_expanded_in_the_folder_of_checkpoints(
    folder, capsys, server, checkpoints
):
    assert run(checkpoints=checkpoints, config=endpoint(server)) == 0
    assert "1 of 1 document is in 1 file" in capsys.readouterr().out
    place = folder.parent / ("home" if checkpoints.startswith("~") else "scratch")
    assert (place / "checkpoints/00000/run.json").exists()
    assert odd_names(folder.parent) == []


def test_it_is_expanded_where_the_task_runs(folder, server, monkeypatch):
    step = runner(folder, server)
    step.checkpoints_local_dir = "$SCRATCH/checkpoints"
    monkeypatch.setenv("SCRATCH", str(folder / "of this node"))
    step.run(documents(3))
    assert (folder / "of this node/checkpoints/00000/commits.jsonl").exists()


def test_paths_of_the_server_are_expanded(folder):
    model = folder.parent / "scratch" / "model.gguf"
    model.parent.mkdir()
    model.write_bytes(b"GGUF")
    assert resolve_model_path("$SCRATCH/model.gguf") == model
    with pytest.raises(ConfigError, match="UNSET_HERE is not set on"):
        resolve_model_path("$UNSET_HERE/model.gguf")


def test_what_is_no_variable_stays(folder):
    for path in ("/data/100$/a", "s3://bucket/a~b", "/data/cost$$", "memory://x"):
        refuse_variables("key", path)
    assert expand_path("key", "/data/100$/a~b") == Path("/data/100$/a~b")
