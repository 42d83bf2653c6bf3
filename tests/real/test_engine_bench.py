"""The benchmark of the engines, small: every row does its work, with a real llama.cpp.

Its figures say nothing here.
"""

import json

import pytest

from tests.bench.engine.__main__ import ROWS, main

pytestmark = pytest.mark.timeout(900)


def test_every_row_answers_the_same_prompts_at_the_same_length(tmp_path):
    pytest.importorskip("xllamacpp")
    sizes = json.dumps({"documents": 6, "words": 5, "tokens": 4, "batch": 2})
    output = tmp_path / "table.md"
    arguments = ["--engine-kwargs", '{"threads": 1}', "--output", str(output), "--sizes", sizes]
    # The exit code is 1 if the rows have other numbers of answers or tokens.
    assert main(["--engine", "llamacpp", *arguments, "--rounds", "2"]) == 0
    lines = output.read_text().splitlines()
    assert len([line for line in lines if line.startswith("| ")]) == 1 + len(ROWS)
