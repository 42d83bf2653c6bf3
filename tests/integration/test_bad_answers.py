"""What becomes of answers that loop, refuse or are cut off: ``on_loop``, ``on_refusal`` and
``on_cut_off``.
"""

import asyncio
from pathlib import Path

import pytest
from datatrove.pipeline.inference.types import InferenceError

from datatrove_ckpt.errors import CheckpointMismatch, ServerRefused
from datatrove_ckpt.testing import FakeServer
from tests import golden
from tests.jobs import Budget, ask, chat, documents, results, rows, run_job, runner
from tests.rank_folders import together
from tests.words import LOOP, REFUSAL
from tests.yaml_jobs import write_rows

LONGER = {"retry": 1, "max_tokens": 2048}


class Server(FakeServer):
    """Answers "text 1" with a loop below temperature 0.9, refuses "text 2", and cuts "text 3" off
    below 2048 tokens, and "text 4" of a loop.
    """

    def __init__(self, **more):
        super().__init__(self.play, **more)

    def play(self, payload, times):
        number = payload["messages"][-1]["content"][-1]
        is_short = (payload.get("max_completion_tokens") or payload.get("max_tokens", 0)) < 2048
        self.finish_reason = "length" if number in "34" and is_short else "stop"
        self.message = {"refusal": "no"} if number == "5" else {}
        if number in "67":
            self.finish_reason = {"6": "repetition", "7": "Content_Filter"}[number]
        if number in "14" and payload.get("temperature", 0) < 0.9:
            return LOOP
        return REFUSAL if number == "2" else f"fine {number}"


@pytest.fixture
def server():
    with Server() as playing:
        yield playing


def texts(folder):
    return {
        row["id"][-1]: [one["text"] for one in row["metadata"]["rollout_results"]]
        for row in rows(folder)
    }


@pytest.mark.matrix("code", [*golden.sections("bad_answers")])
def test_a_bad_answer_is_kept_retried_or_dropped(tmp_path, server, code):
    config = eval(code)
    run_job(tmp_path, server, 9, config=config)
    gone = sorted({*map(str, range(9))} - {*texts(tmp_path)})
    asked = sorted((name[-1], times) for name, times in server.asked.items() if times > 1)
    golden.hold("bad_answers", code, f"asked again: {asked}, gone: {gone}")
    number = server.asked.total()
    found = together(tmp_path).counts
    assert (found.written, found.dropped) == (9 - len(gone), len(gone))
    assert (found.requests, found.prompt_tokens) == (number, 2 * number)
    sent = [one for one in server.payloads if one["messages"][0]["content"] == "text 3"]
    if "on_cut_off" in config and asked:
        other_limit = dict.fromkeys(sent[0].keys() & {"max_completion_tokens"})
        assert sent[1] == {**sent[0], **other_limit, "max_tokens": 2048}
        assert texts(tmp_path)["3"] == ["fine 3"]


def test_columns_of_quality_are_those_of_the_answer_that_a_retry_gave(tmp_path, server):
    config = {"on_cut_off": LONGER}
    run_job(tmp_path, server, 5, config=config, quality=True)
    names = [f"rollout_results_{end}" for end in ("finish_reason", "faults", "tokens")]
    columns = {row["id"][-1]: [row["metadata"][name] for name in names] for row in rows(tmp_path)}
    assert columns["3"] == ["stop", "", 2]
    assert columns["4"] == ["stop", "looping", 180]
    assert together(tmp_path).counts.cut_off == 2


def test_a_retry_that_the_server_rejects_leaves_the_answer_before_it(tmp_path, log):
    rejects_long = {"status": lambda payload, times: 400 if "max_tokens" in payload else None}
    with Server(**rejects_long) as server:
        run_job(tmp_path, server, 5, config={"on_cut_off": {"retry": 2, "max_tokens": 9000}})
    assert server.asked["text 3"] == 2
    assert texts(tmp_path)["3"] == ["fine 3"]
    assert "on_cut_off: a retry was rejected, so the answer before it counts" in str(log)


def test_each_of_several_rollouts_is_dropped_for_its_own(tmp_path):
    with FakeServer(lambda payload, times: "fine" if times % 2 else LOOP) as server:
        run_job(tmp_path, server, 3, config={"on_loop": "drop", "rollouts_per_document": 2})
    assert texts(tmp_path) == {"0": ["fine"], "1": ["fine"], "2": ["fine"]}


async def in_a_group(document, generate):
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(ask(document, generate)) for _ in range(2)]
    return [one.result() for one in asked]


async def decides(document, generate):
    try:
        return await ask(document, generate)
    except InferenceError as error:
        return str(error.error)


async def wraps(document, generate):
    try:
        return await ask(document, generate)
    except InferenceError as error:
        raise ValueError("mine") from error


@pytest.mark.parametrize(
    "rollout, written",
    [(in_a_group, []), (decides, [["on_loop: the answer is looping."]])],
)
def test_a_function_may_catch_what_a_dropped_answer_raises(tmp_path, server, rollout, written):
    runner(tmp_path, server, rollout, config={"on_loop": "drop"}).run(documents(2)[1:])
    assert results(tmp_path) == written


def test_an_error_that_a_function_makes_of_a_dropped_answer_is_an_error(tmp_path, server):
    with pytest.raises(Exception, match="mine"):
        run_job(tmp_path, server, 2, wraps, config={"on_loop": "drop"})


async def two_alike(document, generate):
    """Two equal requests at once."""
    answers = await asyncio.gather(*(generate(chat(document.text)) for _ in range(2)))
    return [answer.text for answer in answers]


def test_a_retry_belongs_to_its_request_whichever_is_answered_first(tmp_path):
    def answer(payload, times):
        seed = payload["seed"]
        return f"{seed} " if "temperature" in payload else f"{seed} word " * 90

    def delay(payload, times):
        seeds.append(payload["seed"])
        return 0.1 * (payload["seed"] == late)

    config = {"seed": 7, "on_loop": {"retry": 1, "temperature": 1.0}}
    late = 0
    found = []
    for attempt in range(2):
        seeds = []
        folder = tmp_path / str(attempt)
        with FakeServer(answer, delay=delay) as server:
            run_job(folder, server, 1, two_alike, config=config)
        assert len({*seeds}) == 4
        late = seeds[0]
        found.append(results(folder))
    assert found[0] == found[1]


@pytest.mark.matrix("left", [2, 1])
def test_no_try_is_paid_twice(tmp_path, left):
    budget = Budget()
    budget.left = left
    config = {
        "on_loop": {"retry": 3, "temperature": 0.9},
        "on_cut_off": LONGER,
    }
    with Server(status=budget) as server:
        with pytest.raises(ServerRefused):
            runner(tmp_path, server, config=config).run(documents(5)[4:])
        budget.left = 9
        runner(tmp_path, server, config=config).run(documents(5)[4:])
    assert texts(tmp_path) == {"4": ["fine 4"]}
    assert len(server.payloads) == 3 + 1


def test_the_short_form_and_its_flags_say_what_was_dropped_and_set_aside(here, command, server):
    write_rows("a.jsonl", [{"id": str(n), "text": f"text {n}"} for n in range(5)])
    Path("job.yaml").write_text(
        f"run_folder: run\ninput: a.jsonl\nprompt: '{{text}}'\nmodel: m\nendpoint: {server.url}\n"
        "on_loop: {retry: 1, temperature: 0.9, then: drop}\non_refusal: dead_letter\n"
    )
    said = command("run", "job.yaml", "--on-cut-off", "{retry: 1, max_tokens: 2048, then: drop}")
    assert "(0 dropped, 1 dead letter)" in said
    status = command("status", "run")
    assert "5 done: 4 written in 1 chunk, 0 dropped, 1 dead\n" in status
    assert "9 sent" in status
    assert "  dead       1: 1 on_refusal: the answer is a refusal.\n" in status


def test_phrases_of_the_user_are_refusals_too_and_others_make_another_run(tmp_path, server):
    settings = {"config": {"on_refusal": "drop"}, "refusals": ["FINE 0"]}
    run_job(tmp_path, server, 4, **settings)
    assert {*texts(tmp_path)} == {"1", "3"}
    with pytest.raises(CheckpointMismatch, match="refusals"):
        run_job(tmp_path, server, 4, **settings | {"refusals": ["Fine 3"]})
