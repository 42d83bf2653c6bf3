"""The benchmark of the engines, small: every row does its work, with a real llama.cpp.

Its figures say nothing here.
"""

import json

import pytest

from tests.bench.engine.__main__ import ROWS, main

pytestmark = pytest.mark.timeout(900)


def test_every_row_answers_the_same_prompts_at_the_same_length(tmp_path):
    pytest.importorskip("xllamacpp")
    sizes = {"documents": 6, "words": 5, "tokens": 4, "batch": 2, "rounds": 2}
    arguments = [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
    output, kept = tmp_path / "table.md", tmp_path / "results.jsonl"
    arguments += ["--engine-kwargs", '{"threads": 1}', "--output", str(output), "--json", str(kept)]
    # The exit code is 1 if a row has another number of answers or tokens than the offline tool.
    assert main(["--engine", "llamacpp", *arguments]) == 0
    assert len(
        [line for line in output.read_text().splitlines() if line.startswith("| ")]
    ) == 1 + len(ROWS)
    results = [json.loads(line) for line in kept.read_text().splitlines()]
    assert [result["row"] for result in results] == [*ROWS, *reversed(ROWS)]
    assert {result["answers"] for result in results} == {6}
    assert all(result["wall"] > result["last"] - result["first"] > 0 for result in results)
