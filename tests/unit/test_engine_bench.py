"""`python -m tests.bench.engine` without an engine: the same work for every row, and what the table makes of it."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from datatrove_ckpt.inference.servers.engines import vllm_command
from datatrove_ckpt.redaction import Key
from tests.bench.engine import __main__ as command
from tests.bench.engine import rows, table
from tests.bench.engine.work import INSTRUCTION, Work, make_prompts

VLLM = Work("vllm", "org/model", python=sys.executable, documents=4, words=10, tokens=8, batch=2, in_flight=4)


def test_prompts_are_the_same_for_the_same_sizes_and_share_a_beginning(tmp_path: Path) -> None:
    path = make_prompts(VLLM, tmp_path / "a")
    assert path.read_bytes() == make_prompts(VLLM, tmp_path / "b").read_bytes()
    texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    assert len(set(texts)) == 4
    assert all(text.startswith(INSTRUCTION) for text in texts)


def test_every_row_has_the_engine_settings_of_our_runner() -> None:
    ours = vllm_command(VLLM.config(), 4321, Key("hush"), None)
    argv, environment = VLLM.command("PORT")
    assert [part.replace("PORT", "4321") for part in argv] == list(ours.argv)
    assert environment == {name: value for name, value in ours.env.items() if name != "VLLM_API_KEY"}
    arguments = VLLM.engine_arguments()
    assert arguments[:2] == ["--model", "org/model"]
    assert arguments[2:] == [part.replace("4321", "0") for part in ours.argv[ours.argv.index("org/model") + 1 :]]
    assert {"--max-num-seqs=2", "--max-num-batched-tokens=2048"} <= set(arguments)


def test_the_clock_starts_with_the_first_request_and_not_with_the_first_document() -> None:
    meter = rows.Meter(2)

    async def send(payload: str) -> str:
        return payload

    before = time.monotonic()
    assert meter.clock.first == 0
    assert asyncio.run(meter.watched(send)("a")) == "a"
    first = meter.clock.first
    assert before <= first <= time.monotonic()
    asyncio.run(meter.watched(send)("b"))
    meter.answered({"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}})
    assert meter.clock.last == 0, "one is missing"
    while rows._cpu_seconds() - meter._cpu < 0.03:  # three ticks of the clock of /proc
        pass
    meter.answered({"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": None})
    result = meter.result()
    assert (result["answers"], result["prompt_tokens"], result["completion_tokens"]) == (2, 10, 6)
    assert result["cached_tokens"] == 2
    assert result["last"] >= result["first"] == first
    assert result["cpu"] >= 0.03
    assert result["cpu_of_all"] > 0


# SGLang cannot generate without a GPU. tests/real/test_parsers.py holds these names against the real package.
_SGLANG = """
class Engine:
    def __init__(self, *, server_args):
        assert server_args[:2] == ["--model-path", "org/model"], server_args

    def generate(self, *, prompt, sampling_params):
        assert sampling_params == {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
        return [{"text": "yes", "meta_info": {"prompt_tokens": 9, "completion_tokens": 8, "cached_tokens": number}}
                for number, _ in enumerate(prompt)]

    def shutdown(self):
        pass
"""


def test_what_the_offline_tool_of_sglang_says_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "fake/sglang/srt/entrypoints"
    folder.mkdir(parents=True)
    (folder / "engine.py").write_text(_SGLANG)
    (folder.parent / "server_args.py").write_text("prepare_server_args = list")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))
    work = Work("sglang", "org/model", python=sys.executable, documents=3, tokens=8)
    counted = command.run_row("offline", work, tmp_path / "row")
    assert (counted["answers"], counted["prompt_tokens"], counted["completion_tokens"]) == (3, 27, 24)
    assert counted["cached_tokens"] == 3
    assert counted["wall"] > counted["last"] - counted["first"] >= 0
    answers = [json.loads(line) for line in (tmp_path / "row/answers.jsonl").read_text().splitlines()]
    assert [(row["id"], row["answer"]) for row in answers] == [(f"document-{number}", "yes") for number in range(3)]


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


def test_a_row_that_fails_shows_its_output_and_keeps_its_files(tmp_path: Path) -> None:
    said = f"(?s)No module named 'vllm'.*row offline failed with exit code 1; its files are in {tmp_path}"
    with pytest.raises(SystemExit, match=said):
        command.run_row("offline", VLLM, tmp_path / "row")
    assert (tmp_path / "row/output.log").exists()
