"""Provider batches: the same bytes as without them, and each answer is paid for once."""

import asyncio
import os
import random
import shutil
import signal
import time
from codecs import BOM_UTF8
from collections import defaultdict
from typing import NamedTuple
from unittest.mock import patch

import orjson
import pytest
from aiohttp import web
from datatrove.pipeline.base import PipelineStep

from datatrove_ckpt.checkpoint import batch_log, files
from datatrove_ckpt.checkpoint.batch_log import read_batches
from datatrove_ckpt.checkpoint.layout import BATCHES_FOLDER
from datatrove_ckpt.errors import (
    CheckpointMismatch,
    ConfigError,
    ServerRefused,
    StorageFailed,
    WaitsForBatches,
)
from datatrove_ckpt.generation import provider_passes, replay
from datatrove_ckpt.inference.client.provider_batches import BatchProvider, MessageBatches
from datatrove_ckpt.readers import JsonlReader
from tests.crashes import CopyingDisk, CrashReport, disk_in_place
from tests.jobs import ask, chat, documents, letters, rows, run_job, runner
from tests.power_loss import CopyingPowerLossDisk
from tests.provider import FAILED, KEY, FakeMessages, FakeProvider

BATCHES = {"provider_batches": True}
MESSAGES = {**BATCHES, "api_key": KEY}


@pytest.fixture(autouse=True)
def _soon(monkeypatch, policy):
    policy("SERVER", first=0.01)
    monkeypatch.setattr(provider_passes, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(provider_passes, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(provider_passes, "LIST_LAG_SECONDS", 0.3)


def run(folder, provider, number=3, rollout=ask, **changes):
    run_job(folder, provider, number, rollout, **{"config": BATCHES, **changes})


def waits(step, number=3):
    """Runs until all batches are created."""
    step.no_wait = True
    with pytest.raises(WaitsForBatches, match="batch_"):
        step.run(documents(number))


def assert_paid(folder, provider, number=3, batches=None, times=1):
    assert len(rows(folder)) == number
    assert set(provider.billed.values()) == {times}
    assert batches is None or len(provider.batches) == batches


@pytest.fixture
def provider():
    with FakeProvider() as running:
        yield running


@pytest.fixture
def job(here, monkeypatch):
    """Returns the words of a job of four documents at a provider."""
    monkeypatch.setenv("THE_KEY", "k")
    lines = [orjson.dumps({"text": f"text {index}", "id": str(index)}) for index in range(4)]
    (here / "input.jsonl").write_bytes(b"\n".join(lines) + b"\n")

    def words(provider, *more):
        given = "--input=input.jsonl --model=fake --prompt={text} --run-folder=job --tasks=1 --api-key-env=THE_KEY"
        return [*given.split(), f"--endpoint={provider.url}", *more]

    return words


@pytest.fixture
def later(monkeypatch):
    """Moves the clock on which the rest of a batch is awaited."""
    now = [1e9]

    def move(seconds):
        now[0] += seconds

    for module in (batch_log, provider_passes):
        monkeypatch.setattr(module, "unix_seconds", lambda: now[0])
    return move


async def three(document, generate):
    """Two requests at one time, and a third with their answers."""

    async def one(text):
        return (await generate(chat(text))).text

    first, second = await asyncio.gather(one(document.text), one(f"again {document.text}"))
    return await one(f"{first} {second}")


async def message(document, generate, text=None):
    payload = chat(text or document.text, max_tokens=9)
    answer = await generate(payload, path="/v1/messages")
    return answer.answer["content"][0]["text"]


async def two_messages(document, generate):
    return await message(document, generate, await message(document, generate))


async def two_in_a_row(document, generate):
    return await generate(chat((await ask(document, generate)).text))


def test_what_netrc_has_for_the_host_is_not_sent(tmp_path, provider, monkeypatch):
    (tmp_path / "netrc").write_text("default login me password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    run(tmp_path, provider, config={**BATCHES, "api_key": "k"})
    assert_paid(tmp_path, provider)


def test_a_run_with_batches_has_the_output_of_one_without(tmp_path, provider):
    """The first answer to a creation is lost, and the list does not show that batch yet."""
    provider.list_lag = 0.1
    provider.lose["/v1/batches"] = 1
    run_job(tmp_path / "online", provider, 5, three)
    online = len(provider.payloads)
    run(tmp_path / "batch", provider, 5, three)
    assert len(provider.payloads) == online == 15
    assert rows(tmp_path / "batch") == rows(tmp_path / "online")
    assert len(provider.billed) == provider.billed.total() == 15
    assert len(provider.batches) == 2


def test_a_file_of_requests_that_could_not_be_written_whole_is_not_sent(
    tmp_path, provider, monkeypatch
):
    append = files.AppendFile.append
    written = []

    def full(file, data):
        if file.path.parent.name == BATCHES_FOLDER:
            written.append(data)
            if len(written) == 3:
                time.sleep(0.2)  # the pass is over meanwhile
                append(file, data[:9])
                raise StorageFailed("No space left on device.")
        return append(file, data)

    with monkeypatch.context() as patched:
        patched.setattr(files.AppendFile, "append", full)
        with pytest.raises(StorageFailed):
            run(tmp_path, provider)
    assert not provider.batches
    run(tmp_path, provider)
    assert_paid(tmp_path, provider, batches=1)


@pytest.mark.matrix("lost", [502, 429])
def test_answers_that_are_missing_are_asked_for_again(tmp_path, lost, provider):
    """Expired, failed and unfinished requests, a lost answer to each path, a batch out of order."""
    draws = random.Random(0)

    def outcome(request):
        if request["custom_id"].rpartition("-")[2] != "1":
            return None
        return draws.choice([None, "expired", FAILED, ["no response"]])

    provider.outcome = outcome
    provider.list_lag = 0.1
    provider.lost = lost
    provider.lose.update(["/v1/files", "/v1/batches", "/v1/batches"])
    run_job(tmp_path / "online", provider, 15)
    run(tmp_path / "batch", provider, 15)
    assert rows(tmp_path / "batch") == rows(tmp_path / "online")
    assert len(provider.payloads) == 15
    assert_paid(tmp_path / "batch", provider, 15)


def loses_first(method, path):
    """A provider that does not get the first request of a kind."""
    provider = FakeProvider()
    handle = getattr(provider, method)
    provider.never_seen = []

    async def receive(request):
        if provider.never_seen or path not in request.path:
            return await handle(request)
        provider.never_seen.append(request)
        return web.json_response({"error": "lost"}, status=502)

    setattr(provider, method, receive)
    return provider


def test_a_request_to_create_a_batch_that_is_late_finds_no_file(tmp_path):
    with loses_first("_create", "") as provider:
        run(tmp_path, provider, 1)
    assert [name for name in provider.files if name.startswith("file")] == ["file-2"]
    assert set(provider.billed.values()) == {1}


def test_answers_are_kept_when_the_file_of_errors_is_lost_once(tmp_path):
    def outcome(request):
        is_first = request["custom_id"].endswith("-1")
        return FAILED if is_first and "text 1" in str(request["body"]) else None

    with loses_first("_content", "/err") as provider:
        provider.outcome = outcome
        run(tmp_path, provider)
    assert provider.never_seen
    assert_paid(tmp_path, provider)


def test_messages_go_as_batches_in_the_form_of_anthropic(tmp_path):
    """Expired and failed requests, a rejected one, and lost answers to the creation, while another
    batch of the same size is there.
    """
    with FakeMessages() as provider:
        online = {"skip_bad_requests": True, "config": {"api_key": KEY}}
        provider._status = lambda payload, times: 400 if "text 3" in str(payload) else None
        run(tmp_path / "online", provider, 6, message, **online)
        draws = random.Random(0)

        def outcome(request):
            if "text 3" in str(request):
                return "invalid_request_error"
            if request["custom_id"].rpartition("-")[2] != "1":
                return None
            return draws.choice([None, "expired", "canceled", "api_error"])

        provider.outcome = outcome
        provider.list_lag = 0.1
        provider.lose["/v1/messages/batches"] = 2
        job = {"skip_bad_requests": True, "config": MESSAGES}
        run(tmp_path / "others", provider, 6, two_messages, **job)
        provider.billed.clear()
        provider.lose["/v1/messages/batches"] = 2
        provider.steps = 4
        run(tmp_path / "batch", provider, 6, message, **job)
    assert rows(tmp_path / "batch") == rows(tmp_path / "online")
    assert len(provider.billed) == 5
    assert_paid(tmp_path / "batch", provider, 5)
    (letter,) = letters(tmp_path / "batch")
    assert "in the words of the provider" in letter["error"]


def test_a_rejected_line_becomes_a_dead_letter_with_the_words_of_the_provider(tmp_path, provider):
    rejection = {"status_code": 400, "body": {"error": {"message": "too long for this model"}}}
    provider.outcome = lambda request: rejection if "text 1" in str(request["body"]) else None
    run(tmp_path, provider, skip_bad_requests=True, retry_errors=True)
    (letter,) = letters(tmp_path)
    assert letter["id"] == "id 1"
    assert "too long for this model" in letter["error"]
    assert len(rows(tmp_path)) == 2


def test_a_batch_that_is_refused_as_a_whole_blames_no_document(tmp_path, provider):
    errors = [{"code": "model_not_found", "message": "no such model"}]
    provider.refuse = lambda batch: {"data": errors}
    with pytest.raises(Exception, match="no such model"):
        run(tmp_path, provider, skip_bad_requests=True)
    provider.refuse = lambda batch: []
    run(tmp_path, provider)
    assert_paid(tmp_path, provider)
    assert not letters(tmp_path)


@pytest.fixture(params=["files", pytest.param("messages", marks=pytest.mark.slow)])
def service(request):
    """A provider of each form."""
    if request.param == "files":
        with FakeProvider() as provider:
            yield Service(provider, ask, BATCHES, BatchProvider)
    else:
        with FakeMessages() as provider:
            yield Service(provider, message, MESSAGES, MessageBatches)


class Service(NamedTuple):
    provider: FakeProvider
    rollout: object
    config: dict
    kind: type

    def step(self, folder, config=None, **changes):
        config = {**self.config, **(config or {})}
        return runner(folder, self.provider, self.rollout, config=config, **changes)

    def run(self, folder, **config):
        self.step(folder, config).run(documents(3))


@pytest.mark.parametrize(
    "hidden, comes_back",
    [
        ("half", True),
        ("half", False),
        *(pytest.param(hidden, False, marks=pytest.mark.slow) for hidden in ("file", "id", "end")),
    ],
)
def test_answers_that_come_late_are_awaited_and_not_paid_for_again_by_itself(
    tmp_path, later, service, hidden, comes_back
):
    provider = service.provider
    provider.hidden = hidden
    shown = provider._shown
    looks = []

    def look(batch):
        looks.append(batch)
        later(2)
        if comes_back and len(looks) >= 6:
            provider.hidden = ""
        if not comes_back and len(looks) >= 5:
            provider.hidden = "file"  # what was read stays
        return shown(batch)

    provider._shown = look
    if not comes_back:
        with pytest.raises(ServerRefused, match="which were paid for"):
            service.run(tmp_path, server_patience_seconds=60)
        provider._shown = shown
        provider.hidden = ""
    service.run(tmp_path, server_patience_seconds=60)
    assert len(rows(tmp_path)) == 3
    twice = 0 if comes_back else {"file": 3, "id": 3, "half": 2, "end": 1}[hidden]
    assert sum(provider.billed.values()) == 3 + twice


@pytest.mark.matrix
def test_the_wait_for_missing_answers_goes_on_in_the_next_process(tmp_path, later, service):
    service.provider.hidden = "half"
    step = service.step(tmp_path, {"server_patience_seconds": 60})
    while not service.provider.reads:
        waits(step)
    for _ in range(2):
        later(29)
        waits(step)
    later(2)
    with pytest.raises(ServerRefused, match="which were paid for"):
        step.run(documents(3))


def test_a_request_without_a_line_is_sent_as_often_as_one_that_fails(tmp_path, service):
    provider = service.provider
    provider.outcome = lambda request: "lost" if "text 1" in str(request) else None
    with pytest.raises(Exception, match=r"after 3 batches.*no line for this request"):
        service.run(tmp_path, request_max_attempts=3)
    assert len(provider.batches) == 3
    assert set(provider.billed.values()) == {1}


def test_a_batch_whose_answers_have_other_ids_is_not_sent_again(tmp_path, service):
    provider = service.provider
    provider.prefix = b"gateway/"
    for _ in range(2):
        with pytest.raises(ServerRefused, match="gateway/"):
            service.run(tmp_path)
    assert len(provider.batches) == 1
    service.run(tmp_path, provider_batches=False)
    assert len(rows(tmp_path)) == 3
    assert len(provider.payloads) == 3


# what a provider forgets, and what it sends ------------------------------------------------------


def test_a_batch_that_is_forgotten_is_sent_again_once_the_user_gives_it_up(
    here, command, later, job, provider
):
    provider.steps = 10**9
    job = ["run", *job(provider, "--server-patience-seconds=60", "--no-wait")]
    batches = [*job, "--provider-batches=true"]
    command(*batches, code=75)
    provider.forgotten.add("batch_2")
    assert "Run again" in command("batches", "cancel", "job", code=1)
    command(*batches, code=75)  # perhaps it is only missing for a while
    later(61)
    for more in (batches, [*batches, "--accept-changes=true"], job):
        said = command(*more, code=1).error
        assert "has no batch batch_2 (HTTP 404" in said
        assert f"batches cancel {here / 'job' / 'checkpoints'}, then run" in said
        assert "network" not in said
    assert len(provider.batches) == 1
    said = command("batches", "cancel", str(here / "job" / "checkpoints"))
    assert "forgotten batch_2. The next run pays for its requests" in said
    assert "No batch is open" in command("batches", "list", "job")
    provider.steps = 0
    command(*batches)
    assert_paid(here / "job", provider, 4, batches=2, times=2)


def test_a_batch_that_is_missing_for_a_while_is_awaited(tmp_path, later, service):
    """And it was not missing since then when its answers come late."""
    provider = service.provider
    step = service.step(tmp_path, {"server_patience_seconds": 60})
    provider.steps = 10**9
    waits(step)
    provider.forgotten |= provider.batches.keys()
    waits(step)
    provider.forgotten.clear()
    later(61)
    waits(step)
    provider.steps = 0
    provider.hidden = "file"
    waits(step)
    provider.hidden = ""
    later(30)
    step.no_wait = False
    step.run(documents(3))
    assert_paid(tmp_path, provider)


@pytest.mark.slow
def test_a_forgotten_batch_of_a_mirror_is_given_up_there(tmp_path, command, later, provider):
    mirror = {"checkpoints_remote_dir": str(tmp_path / "mirror"), "mirror_seconds": 600.0}
    config = {**BATCHES, "server_patience_seconds": 60}
    provider.steps = 10**9
    for number in range(3):
        step = runner(tmp_path / str(number), provider, config=config, **mirror)
        step.accept_changes = True  # another output folder
        step.no_wait = True
        with pytest.raises(ServerRefused if number == 2 else WaitsForBatches):
            step.run(documents(3))
        provider.forgotten |= provider.batches.keys()
        later(61)
    assert "The provider has forgotten" in command("batches", "cancel", str(tmp_path / "mirror"))
    provider.steps = 0
    step.run(documents(3))
    assert_paid(tmp_path / "2", provider, times=2)


@pytest.mark.slow
def test_a_kill_while_a_batch_is_given_up_sends_nothing_twice(tmp_path, later, provider):
    """A kill before each effect on the disk."""
    folder = tmp_path / "job"
    config = {**BATCHES, "server_patience_seconds": 60}
    reports = CrashReport()
    step = runner(folder, provider, config=config)
    provider.steps = 10**9
    waits(step, 2)
    provider.forgotten.add("batch_2")
    waits(step, 2)
    later(61)
    provider.steps = 0
    state = provider.state()
    disk = CopyingDisk(folder)
    rank = folder / "checkpoints" / "00000"
    with disk_in_place(disk):
        batch_log.give_up(rank, 1)
    for _ in disk.left():
        if not reports.is_new(folder, 0):
            continue
        provider.restore(state)
        if read_batches(rank)[0][1].is_open:
            with pytest.raises(ServerRefused, match="batches cancel"):
                step.run(documents(2))
            batch_log.give_up(rank, 1)
        step.no_wait = False
        step.run(documents(2))
        assert_paid(folder, provider, 2, times=2)
    assert len(reports.states) > 2


def of_the_list(provider):
    """Batches of others, a day and more ago: more than two pages."""
    for number in range(250):
        name = f"old_{number}"
        provider.batches[name] = {"id": name, "status": "completed", "created_at": number}
        provider._listed[name] = 0.0


@pytest.mark.matrix(
    "ignores_after, pages", [(False, [None, "old_150", "old_50"]), (True, [None, "old_150"])]
)
def test_a_long_list_is_read_to_its_end(tmp_path, ignores_after, pages):
    """A page that comes twice ends the list, too."""
    asked = []

    async def count(request):
        asked.append(request.query.get("after"))
        return await listed(request)

    provider = loses_first("_create", "")
    listed = provider._list
    provider._list = count
    with provider:
        of_the_list(provider)
        provider.ignores_after = ignores_after
        run(tmp_path, provider)
    assert_paid(tmp_path, provider)
    assert provider.effects.count("create") == 1
    assert asked == pages * (len(asked) // len(pages)) != []


def changed(content, change):
    """The lines of a file, each changed."""
    lines = []
    for line in content.splitlines():
        found = orjson.loads(line)
        change(found)
        lines.append(orjson.dumps(found))
    return b"\n".join(lines) + b"\n"


def no_status(line):
    del line["response"]["status_code"]


def text_status(line):
    line["response"] |= {"status_code": "200"}
    line["error"] = {"code": None, "message": None}


def no_body(line):
    line["response"] = line["response"]["body"]


def lines_of_a_file(change):
    return lambda provider: setattr(provider, "write", lambda content: changed(content, change))


def bytes_of_a_file(change):
    return lambda provider: setattr(provider, "write", change)


def state_of_a_batch(**states):
    def describe(batch):
        changes = {"status": states.get(batch["status"], batch["status"])}
        counts = batch["request_counts"]
        if "counts" in states:
            changes["request_counts"] = {name: str(number) for name, number in counts.items()}
        return {**batch, **changes}

    return lambda provider: setattr(provider, "describe", describe)


def a_failure_too(content):
    """As the file of errors may have it, of an earlier attempt of the provider."""

    def fail(line):
        line["response"] = FAILED

    return content + changed(content, fail)


ODD = {
    "no status": lines_of_a_file(no_status),
    "a text as status": lines_of_a_file(text_status),
    "no body": lines_of_a_file(no_body),
    "a failure, too": bytes_of_a_file(a_failure_too),
    "a mark of the byte order": bytes_of_a_file(lambda content: BOM_UTF8 + content),
    "blank lines": bytes_of_a_file(lambda content: b"\r\n" + content.replace(b"\n", b"\r\n\r\n")),
    "half a character": bytes_of_a_file(lambda content: content.replace(b"text 0", b"\\ud83d")),
    "capitals": state_of_a_batch(completed="COMPLETED", in_progress="IN_PROGRESS"),
    "an unknown state": state_of_a_batch(completed="Done", in_progress="Waiting", counts=1),
    "a file that is not seen yet": lambda provider: setattr(provider, "unseen", 1),
}


def ends_early(status, outcome):
    """A batch in which the first request has this outcome."""

    def set_up(provider):
        outcomes = [outcome]
        provider.status = status
        provider.outcome = lambda request: outcomes.pop() if outcomes else None

    return set_up


def refuses_what_it_creates(status):
    def set_up(provider):
        provider.lost = status
        provider.lose["/v1/batches"] = 1

    return set_up


IN_TWO = {
    # A request that was not sent uses up no attempt.
    "expired": (ends_early("expired", "expired"), 1),
    "cancelled": (ends_early("cancelled", "expired"), 1),
    "expired without a line": (ends_early("expired", "lost"), 1),
    "failed": (ends_early("failed", "lost"), 2),
}
PAID = [
    *((set_up, 1, 1) for set_up in ODD.values()),
    *((refuses_what_it_creates(status), 1, 1) for status in (400, 404)),
    *((*case, 2) for case in IN_TWO.values()),
]


@pytest.mark.matrix("set_up, attempts, batches", PAID, ids=[*ODD, "400", "404", *IN_TWO])
def test_what_was_paid_for_is_kept_however_a_batch_is_described_and_ends(
    tmp_path, set_up, attempts, batches, provider
):
    set_up(provider)
    run(tmp_path, provider, config={**BATCHES, "request_max_attempts": attempts})
    assert_paid(tmp_path, provider, 3, batches)


def test_answers_in_an_unknown_form_are_paid_for_twice_at_most(tmp_path, provider):
    """A server that dies may send one, too, so the requests are sent once more."""

    def other(line):
        line["response"]["body"] = {"output": "text"}

    provider.write = lambda content: changed(content, other)
    for _ in range(2):
        with pytest.raises(Exception, match=r"after 2 batches.*the answer has no choices"):
            run(tmp_path, provider, 6)
    assert len(provider.batches) == 2


@pytest.mark.matrix(
    "errors, cause",
    [
        (None, "refused batch batch_2: it names no cause"),
        ("no credit", "refused batch batch_2: no credit"),
        ([["no", 1]], r"\['no', 1\]"),
        ({"data": [{"code": 7, "message": "no credit"}]}, "'message': 'no credit'"),
    ],
)
def test_why_a_batch_failed_is_shown_in_any_form(tmp_path, errors, cause, provider):
    provider.refuse = lambda batch: ["no credit"]
    provider.describe = lambda batch: {**batch, "errors": errors}
    with pytest.raises(ServerRefused, match=cause):
        run(tmp_path, provider, 1)


def test_what_a_provider_writes_is_one_line_without_the_key(
    here, command, later, job, monkeypatch, provider
):
    """Its ids, states and errors. An id that was changed by that is none, and nothing is paid for
    twice.
    """
    key = "the-key-of-a-test"
    monkeypatch.setenv("THE_KEY", key)

    def describe(batch):
        said = f"{batch['id']}\nchunks 9 of 9 {key}\x1b[2J"
        return {**batch, "id": said, "status": f"in a\nmood {key}", "errors": said}

    provider.describe = describe
    flags = ("--provider-batches=true", "--no-wait", "--server-patience-seconds=60")
    job = ["run", *job(provider, *flags)]
    said = command(*job, code=75)
    assert "batch_2 chunks 9 of 9 ***" in said
    provider.batches["batch_2 chunks 9 of 9 ***\\u001b[2J"] = provider.batches.pop("batch_2")
    command(*job, code=75)
    status = command("status", "job")
    assert "\nchunks 9 of 9" not in status
    command("report", "job")
    provider.batches.clear()
    command(*job, code=75)
    later(61)
    assert "may have been paid for" in command(*job, code=1).error
    for path in (here / "job").rglob("*"):
        assert path.is_dir() or key.encode() not in path.read_bytes()
    assert provider.effects.count("create") == 1


async def unrepeatable(document, generate):
    return await generate(chat(f"{document.text} {random.random()}"))


def test_a_rollout_that_is_not_repeatable_fails_after_its_first_pass(tmp_path, provider):
    for _ in range(2):
        with pytest.raises(ConfigError, match="sent other requests than in its last pass"):
            run(tmp_path, provider, rollout=unrepeatable, config=BATCHES)
    assert len(provider.billed) == 3
    letter = {"on_document_error": "dead_letter"}
    run(tmp_path, provider, rollout=unrepeatable, **letter)
    assert len(provider.billed) == 3
    assert len(letters(tmp_path)) == 3


async def says_word(document, generate):
    return await generate(chat(f"{document.text} {os.environ['WORD']}"))


def test_another_rollout_is_refused_before_its_batches_are_awaited(tmp_path, provider, monkeypatch):
    def start(rank, **changes):
        settings = {"config": BATCHES, "records_per_chunk": 2, **changes}
        step = runner(tmp_path, provider, says_word, **settings)
        step.no_wait = rank > 0
        step.run(documents(3), rank, 2)

    monkeypatch.setenv("WORD", "OLD")
    start(0)
    provider.steps = 10**9
    with pytest.raises(WaitsForBatches):
        start(1)
    monkeypatch.setenv("WORD", "NEW")
    monkeypatch.setattr(replay, "repeats_itself", lambda step, root: True)
    with pytest.raises(CheckpointMismatch, match="OLD' -> '"):
        start(1)
    with pytest.raises(WaitsForBatches):
        start(1, accept_changes=True)
    history = (tmp_path / "checkpoints" / "00001" / "history.jsonl").read_bytes()
    assert history.count(b'"k":"replay"') == 1


def test_limits_of_a_batch_are_kept_by_splitting(tmp_path, monkeypatch, provider):
    monkeypatch.setattr(batch_log, "MOST_REQUESTS", 3)
    folder = tmp_path / "checkpoints" / "00000" / BATCHES_FOLDER
    folder.mkdir(parents=True)
    (folder / "00001.jsonl").write_bytes(b"of a kill before its line was written\n")
    run(tmp_path, provider, 7)
    sizes = [content.count(b"\n") for name, content in provider.files.items() if "file" in name]
    assert sizes == [3, 3, 1]
    assert_paid(tmp_path, provider, 7)


def test_a_run_goes_on_without_batches_and_uses_what_was_paid(tmp_path, provider):
    provider.steps = 10**9
    step = runner(tmp_path, provider, three, config=BATCHES)
    for _ in range(2):
        waits(step, 4)
    provider.steps = 0
    run_job(tmp_path, provider, 4, three)
    assert len(rows(tmp_path)) == 4
    assert len(provider.billed) == provider.billed.total() == 8
    assert len(provider.payloads) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [CopyingDisk, pytest.param(CopyingPowerLossDisk, marks=pytest.mark.full)]
)
@pytest.mark.parametrize(
    "form, rollout, config",
    [(FakeProvider, two_in_a_row, BATCHES), (FakeMessages, two_messages, MESSAGES)],
)
def test_no_kill_pays_for_an_answer_twice(
    tmp_path, monkeypatch, code_described_once, kind, form, rollout, config
):
    """A kill, or a power loss, before each effect on the disk and at the provider."""

    def watched(method):
        async def call(self, *arguments):
            if isinstance(files.disk, CopyingDisk):
                files.disk.happen("sync", (tmp_path,), method.__name__, lambda: None)
            return await method(self, *arguments)

        return call

    for kind_of_batch, name in (
        (BatchProvider, "upload"),
        (BatchProvider, "create"),
        (BatchProvider, "delete"),
        (MessageBatches, "create"),
    ):
        monkeypatch.setattr(kind_of_batch, name, watched(getattr(kind_of_batch, name)))
    folder = tmp_path / "job"
    folder.mkdir()
    states = []
    reports = defaultdict(CrashReport)

    class Disk(kind):
        def keep(self):
            super().keep()
            states.append(provider.state())

    def attempt():
        job = {"config": config, "records_per_chunk": 3}
        run_job(folder, provider, 2, rollout, **job)

    with form() as provider:
        provider.list_lag = 0.1
        disk = Disk(folder)
        with disk_in_place(disk):
            attempt()
        expected = rows(folder)
        for number, where in disk.left():
            state = states[number]
            if not reports[str(state)].is_new(folder, 0):
                continue
            provider.restore(state)
            attempt()
            assert rows(folder) == expected, where
            assert len(provider.billed) == provider.billed.total() == 4, where
    assert disk.points.count("sync create") == 2
    assert len(reports) > 4


def test_no_wait_ends_with_75_until_the_answers_are_there(here, command, job, provider):
    """And what a canceled batch has answered is kept."""
    provider.steps = 10**9
    prices = '--prices={"prompt": 2, "completion": 500000}'
    job = job(provider, "--provider-batches=true", prices, "--max-tokens=2")
    for _ in range(2):
        said = command("run", *job, "--no-wait", code=75)
        assert "batch_2" in said
        assert "error" not in said.lower()
        assert "No task needs attention" in command("status", "job")
        log = (here / "job" / "logs" / "logs" / "task_00000.log").read_text()
        assert "ERROR" not in log
    assert "batch_2 of task 0: 4 requests, created" in command("status", "job")
    assert "batch_2 of task 0: 4 requests, created" in command("batches", "list", "job")
    assert "All are being canceled" in command("batches", "cancel", "job")
    assert provider.batches["batch_2"]["status"] == "cancelled"
    assert "0 sent in this run, 4 answered in batches" in command("run", *job, "--no-wait")
    assert "No batch is open" in command("batches", "list", "job")
    said = command("status", "job")
    assert "4 answers in tier batch, cost 2.0" in said
    assert "0 sent, 4 answered in batches, 0 answered from cache" in said
    command("verify", "job")
    assert set(provider.billed.values()) == {1}
    assert len(provider.billed) == 4
    assert not provider.payloads


def test_what_is_paid_for_is_known_to_the_mirror_first(tmp_path, service):
    """The node is lost right after the provider has created the batch."""
    provider = service.provider
    provider.list_lag = 0.1
    mirror = {"checkpoints_remote_dir": str(tmp_path / "mirror"), "mirror_seconds": 600.0}
    create = service.kind.create
    first = service.step(tmp_path / "first", **mirror)
    second = service.step(tmp_path / "second", **mirror)

    async def lost(self, *arguments):
        await create(self, *arguments)
        shutil.copytree(tmp_path / "mirror", tmp_path / "at the loss")
        raise ServerRefused("the node is lost")

    with patch.object(service.kind, "create", lost), pytest.raises(Exception, match="lost"):
        first.run(documents(3))
    shutil.rmtree(tmp_path / "mirror")
    (tmp_path / "at the loss").rename(tmp_path / "mirror")
    second.accept_changes = True  # another output folder
    second.run(documents(3))
    assert_paid(tmp_path / "second", provider, batches=1)


def test_a_stop_leaves_batches_at_the_provider(tmp_path, log, provider):
    shown = provider._shown

    def stop(batch):
        provider._shown = shown
        os.kill(os.getpid(), signal.SIGINT)
        return shown(batch)

    provider._shown = stop
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, provider)
    assert "The same command collects" in "".join(log)
    assert "k requests in a row takes k passes" in "".join(log)
    assert not rows(tmp_path)
    run(tmp_path, provider)
    assert_paid(tmp_path, provider, batches=1)


class WithoutTwo(PipelineStep):
    name = "without two"
    type = "filter"

    def run(self, data, rank=0, world_size=1):
        for document in data:
            if document.text != "text 2":
                yield document


def test_each_pass_reads_the_pipeline_anew(tmp_path, provider):
    """A seeking reader and a filter."""
    lines = [orjson.dumps({"text": f"text {index}", "id": f"id {index}"}) for index in range(5)]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_bytes(b"\n".join(lines) + b"\n")

    step = runner(tmp_path, provider, two_in_a_row, config=BATCHES)
    read = WithoutTwo().run(JsonlReader(str(tmp_path / "in")).run(), 0, 1)
    step.run(read)
    assert [row["id"] for row in rows(tmp_path)] == ["id 0", "id 1", "id 3", "id 4"]
    assert len(provider.billed) == provider.billed.total() == 8


@pytest.mark.parametrize("no_wait", [False, True])
def test_each_command_reads_an_iterator_once(tmp_path, provider, no_wait):
    step = runner(tmp_path, provider, two_in_a_row, config=BATCHES)
    step.no_wait = no_wait
    for _ in range(2):
        with pytest.raises(WaitsForBatches):
            step.run(iter(documents(3)))
    step.run(one for one in documents(3))
    assert_paid(tmp_path, provider, batches=2)


def test_a_retry_of_a_bad_answer_is_a_request_of_the_next_batch(tmp_path, provider):
    answered = provider._answer

    def loops_at_first(payload, times):
        if "temperature" in payload or payload["messages"][0]["content"] == "text 0":
            return answered(payload, times)
        return "a word " * 90

    provider._answer = loops_at_first
    config = {**BATCHES, "on_loop": {"retry": 1, "temperature": 0.9, "then": "drop"}}
    run(tmp_path, provider, config=config)
    assert_paid(tmp_path, provider, batches=2)
    assert len(provider.billed) == 5
