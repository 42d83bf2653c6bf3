"""A job whose input is a dataset on the hub, to which somebody adds commits."""

from pathlib import Path

import pytest

from tests.jobs import rows
from tests.unit.tables import parquet
from tests.yaml_jobs import endpoint, job_yaml

pytestmark = pytest.mark.xdist_group("datasets")  # its import takes seconds


@pytest.fixture
def job(hub, here, command, server):
    """``datatrove-ckpt COMMAND job.yaml`` in this process, with two tasks."""
    hub.put("org/data", {f"data/train-{n}.parquet": parquet(100 * n, 8) for n in range(3)})

    def run(
        name,
        options="streaming: true, dataset_options: {split: train}",
        code=0,
    ):
        text = job_yaml(endpoint(server), tasks=2)
        text = text.replace("class_path: JsonlReader", "class_path: HuggingFaceDatasetReader")
        Path("job.yaml").write_text(
            text.replace("{data_folder: input}", f"{{dataset: org/data, {options}}}")
        )
        said = command(name, "job.yaml", *["--all"] * (name == "doctor"), code=code)
        assert "Traceback" not in said
        return said

    return run


def test_output_is_that_of_the_commit_that_the_job_began_with(job, hub, server, monkeypatch):
    """It stops in its first task, so the second one starts after the dataset has moved on."""
    with monkeypatch.context() as patched:
        patched.setattr(
            server, "_status", lambda payload, times: 401 if len(server.payloads) > 9 else None
        )
        job("run", code=1)
    hub.put(
        "org/data",
        {"data/train-0.parquet": parquet(900, 40), "data/added.parquet": parquet(700, 3)},
    )
    assert "24 of 24 documents" in job("run")
    assert sorted(row["metadata"]["n"] for row in rows(Path())) == [
        100 * n + row for n in range(3) for row in range(8)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        "streaming: true, dataset_options: {split: train}",
        "streaming: false, dataset_options: {split: train}",
    ],
)
def test_a_finished_run_stays_finished_when_the_dataset_moves_on(job, hub, options):
    assert "24 of 24 documents" in job("run", options)
    hub.put(
        "org/data", {"data/train-0.parquet": parquet(900, 40), "data/a.parquet": parquet(700, 3)}
    )
    assert "24 of 24 documents" in job("run", options)
    other = options.replace("split: train", "split: train, revision: main")
    assert "revision" in job("run", other, code=1)


@pytest.mark.matrix(
    ("options", "message"),
    [
        ("streaming: true, dataset_options: {split: validation}", "validation"),
        (
            "dataset_options: {split: train}, text_key: body",
            "no column 'body'. Its columns: 'id', 'text', 'n'",
        ),
        ("dataset_options: {split: train, token: hf_abcdefghijklmnopqrstuvwxyz}", "HF_TOKEN"),
        ("streaming: true, shuffle_files: true", "streaming=False"),
    ],
)
def test_a_mistake_is_found_before_anything_is_asked(job, server, options, message):
    for command in ("doctor", "run"):
        said = job(command, options, code=None)
        assert said.code != 0
        assert message in said
        assert "hf_abcdefghijklmnopqrstuvwxyz" not in said
    assert not server.payloads
