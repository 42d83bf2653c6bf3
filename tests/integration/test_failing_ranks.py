"""A rank that fails: requests in flight are answered and kept before it ends, as when a signal
stops it.
"""

from collections import Counter

import pytest

from datatrove_ckpt.errors import (
    CkptError,
    DocumentFailed,
    ServerRefused,
    ServerUnavailable,
    StorageFailed,
)
from datatrove_ckpt.testing import FakeServer, outputs
from tests.jobs import STOPS_SOON, chat, config, documents, rejects, run_job, runner
from tests.patience import until_async
from tests.preempted import DRAINS, when_logged

DOCUMENTS, AT_ONCE = 40, 20


async def twice(document, generate):
    first = await generate(chat(document.text))
    return [first.text, (await generate(chat(f"{document.text} again"))).text]


async def with_typos(document, generate):
    if int(document.id[3:]) % 2 == 0:
        await generate(chat(document.text))
        raise NameError(f"in {document.id}")
    return await twice(document, generate)


def run(folder, server, rollout, number=DOCUMENTS, **changes):
    changes.setdefault("config", {"max_concurrent_generations": AT_ONCE})
    run_job(folder, server, number, rollout, accept_changes=True, **changes)


def undisturbed(folder):
    with FakeServer() as server:
        run(folder, server, twice)
        return server.asked, outputs(folder / "output")


class OthersWait(FakeServer):
    """Answers the document that fails once all are asked, a probe at once, and the others while the
    rank drains.
    """

    async def _answered(self, request):
        response = await super()._answered(request)
        body = await request.read()
        if b'"text 4"' in body:
            await until_async(lambda: len(self.payloads) >= AT_ONCE)
        elif b'"JSON"' not in body:
            await self._released.wait()
        return response


@pytest.mark.matrix("status", [None, 400, 401])
def test_what_is_in_flight_when_a_rank_fails_is_paid_once(tmp_path, status):
    """Of an error in a rollout (a second one is ignored), a rejected request, and a server that
    refuses every request.
    """
    refuses = rejects(["text 4"], status) if status is not None else lambda payload, times: None
    with OthersWait(status=refuses) as server:
        error = ServerRefused if status == 401 else DocumentFailed
        with when_logged(DRAINS, server.release), pytest.raises(error) as failed:
            run(tmp_path, server, twice if status else with_typos)
        if status != 401:
            assert "The answers of other documents are saved." in str(failed.value)
            assert "id 4" in str(failed.value)
        server.asked.pop("JSON", None)
        # A rejected request lets another start until it is decided.
        assert server.asked.total() == AT_ONCE + (status == 400)
        server._status = lambda payload, times: None
        run(tmp_path, server, twice, retry_errors=True)
        asked, files = undisturbed(tmp_path / "undisturbed")
        assert server.asked == asked + Counter({"text 4": int(status is not None)})
        assert outputs(tmp_path / "output") == files


@pytest.mark.parametrize("drops", [False, True])
def test_a_document_that_a_server_failed_is_not_recorded_while_the_rank_drains(tmp_path, drops):
    async def hides(document, generate):
        try:
            return (await generate(chat(document.text))).text
        except Exception:
            return None if drops else await generate(chat("once more"))

    with OthersWait(status=rejects(["text 4"], 401)) as server:
        with when_logged(DRAINS, server.release), pytest.raises(ServerRefused):
            run(tmp_path, server, hides, 30, on_document_error="dead_letter")
        server._status = lambda payload, times: None
        run(tmp_path, server, hides, 30, on_document_error="dead_letter")
        assert server.asked == Counter({f"text {index}": 1 for index in range(30)}) + Counter(
            {"text 4": 1}
        )
        assert sum(line.count(b"\n") for line in outputs(tmp_path / "output").values()) == 30


@pytest.mark.parametrize("second_model", ["judge refuses", "judge is away"])
def test_the_requests_of_the_other_model_are_waited_for(tmp_path, second_model):
    async def judged(document, generate):
        if int(document.id.split()[1]) % 2:
            return (await generate.judge(chat(f"judge {document.text}"))).text
        return (await generate(chat(document.text))).text

    away = second_model == "judge is away"
    with (
        FakeServer(hold_after=0) as writes,
        FakeServer(status=lambda payload, times: 503 if away else 401) as judges,
    ):
        settings = {"max_concurrent_generations": AT_ONCE}
        models = {
            "writer": config(writes, **settings),
            "judge": config(judges, server_patience_seconds=0.1),
        }
        step = runner(tmp_path, models, judged)
        with (
            when_logged(DRAINS, writes.release),
            pytest.raises(ServerUnavailable if away else ServerRefused, match=r"^judge: "),
        ):
            step.run(documents(20))
        writes.release()
        judges._status = lambda payload, times: None
        models["judge"] = config(judges)
        step.run(documents(20))
        assert set(writes.asked.values()) == {1}


def test_a_server_that_is_away_is_not_waited_for(tmp_path):
    config = {"max_concurrent_generations": AT_ONCE, **STOPS_SOON}
    with OthersWait(status=rejects(["text 4"], 503)) as server:
        with pytest.raises(ServerUnavailable):
            run(tmp_path, server, twice, drain_seconds=600.0, config=config)
        assert server.asked["text 0"] == 1


def test_where_nothing_can_be_saved_nothing_is_waited_for(tmp_path, monkeypatch):
    def full(*arguments):
        raise StorageFailed("No space left on device.")

    monkeypatch.setattr("datatrove_ckpt.checkpoint.open_checkpoint.OpenCheckpoint.put_answer", full)
    with FakeServer(hold_after=5) as server, pytest.raises(CkptError, match="No space"):
        run(tmp_path, server, with_typos, drain_seconds=600.0)
