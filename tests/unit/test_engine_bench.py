"""`python -m tests.bench.engine` without an engine: the same work for every row, and what the table makes of it."""

from __future__ import annotations

import sys
from typing import Any

from datatrove_ckpt.inference.servers.engines import vllm_command
from datatrove_ckpt.redaction import Key
from tests.bench.engine import table
from tests.bench.engine.work import Work

VLLM = Work("vllm", "org/model", python=sys.executable, documents=4, words=10, tokens=8, batch=2, in_flight=4)


def test_every_row_has_the_engine_settings_of_our_runner() -> None:
    ours = vllm_command(VLLM.config(), 4321, Key("hush"), None)
    argv, environment = VLLM.command("PORT")
    assert [part.replace("PORT", "4321") for part in argv] == list(ours.argv)
    assert environment == {name: value for name, value in ours.env.items() if name != "VLLM_API_KEY"}
    arguments = VLLM.engine_arguments()
    assert arguments[:2] == ["--model", "org/model"]
    assert arguments[2:] == [part.replace("4321", "0") for part in ours.argv[ours.argv.index("org/model") + 1 :]]
    assert {"--max-num-seqs=2", "--max-num-batched-tokens=2048"} <= set(arguments)


def result(seconds: float, **changes: Any) -> table.Result:
    counts = {"answers": 4, "prompt_tokens": 400, "completion_tokens": 32, "cached_tokens": 100}
    return {"first": 10.0, "last": 10.0 + seconds, "wall": seconds + 5, "cpu_of_all": 2 * seconds, **counts, **changes}


def test_the_table_shows_medians_of_the_ratios_of_each_round() -> None:
    # The machine is twice as slow in the second round, and so is each row. That must not show in any ratio.
    results = {"offline": [result(1.0), result(2.0), result(1.0)],
               "ours": [result(1.25, cpu=0.008), result(2.5, cpu=0.008), result(1.0, cpu=0.012)]}  # fmt: skip
    text = table.markdown(results, VLLM, "Measured on an abacus.")
    assert text.splitlines()[0].startswith("vLLM, model: 4 prompts of 100 tokens, 8 tokens for each answer, 2 requests")
    assert "medians of 3 rounds. Measured on an abacus." in text
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert lines[2] == ["offline: `LLM.generate`", "32", "1.000", "1.0", "6.0", "2.0", "", "25 %"]
    assert lines[3] == ["ours, with checkpoints", "26", "0.800 (0.800 to 1.000)", "1.2", "6.2", "2.5", "2.00", "25 %"]


def test_rows_that_did_other_work_are_named() -> None:
    results = {"offline": [result(1.0)], "ours": [result(1.0), result(1.0, completion_tokens=31, prompt_tokens=404)]}
    assert table.unequal_work(results, VLLM) == [
        "ours, round 2: completion_tokens 31 instead of 32",
        "ours, round 2: prompt_tokens 404 instead of 400",
    ]
    assert table.unequal_work({"offline": [result(1.0)]}, VLLM) == []
