"""Interrupted runs of datatrove's own runner go on with ours: every document once, no answer is paid twice."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from datatrove_ckpt.testing import FakeServer, outputs
from tests.commands import Command
from tests.datatrove_job import SIZE, TEMPLATE, Datatrove, Killer, text_of, write_input

YAML = """\
executor:
  class_path: LocalPipelineExecutor
  init_args:
    tasks: TASKS
    logging_dir: logs
    pipeline:
      - class_path: JsonlReader
        init_args: {data_folder: input}
      - class_path: InferenceRunner
        init_args:
          rollout_fn: tests.datatrove_job.rollout
          config: {server_type: endpoint, endpoint_url: "URL", model_name_or_path: fake}
          output_writer:
            class_path: JsonlWriter
            init_args: {output_folder: output, output_filename: "TEMPLATE", compression: COMPRESSION}
          checkpoints_local_dir: CHECKPOINTS
          records_per_chunk: SIZE
"""


@pytest.fixture(scope="module")
def datatrove() -> Iterator[Datatrove]:
    with Datatrove() as process:
        yield process


def write_yaml(folder: Path, url: str, checkpoints: str = "ours", **changes: str) -> None:
    values = {
        "URL": url,
        "TEMPLATE": TEMPLATE,
        "COMPRESSION": "null",
        "CHECKPOINTS": checkpoints,
        "SIZE": str(SIZE),
        "TASKS": "1",
    }
    text = YAML
    for name, value in (values | changes).items():
        text = text.replace(name, value)
    (folder / "job.yaml").write_text(text)


def written(folder: Path) -> Counter[str]:
    """How often each document is in the output."""
    rows = [json.loads(line) for content in outputs(folder / "output").values() for line in content.splitlines()]
    assert all(row["metadata"]["rollout_results"][0]["text"].startswith("answer ") for row in rows)
    return Counter(row["id"] for row in rows)


def expected(number: int) -> Counter[str]:
    return Counter(f"id {n}" for n in range(number) if "dropped" not in text_of(n))


def migrate(command: Command, *arguments: str, source: str = "checkpoints") -> dict[str, Any]:
    out = command("migrate", "job.yaml", "--from", source, "--json", *arguments).out
    found: dict[str, Any] = json.loads(out)
    return found


def kept_texts(found: dict[str, Any], number: int) -> set[str]:
    """The requests that need not be sent again: of documents that are kept."""
    chunks = [chunk for rank in found["ranks"] for chunk in rank["chunks"]]
    begun = {n for chunk in chunks for n in range(chunk["chunk"] * SIZE, (chunk["chunk"] + 1) * SIZE) if n < number}
    left = {one["document"] for chunk in chunks for one in (*chunk["redone"], *chunk["not_finished"])}
    assert sum(chunk["documents"] for chunk in chunks) == len(begun)
    return {f"first {text_of(n)}" for n in begun - left}


class Move(NamedTuple):
    """What became of a run. ``again``: documents that are processed again for a reason that was said."""

    documents: int
    kept: int
    again: int
    lost: int
    twice: int
    in_flight: int


def go_on(folder: Path, command: Command, killer: Killer, number: int, checkpoints: str = "ours") -> Move:
    """Migrates, and runs to the end. What is asked twice was said before, or was in flight."""
    before = Counter(killer.server.asked)
    state = outputs(folder)
    first = migrate(command, "--dry-run")
    kept = kept_texts(first, number)
    assert outputs(folder) == state, "a dry run changes nothing"
    assert migrate(command)["ranks"] == first["ranks"]
    command("run", "job.yaml")
    assert written(folder) == expected(number)
    assert {text for text in kept if killer.server.asked[text] > before[text]} == set(), "paid twice"
    command("verify", checkpoints, "--full")
    repeated = sum(killer.server.asked[text] > before[text] for text in before)
    asked = killer.server.asked.total()
    command("run", "job.yaml")
    assert migrate(command)["ranks"] == [{"rank": 0, "done": True, "chunks": [], "moved_aside": []}]
    assert killer.server.asked.total() == asked
    chunks = first["ranks"][0]["chunks"]
    kept_documents = sum(chunk["written"] + chunk["dropped"] for chunk in chunks)
    again = sum(len(chunk["redone"]) for chunk in chunks)
    missing, there = expected(number) - written(folder), written(folder) - expected(number)
    return Move(number, kept_documents, again, missing.total(), there.total(), max(0, repeated - again))


@pytest.mark.matrix
@pytest.mark.parametrize("seed", [1, 0, 2])
def test_a_run_of_datatroves_that_was_killed_goes_on(
    here: Path, command: Command, datatrove: Datatrove, seed: int
) -> None:
    kill_and_go_on(here, command, datatrove, seed)


def kill_and_go_on(folder: Path, command: Command, datatrove: Datatrove, seed: int) -> Move:
    killer = Killer(seed)
    number = killer.chance.randint(9, 40)
    write_input(folder, number)
    with killer.server:
        in_place = killer.chance.random() < 0.5
        write_yaml(folder, killer.server.url, "checkpoints" if in_place else "ours")
        for _ in range(killer.chance.randint(1, 3)):
            killer.run(datatrove, folder, killer.chance.randint(1, number), concurrent=killer.chance.choice([1, 3, 9]))
        return go_on(folder, command, killer, number, "checkpoints" if in_place else "ours")


@pytest.mark.slow
def test_several_tasks_go_on_with_datatroves_logging_dir(here: Path, command: Command, datatrove: Datatrove) -> None:
    """The first one is finished: datatrove has removed its folder."""
    write_input(here, 9, 14)
    killer = Killer(1)
    with killer.server:
        write_yaml(here, killer.server.url, "checkpoints", TASKS="2")
        killer.run(datatrove, here, 19, tasks=2)
        assert (here / "logs" / "completions" / "00000").exists()
        assert not (here / "checkpoints" / "00000").exists()
        asked = Counter(killer.server.asked)
        error = command("run", "job.yaml", code=1).err
        assert "migrate job.yaml --from" in error
        error = command("migrate", "job.yaml", "--from", "checkpoints", "--executor.tasks=1", code=1).err
        assert "holds rank 1: datatrove's run had more. Set tasks" in error
        out = command("migrate", "job.yaml", "--from", "checkpoints", "--json", "--lacking-are-dropped").out
        assert [chunk["finished"] for chunk in json.loads(out)["ranks"][0]["chunks"]] == [True] * 3
        command("run", "job.yaml")
        assert written(here) == expected(23)
        firsts = {f"first {text_of(n)}" for n in range(9)}
        assert {text for text in firsts if killer.server.asked[text] > asked[text]} == set()
        command("verify", "job.yaml", "--full")


# older releases of datatrove ------------------------------------------------------------------------------------------

DATA = Path(__file__).parents[1] / "data"


@pytest.mark.matrix
@pytest.mark.parametrize(("release", "in_place"), [("0_8_0", True), ("0_9_0", False)])
def test_a_killed_run_of_an_older_release_goes_on(here: Path, command: Command, release: str, in_place: bool) -> None:
    shutil.copytree(DATA / f"datatrove_{release}", here, dirs_exist_ok=True)
    with FakeServer() as server:
        write_yaml(here, server.url, "checkpoints" if in_place else "ours")
        out = command("migrate", "job.yaml", "--from", "checkpoints", "--json", "--lacking-are-dropped").out
        (rank,) = json.loads(out)["ranks"]
        assert [(chunk["finished"], chunk["written"]) for chunk in rank["chunks"]] == [(True, 4), (True, 3), (False, 2)]
        command("run", "job.yaml")
        assert [text.split(" answer")[0] for text in server.asked] == ["first text 10 twice", "second text 10 twice"]
        assert written(here) == expected(11)
        command("verify", "job.yaml", "--full")
