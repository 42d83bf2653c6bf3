"""Scripts in the shape of datatrove's examples/inference, each its own process, with no line
changed but the import.
"""

import json
import os
import sys
from pathlib import Path

import pytest

from datatrove_ckpt.testing import FakeServer
from tests import processes
from tests.jobs import results
from tests.yaml_jobs import write_rows

pytestmark = pytest.mark.timeout(1200)

SCRIPTS = Path(__file__).parents[1] / "data/scripts"
THEIRS = "datatrove.pipeline.inference.run_inference"


def run_script(name, folder, argument, **environment):
    text = (SCRIPTS / name).read_text()
    assert text.count(f"from {THEIRS} import") == 1
    script = folder / name
    script.write_text(text.replace(THEIRS, "datatrove_ckpt"))
    ended = processes.run(
        [sys.executable, str(script), argument], cwd=folder, env={**os.environ, **environment}
    )
    assert ended.returncode == 0, ended.stderr


def dataset(folder):
    folder.mkdir()
    rows = [{"prompt": f"text {n}\n" * 3, "source": f"s{n % 2}"} for n in range(29)] + [
        {"prompt": "long\n" * 999}
    ]
    write_rows(folder / "train.jsonl", rows)
    return str(folder)


def rows(folder):
    import pyarrow.parquet as parquet

    return [
        row
        for path in sorted(folder.glob("*.parquet"))
        for row in parquet.read_table(path).to_pylist()
    ]


def total(folder, name):
    """The total of one number in ``stats.json``, as datatrove's dataset card reads it."""
    steps = json.loads((folder / "logs/stats.json").read_text())
    (found,) = [step["stats"][name] for step in steps if name in step["stats"]]
    return float(found["total"] if isinstance(found, dict) else found)


@pytest.mark.slow
def test_a_production_script_runs_each_of_its_templates_and_skips_what_its_endpoint_rejects(
    tmp_path,
):
    pytest.importorskip("datasets")
    with FakeServer(
        status=lambda payload, times: (
            400 if "text 3\n" in payload["messages"][-1]["content"] else None
        )
    ) as server:
        server.error = "too long"
        settings = {
            "dataset": dataset(tmp_path / "dataset"),
            "out": str(tmp_path / "out"),
            "server": {"server_type": "endpoint", "endpoint_url": server.url},
            "templates": {"faq": "As a FAQ: [[DOCUMENT]]", "plain": None},
        }
        places = {
            name: str(tmp_path / name) for name in ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE")
        }
        run_script("rephrase.py", tmp_path, json.dumps(settings), HF_HUB_OFFLINE="1", **places)
        questions = [payload["messages"][-1]["content"] for payload in server.payloads]
        assert {(payload["max_tokens"], payload["temperature"]) for payload in server.payloads} == {
            (200, 0.6)
        }
    assert len(set(questions)) == 60
    assert len(questions) <= 62  # with a probe for each rejection
    assert max(map(len, questions)) <= 1200
    for name in settings["templates"]:
        written = rows(tmp_path / "out/data" / name)
        assert len({row["id"] for row in written}) == len(written) == 29
        assert {row["rollout_results"][0]["finish_reason"] for row in written} == {"stop"}
        assert not any("text 3\n" in row["text"] for row in written)
        assert total(tmp_path / "out" / name, "skipped_bad_requests") == 1
        assert total(tmp_path / "out" / name, "documents") == 30
        assert total(tmp_path / "out" / name, "inference_time") > 0


def test_a_script_with_a_pool_of_processes_runs(tmp_path):
    run_script("pool.py", tmp_path, str(tmp_path))
    found = results(tmp_path)
    assert [[one["finish_reason"] for one in pages] for (pages,) in found] == [["stop"] * 2] * 5
