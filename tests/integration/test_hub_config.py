"""configs/hub.yaml and configs/finephrase.yaml run as they are: hub in, hub out, without Slurm, and
a fake server.
"""

import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from datatrove_ckpt.cli.short_form import read_config

CONFIGS = Path(__file__).parents[2] / "configs"
ROWS = 12
README = """---
configs:
- config_name: sample-350BT
  data_files: sample/*.parquet
- config_name: sample-350BT
  data_files: sample/*.parquet
---
"""


@pytest.fixture
def datasets_on_hub(hub):
    """The repositories that the configs name.

    The last text of each file is longer than the model's context.
    """
    hub.orgs += ("HuggingFaceFW", "my-org")
    files = {"README.md": README.encode()}
    for number in range(2):
        texts = [
            f"text {number} {row}" + "\nmore words" * 3000 * (row == ROWS - 1)
            for row in range(ROWS)
        ]
        table = pa.Table.from_pylist(
            [{"id": f"{number} {row}", "text": text} for row, text in enumerate(texts)]
        )
        buffer = io.BytesIO()
        pq.write_table(table, buffer, row_group_size=5)
        files[f"sample/{number}.parquet"] = buffer.getvalue()
    hub.put("HuggingFaceFW/fineweb-edu", files)
    for name in ("my-dataset", "finephrase"):
        hub.create_repo(f"my-org/{name}")
    return hub


def on_this_machine(name, server):
    """The config's file, with its pipeline on this machine.

    Of the runner only server and chunks are other ones.
    """
    endpoint = (
        f"{{server_type: endpoint, endpoint_url: '{server.url}', model_name_or_path: fake, model_max_context: 8192, "
        "default_generation_params: {max_tokens: 2048}}"
    )
    content = read_config(
        str(CONFIGS / name), [f"--pipeline.1.config={endpoint}", "--pipeline.1.records_per_chunk=5"]
    )
    slurm = content["executor"]["init_args"]
    kept = {name: slurm[name] for name in ("logging_dir", "pipeline")}
    local = {"class_path": "LocalPipelineExecutor", "init_args": {"tasks": 2, "workers": 1, **kept}}
    Path(name).write_text(yaml.safe_dump({"executor": local}))
    return name


def rows_on_hub(hub, repository):
    found = hub.files(repository)
    return {
        name: pq.read_table(io.BytesIO(content)).to_pylist()
        for name, content in found.items()
        if name.endswith(".parquet")
    }


@pytest.mark.slow
@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    "name, repository, logs, longest",
    [
        ("hub.yaml", "my-org/my-dataset", "hub_run/faq/logs", 18432),
        ("finephrase.yaml", "my-org/finephrase", "finephrase/faq/logs", 3 * (8192 - 2048 - 64)),
    ],
)
def test_the_config_writes_each_row_of_the_hub_to_the_hub(
    datasets_on_hub,
    server,
    command,
    name,
    repository,
    logs,
    longest,
):
    job = on_this_machine(name, server)
    command("run", job)
    written = rows_on_hub(datasets_on_hub, repository)
    # Two tasks of twelve rows each, in chunks of five
    names = {f"faq/000_{rank:05d}_{chunk:05d}.parquet" for rank in range(2) for chunk in range(3)}
    assert written.keys() == names
    rows = [row for content in written.values() for row in content]
    assert sorted(row["id"] for row in rows) == sorted(
        f"{number} {row}" for number in range(2) for row in range(ROWS)
    )
    asked = [payload["messages"][-1]["content"] for payload in server.payloads]
    assert len(asked) == 2 * ROWS
    assert all("[[DOCUMENT]]" not in text and "text " in text for text in asked)
    assert max(map(len, asked)) <= longest < max(len(row["text"]) for row in rows)
    stats = json.loads(Path(logs, "stats.json").read_text())
    usages = [row["rollout_results"][0]["usage"] for row in rows]
    assert stats[1]["stats"]["prompt_tokens"]["total"] == sum(
        usage["prompt_tokens"] for usage in usages
    )
    assert stats[0]["stats"]["documents"]["total"] == len(rows)
    command("run", job)
    assert len(server.payloads) == 2 * ROWS
