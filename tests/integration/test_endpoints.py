"""Several endpoints of one model: each with its URL, key, name of the model, limits and prices."""

import json
import re
import shutil
from collections import Counter
from types import SimpleNamespace

import aiohttp
import orjson
import pytest
from aiohttp import web

from datatrove_ckpt import InferenceConfig
from datatrove_ckpt.config.endpoints import EndpointConfig
from datatrove_ckpt.errors import CheckpointMismatch, ConfigError, DocumentFailed, ServerRefused
from datatrove_ckpt.inference.client import client, routing
from datatrove_ckpt.inference.client.routing import MinuteLimits
from datatrove_ckpt.testing import FakeServer
from tests.jobs import Budget, ask, chat, documents, rejects, rows, run_job, runner, texts_of
from tests.yaml_jobs import job_yaml, write_job

VECTOR = [0.25, -1.5, 3.0]


class Provider(FakeServer):
    """A server with a key, which it may refuse. Its answers do not depend on the model's name."""

    key = ""
    refuses = 0
    """The status in place of an answer, and of a list of models."""

    def __init__(self, **settings):
        settings.setdefault("answer", lambda payload, times: f"answer to {_question(payload)}")
        settings.setdefault("status", lambda payload, times: self.refuses or None)
        super().__init__(**settings)
        self.billed = []
        self.paths = {"/v1/embeddings": self._vectors}

    async def _models(self, request):
        if self.refuses in (401, 403) or self._wrong_key(request):
            return web.json_response({}, status=self.refuses or 401)
        return await super()._models(request)

    async def _answered(self, request):
        if self._wrong_key(request):
            return web.json_response({}, status=401)
        answer = await super()._answered(request)
        if answer.status == 200:
            self.billed.append(_question(orjson.loads(await request.read())))
        return answer

    def _wrong_key(self, request):
        return self.key != request.headers.get("Authorization", "").removeprefix("Bearer ")

    def _vectors(self, payload):
        number = len(texts_of(payload))
        data = [{"index": index, "embedding": VECTOR} for index in range(number)]
        return {"data": data, "usage": {"prompt_tokens": number, "total_tokens": number}}


def _question(payload):
    if "messages" in payload:
        return payload["messages"][-1]["content"]
    return payload.get("prompt") or payload["input"]


@pytest.fixture
def two():
    with Provider() as first, Provider() as second:
        yield first, second


def ends(*servers, **settings):
    """Records of the endpoints; ``settings``: of the first one."""
    found = [{"url": one.url, "model": f"m-{number}"} for number, one in enumerate(servers)]
    found[0] |= settings
    return found


def step(folder, endpoints, rollout=ask, *, config=None, **settings):
    config = InferenceConfig("endpoint", "org/m", endpoints=endpoints, **(config or {}))
    return runner(folder, config, rollout, **settings)


def told(folder):
    """Who gave the answers, by document."""
    return {row["text"]: row["metadata"].get("rollout_results_endpoint") for row in rows(folder)}


def check_bills(folder, number, *servers):
    """Each document is paid for once, and has its answer. Returns which tell who gave it."""
    answers = [row["metadata"]["rollout_results"][0]["text"] for row in rows(folder)]
    asked = [f"text {index}" for index in range(number)]
    assert answers == [f"answer to {text}" for text in asked]
    billed = {text: server.url for server in servers for text in server.billed}
    assert Counter(text for server in servers for text in server.billed) == Counter(asked)
    return {text: url == billed[text] for text, url in told(folder).items()}


YAML = """server_type: endpoint, model_name_or_path: org/m, max_concurrent_generations: 8, endpoints: [
  {url: "FIRST", api_key_env: FIRST_KEY, model: m-1, requests_per_minute: 3, prices: {prompt: 1, completion: 2}},
  {url: "SECOND/v1", api_key_env: SECOND_KEY, tokens_per_minute: 200000, prices: {completion: 5}}]"""


def test_a_job_spills_in_order_and_pays_each_endpoints_prices(here, command, two, monkeypatch):
    first, second = two
    first.key, second.key = "key-of-the-first", "key-of-the-second"
    monkeypatch.setenv("FIRST_KEY", first.key)
    monkeypatch.setenv("SECOND_KEY", second.key)
    config = YAML.replace("FIRST", first.url, 1).replace("SECOND", second.url, 1)
    write_job(here, job_yaml(config), [f"text {number}" for number in range(8)])
    first.usage = second.usage = {"prompt_tokens": 1000, "completion_tokens": 100}
    said = command("run", "job.yaml")
    assert [payload["model"] for payload in first.payloads] == ["m-1"] * 3
    assert [payload["model"] for payload in second.payloads] == ["org/m"] * 5
    assert Counter(told(here).values()) == {first.url: 3, f"{second.url}/v1": 5}
    for place in (said, command("status", "checkpoints")):
        assert f"3 answers of {first.url} for 0.0036" in place  # 3 * (1000 * 1 + 100 * 2)
        assert f"5 answers of {second.url}/v1 for 0.0025" in place  # 5 * 100 * 5
        assert "cost 0.0061" in place


@pytest.mark.slow
def test_a_sample_is_priced_by_who_answered_and_used_with_another_list(here, command, two):
    first, second = two
    given = [
        {"url": first.url, "requests_per_minute": 3, "prices": {"prompt": 100}},
        {"url": second.url, "prices": {"prompt": 10}},
    ]
    config = "server_type: endpoint, model_name_or_path: org/m, endpoints: "
    write_job(here, job_yaml(config + json.dumps(given)), [f"text {n}" for n in range(8)])
    first.usage = second.usage = {"prompt_tokens": 1000, "completion_tokens": 1}
    estimate = command("run", "job.yaml", "--sample", "8").out
    assert re.search(rf"\n  cost +{(3 * 100 + 5 * 10) / 1000:g}\n", estimate)
    (here / "job.yaml").write_text(job_yaml(config + json.dumps(given[1:])))
    command("run", "job.yaml")
    assert len(first.billed) + len(second.billed) == 8
    assert Counter(told(here).values()) == {first.url: 3, second.url: 5}


# between two runs ------------------------------------------------------------------------------


def stopped(folder, servers, answers, rollout=ask, **config):
    """A run of ten documents that stops after so many answers, because each refuses its key."""
    budget = Budget()
    budget.left = answers
    for server in servers:
        server._status = budget
    config = {"max_concurrent_generations": 3, **config}
    with pytest.raises(ServerRefused, match="wants a key"):
        step(folder, ends(*servers), rollout, config=config).run(documents(10))
    for server in servers:
        server._status = lambda payload, times: None


def in_another_order(first, second):
    return [*reversed(ends(first, second))]


def with_one_less(first, second):
    return ends(first, second)[1:]


def with_a_name_less(first, second):
    first = {"url": first.url, "weight": 3, "prices": {"prompt": 1}, "tokens_per_minute": 9}
    return [first, {"url": second.url, "model": "org/m", "weight": 0.5}]


@pytest.mark.matrix("change", [in_another_order, with_one_less, with_a_name_less])
def test_a_run_goes_on_with_other_endpoints_and_no_answer_is_paid_or_told_anew(
    tmp_path, two, change
):
    stopped(tmp_path, two, 5)
    before = [text for one in two for text in one.billed]
    assert len(before) == 5
    step(tmp_path, change(*two)).run(documents(10))
    assert all(check_bills(tmp_path, 10, *two).values())


async def without_one(document, generate):
    if document.id != "id 7":
        return await ask(document, generate)
    return {"text": "answer to text 7"}


@pytest.mark.matrix("is_lost", [False, True])
@pytest.mark.matrix("is_several", [False, True])
def test_all_files_of_a_run_have_the_columns_with_which_it_began(
    tmp_path, two, is_several, is_lost
):
    def run_with(status, **settings):
        for server in two:
            server._status = status
        config = InferenceConfig("endpoint", "org/m", max_concurrent_generations=3, **settings)
        mirror = str(tmp_path / "mirror")
        run_job(tmp_path, config, 10, without_one, checkpoints_remote_dir=mirror)

    budget = Budget()
    budget.left = 5
    one = {"endpoint_url": two[0].url}
    several = {"endpoints": [{"url": server.url} for server in two]}
    with pytest.raises(ServerRefused):
        run_with(budget, **(several if is_several else one))
    if is_lost:
        shutil.rmtree(tmp_path / "checkpoints")
    run_with(lambda payload, times: None, **(one if is_several else several))
    columns = {tuple(row["metadata"]) for row in rows(tmp_path)}
    names = ["rollout_results_endpoint", "rollout_results"]
    assert columns == {tuple(names[not is_several :])}
    names = told(tmp_path)
    assert names.pop("text 7") == ("" if is_several else None)
    assert set(names.values()) == ({server.url for server in two} if is_several else {None})


def test_a_name_of_the_model_that_is_new_to_the_run_is_refused_and_an_old_one_is_not(tmp_path, two):
    stopped(tmp_path, two, 5)
    new = [{"url": two[0].url, "model": "m-0"}, {"url": two[1].url, "model": "other"}]
    line = r'endpoint_models: \["m-0","m-1"\] -> \["m-0","m-1","other"\]\n.*names a new model'
    with pytest.raises(CheckpointMismatch, match=line):
        step(tmp_path, new).run(documents(10))
    stopped(tmp_path, two[1:], 2)  # a list without it forgets no name
    step(tmp_path, ends(*two)).run(documents(10))
    check_bills(tmp_path, 10, *two)


# endpoints that fail -----------------------------------------------------------------------------


def refuses_at_the_start(first, second):
    first.refuses = 401


def refuses_later(status):
    def change(first, second):
        first._status = lambda payload, times: status if len(first.payloads) > 2 else None

    return change


def is_down(first, second):
    first._port = 1


FAULTS = {
    "its key is refused later": (refuses_later(401), "other endpoints get its requests"),
    "its key is refused at the start": (refuses_at_the_start, "refuse"),
    "403 for some time": (refuses_later(403), "other endpoints get its requests"),
    "nothing listens": (is_down, "1 of 2 endpoints do not answer"),
}


@pytest.mark.matrix("fault", FAULTS)
def test_an_endpoint_that_fails_leaves_its_requests_to_the_others(
    tmp_path, two, fault, log, command, monkeypatch
):
    change, said = FAULTS[fault]
    if "403" in fault:
        monkeypatch.setattr(client, "_SAY_AFTER", 0)
    change(*two)
    step(tmp_path, ends(*two), config={"max_concurrent_generations": 3}).run(documents(10))
    assert all(check_bills(tmp_path, 10, *two).values())
    warnings = [line for line in log if line.startswith("WARNING") and two[0].url in line]
    assert not said or sum(said in line for line in warnings) == 1
    text = re.search("errors .*", command("status", str(tmp_path / "checkpoints")))[0]
    assert f" at {two[0].url}" in text
    assert two[1].url not in text


def test_a_minute_that_is_full_beside_an_endpoint_that_fails_is_no_outage(
    tmp_path, two, log, monkeypatch
):
    monkeypatch.setattr(routing, "MINUTE_SECONDS", 2.0)
    monkeypatch.setattr(client, "_SAY_AFTER", 0.3)
    step(tmp_path, ends(*two, requests_per_minute=1)).run(documents(2))
    assert two[1].payloads
    assert "gives no answers" not in "".join(log)


def test_the_error_of_a_request_that_is_rejected_names_the_endpoint(tmp_path, two):
    config = {"max_concurrent_generations": 3}
    two[1]._status = rejects(["text 4"])
    two[0].refuses = 400  # it refuses all, so that the other gets its requests
    with pytest.raises(DocumentFailed, match=rf"\({two[1].url}: BadRequestError: HTTP 400\)"):
        step(tmp_path, ends(*two), config=config).run(documents(10))


# who gets a request ------------------------------------------------------------------------------


async def after_a_long_text(document, generate):
    """An engine would keep it, so that another request with it would go there."""
    system = {"role": "system", "content": "Be brief. " * 100}
    return await generate({"messages": [system, *chat(document.text)["messages"]]})


def test_endpoints_with_weights_share_the_requests(tmp_path, two):
    first, second = ends(*two)
    records = [{**first, "weight": 3}, {**second, "weight": 1}]
    step(tmp_path, records, after_a_long_text, config={"max_concurrent_documents": 1}).run(
        documents(12)
    )
    assert [len(one.payloads) for one in two] == [9, 3]


def test_tasks_in_turn_share_the_minute_of_a_process(tmp_path, two):
    for task in range(2):
        step(tmp_path, ends(*two, requests_per_minute=3)).run(documents(2), task, 2)
    assert [len(one.payloads) for one in two] == [3, 1]


def test_a_minute_of_requests_and_tokens_is_sent_and_refused_requests_do_not_count(monkeypatch):
    now = 0.0
    monkeypatch.setattr(routing, "time", SimpleNamespace(monotonic=lambda: now))
    limits = MinuteLimits(EndpointConfig("http://e", requests_per_minute=3, tokens_per_minute=100))
    counted = []
    for now in (0.0, 10.0, 20.0):
        assert limits.opens_at <= now
        counted.append(limits.sent(40))
    assert limits.opens_at == 60.6
    limits.not_counted(counted[0])
    assert limits.opens_at == 0
    limits.answered(counted[1], 80)  # with 10 for another, no room for a third of so many
    assert limits.opens_at == 70.6
    now = 70.6
    limits.answered(counted[1], 1000)  # it is too old to count
    assert limits.opens_at == 80.6


# ways to ask -------------------------------------------------------------------------------------


async def of_each_kind(document, generate):
    found = await generate(chat(document.text, n=2))
    async with generate.url() as base_url, aiohttp.ClientSession() as session:
        await generate.once("tool", len, document.text)
        payload = chat(document.text, model="whatever")
        async with session.post(f"{base_url}/chat/completions", json=payload) as answer:
            assert (await answer.json())["choices"][0]["message"]["content"] == found.text
    vectors = await generate.embed([document.text, "another"])
    return {"text": found.text, "who": found.endpoint, "vectors": vectors.tolist()}


@pytest.mark.matrix("texts", [4, 1])
def test_each_kind_of_request_has_the_endpoints_name_of_the_model(tmp_path, two, texts):
    config = {"max_concurrent_generations": 3, "texts_per_request": texts}
    step(tmp_path, ends(*two), of_each_kind, config=config).run(documents(5))
    assert {payload["model"] for payload in two[0].payloads} == {"m-0"}
    assert {payload["model"] for payload in two[1].payloads} == {"m-1"}
    assert {one for who in told(tmp_path).values() for one in who.split(", ")} <= {
        two[0].url,
        two[1].url,
    }
    for row in rows(tmp_path):
        (result,) = row["metadata"]["rollout_results"]
        assert result["vectors"] == [VECTOR, VECTOR]
        assert result["who"] in told(tmp_path)[row["text"]]


# settings ----------------------------------------------------------------------------------------

URL = {"url": "http://e"}


def test_max_cost_needs_the_prices_of_each(tmp_path):
    priced = {**URL, "prices": {"prompt": 1, "completion": 0}}
    step(tmp_path, [priced, priced], max_cost=1.0)
    with pytest.raises(ConfigError, match="max_cost: needs prices"):
        step(tmp_path, [priced, URL], max_cost=1.0)
    half = {**URL, "prices": {"prompt": 1, "cached": 0.1}}
    line = "max_cost: needs the price .* Write prices: {prompt: 1, cached: 0.1, completion: 8}"
    with pytest.raises(ConfigError, match=line):
        step(tmp_path, [priced, half], max_cost=1.0)
    step(tmp_path, [priced, half])
