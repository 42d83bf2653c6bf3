"""Tracking with the real MLflow and its own file store: pip install mlflow-skinny."""

from contextlib import suppress

import pytest

from datatrove_ckpt.cli import track
from datatrove_ckpt.errors import CkptError
from tests.jobs import ask, documents, fails_at, runner

mlflow_tracking = pytest.importorskip("mlflow.tracking")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the library


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
            with suppress(CkptError):  # the status below tells which attempt failed
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
