"""No answer that may be cut off becomes a row: not in a resume, nor because
``accept_null_finish_reason`` is wrong.
"""

from contextlib import nullcontext

import pytest
from datatrove.data import Document

from datatrove_ckpt.errors import ConfigError, ServerRefused
from datatrove_ckpt.rollouts import PromptRollout
from datatrove_ckpt.testing import FakeServer
from tests.jobs import chat, rejects, results, rows, run_job, runner
from tests.rank_folders import together
from tests.words import LOOP, REFUSAL

ONE_BY_ONE = {"max_concurrent_documents": 1, "max_concurrent_generations": 1}
ACCEPTS = {**ONE_BY_ONE, "accept_null_finish_reason": True}


class Server(FakeServer):
    """Gives the reasons of ``plan`` by the words of the question, one for each time, and then
    "stop".
    """

    def __init__(self, plan, refuses=""):
        self.plan = plan
        self.refuses = refuses
        super().__init__(
            self.play,
            lambda payload, times: 401 if self.question(payload) == self.refuses else None,
        )

    @staticmethod
    def question(payload):
        return str(payload["messages"][-1]["content"])

    def play(self, payload, times):
        left = self.plan.get(self.question(payload), [])
        self.finish_reason = left.pop(0) if left else "stop"
        return "whole" if self.finish_reason else "half"


def test_a_finish_reason_after_answers_that_were_believed_stops_this_attempt_and_each_further_one(
    tmp_path,
):
    nulls = [None] * 9
    with Server({"text 0": nulls[:], "text 1": nulls[:], "text 3": nulls[:]}) as server:
        for taken in (2, 0):
            with pytest.raises(
                ServerRefused, match="which accept_null_finish_reason let pass"
            ) as caught:
                run_job(tmp_path, server, 4, config=ACCEPTS)
            assert f"so {taken} answers without one" in str(caught.value)
            server.plan["text 2"] = nulls[:]  # what the server gives from now on changes nothing


def test_unusual_reasons_are_kept_as_the_server_gave_them_and_counted_over_all_attempts(tmp_path):
    reasons = ["xyz", "xyz", "repetition", "content_filter", "End_Turn"]
    reasons += ["MAX_TOKENS", "max_tokens", "Length", "model_context_window_exceeded"]
    plan = {f"text {index}": [reason] for index, reason in enumerate(reasons)}
    with Server(plan, refuses="text 6") as server:
        with pytest.raises(ServerRefused, match="401"):
            run_job(tmp_path, server, 9, config=ONE_BY_ONE, records_per_chunk=4)
        server.refuses = ""
        run_job(tmp_path, server, 9, config=ONE_BY_ONE, records_per_chunk=4)
        assert server.asked.total() == 10
    assert [one["finish_reason"] for (one,) in results(tmp_path)] == reasons
    counts = together(tmp_path).counts
    assert (counts.answers, counts.cut_off) == (9, 4)
    assert (counts.bad["looping"], counts.bad["refusing"]) == (1, 1), "as for on_loop, on_refusal"
    assert counts.odd_answers.endswith(
        ' Answers ended with finish_reason "xyz" 2 times, "repetition" 1 time, "content_filter" '
        "1 time."
    )


COLUMNS = {
    "text 0": ("looping", LOOP),
    "text 1": ("refusing", REFUSAL),
    "text 2": ("", "A long answer of another kind. " * 3 + "A hundred characters more."),
    "text 3": ("", "A long answer of another kind. " * 3 + "A hundred characters more."),
    "text 4": ("empty", " "),
}


def answers(payload, times):
    return COLUMNS.get(payload["messages"][-1]["content"], ("", "fine"))[1]


def test_bad_answers_are_counted_over_all_attempts(tmp_path):
    bad = {"looping": 1, "refusing": 1, "repeating": 1}
    refused = ["text 5"]
    with FakeServer(answers, rejects(refused, 401)) as server:
        for number in (5, 8):  # no chunk is complete after the first attempt
            with pytest.raises(ServerRefused) if refused else nullcontext():
                run_job(tmp_path, server, 8, config=ONE_BY_ONE, records_per_chunk=100)
            refused.clear()
            counts = together(tmp_path).done
            assert counts.answers == counts.lengths.total() == number
            assert counts.reasons == {"stop": number, **bad}
    assert counts.odd_answers == (
        " 1 of 8 answers is empty. Faults of 8 answers: at least 1 looping, 1 refusing, 1 repeating "
        "another answer."
    )


@pytest.mark.parametrize("answer", [None, "summary"])
def test_columns_of_quality_are_those_of_a_run_that_nothing_interrupted(tmp_path, answer):
    settings = {"answer": answer, "quality": True}
    whole = tmp_path / "whole"
    name = answer or "rollout_results"
    with FakeServer(answers) as server:
        run_job(whole, server, 8, **settings)
    with FakeServer(answers, rejects(["text 1"], 401)) as server, pytest.raises(ServerRefused):
        run_job(tmp_path, server, 8, **settings)
    with FakeServer(answers) as server:
        run_job(tmp_path, server, 8, config=ONE_BY_ONE, **settings)
    assert rows(tmp_path) == rows(whole)
    for row in rows(tmp_path):
        faults, text = COLUMNS.get(row["text"], ("", "fine"))
        columns = [
            row["metadata"][f"{name}_{end}"] for end in ("finish_reason", "faults", "tokens")
        ]
        assert columns == ["stop", faults, len(text.split())]


def faults(folder):
    return [row["metadata"]["rollout_results_faults"] for row in rows(folder)]


def test_an_answer_in_another_form_is_invalid_also_if_a_later_one_is_valid(tmp_path):
    rollout = PromptRollout("{text}", choice=["yes", "no"], engine="none", invalid_answer="drop")

    def answer(payload, times):
        return "perhaps" if payload["messages"][-1]["content"] == "text 1" or not times else "yes"

    with FakeServer(answer) as server:
        run_job(tmp_path, server, 2, rollout, quality=True)
    assert faults(tmp_path) == ["invalid"]
    counts = together(tmp_path).done
    assert (counts.answers, counts.dropped) == (5, 1)
    assert counts.bad["invalid"] == 4


def test_a_copy_of_a_part_of_a_message_is_found(tmp_path):
    text = "A sentence of the document, which says a little. " * 3

    async def rollout(document, generate):
        return await generate(chat([{"type": "text", "text": f"Rewrite: {text}"}]))

    with FakeServer(lambda payload, times: text) as server:
        run_job(tmp_path, server, 1, rollout, quality=True)
    assert faults(tmp_path) == ["copying"]


def test_columns_of_quality_replace_nothing(tmp_path):
    document = Document("text", "id", metadata={"rollout_results_faults": 1})
    with (
        FakeServer() as server,
        pytest.raises(ConfigError, match="_faults' in its metadata already"),
    ):
        runner(tmp_path, server, quality=True).run([document])
    assert not server.asked


def test_a_run_whose_first_answers_are_bad_says_so_once(tmp_path, log):
    with FakeServer(lambda payload, times: "") as server:
        run_job(tmp_path, server, 250)
    assert [line for line in log if "of the first 100 answers are" in str(line)][1:] == []
    assert "100 of the first 100 answers are cut off, empty" in str(log)
