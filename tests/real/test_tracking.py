"""Tracking with the real libraries: MLflow's own file store, and Weights & Biases offline.

They come from PyPI: pip install mlflow-skinny wandb.
"""

import pytest

from datatrove_ckpt.cli import track
from datatrove_ckpt.errors import CkptError
from tests.jobs import ask, documents, fails_at, runner
from tests.patience import until

mlflow_tracking = pytest.importorskip("mlflow.tracking")
pytest.importorskip("wandb")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries


def test_all_attempts_of_a_job_are_one_run_of_mlflow(tmp_path, monkeypatch, server, command):
    monkeypatch.setenv("KEY_OF_TEST", "canary-of-a-key")
    monkeypatch.setattr(track, "_SENDING_SECONDS", 1.0)
    uri = (tmp_path / "runs").as_uri()
    client = None
    for rollout, temperature, status in ((fails_at(["id 3"]), 0, "FAILED"), (ask, 0.5, "FINISHED")):
        parameters = {"temperature": temperature}
        config = {
            "api_key_env": "KEY_OF_TEST",
            "default_generation_params": parameters,
            "max_concurrent_documents": 1,
        }
        for rank in (0, 1):
            job = runner(tmp_path, server, rollout, config=config, accept_changes=True)
            if rollout is ask:
                job.run(documents(5), rank, 2)
            else:
                with pytest.raises(CkptError):
                    job.run(documents(5), rank, 2)
        command(
            "track",
            tmp_path / "checkpoints",
            "--mlflow",
            uri,
            "--experiment",
            "texts",
            "--name",
            "books",
        )
        client = mlflow_tracking.MlflowClient(uri)
        (run,) = client.search_runs([client.get_experiment_by_name("texts").experiment_id])
        assert (run.info.run_name, run.info.status) == ("books", status)
    assert run.data.params["tasks"] == "2"
    assert {value for name, value in run.data.params.items() if name.endswith("temperature")} <= {
        "0"
    }, "as at first"
    metrics = run.data.metrics
    assert (metrics["counts.read"], metrics["counts.written"], metrics["states.finished"]) == (
        10,
        10,
        2,
    )
    points = client.get_metric_history(run.info.run_id, "counts.read")
    assert len(points) == 4, "three while it was failed, as another task might have begun"
    for path in (tmp_path / "runs").rglob("*"):
        assert not path.is_file() or b"canary" not in path.read_bytes(), path


def wandb_records(content):
    """Of a file in the format of LevelDB's log, after W&B's head of 7 bytes.

    Long records are divided at 32 kB.
    """
    at, found = 7, b""
    while at < len(content):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
        size, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        found += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield found
            found = b""


def test_wandb_takes_what_it_is_given(tmp_path, monkeypatch, server, command):
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", "canaryofakey" + 28 * "0")
    monkeypatch.chdir(tmp_path)
    runner(tmp_path, server).run(documents(4))
    command("track", "checkpoints", "--wandb", "team/texts", "--name", "books")
    (file,) = (tmp_path / "wandb").rglob("*.wandb")

    def read():
        data = wandb_records(file.read_bytes())
        return [wandb_internal_pb2.Record.FromString(each) for each in data]

    # Its own process writes the file, on a busy machine after the run's end.
    until(lambda: any(record.HasField("exit") for record in read()))
    records = read()
    (run,) = (record.run for record in records if record.HasField("run"))
    assert (run.display_name, run.project, run.entity) == ("books", "texts", "team")
    assert "records_per_chunk" in {item.key for item in run.config.update}
    values = {
        item.key or "/".join(item.nested_key): item.value_json
        for record in records
        if record.HasField("history")
        for item in record.history.item
    }
    assert (float(values["counts.read"]), float(values["states.finished"])) == (4, 1)
    assert [record for record in records if record.HasField("exit")]
    for path in (tmp_path / "wandb").rglob("*"):
        assert not path.is_file() or b"canary" not in path.read_bytes(), path
