"""FakeProvider: the files and batches of OpenAI's API, in a thread, with a bill.

It bills each answer once it is made: a batch that is created twice is paid for twice.
"""

import copy
import itertools
import time
from collections import Counter
from datetime import UTC, datetime

import orjson
from aiohttp import web

from datatrove_ckpt.testing import FakeServer

KEY = "sk-ant-of-a-test"
FAILED = {"status_code": 500, "body": {"error": {"message": "broken"}}}


class FakeProvider(FakeServer):
    """Also answers single requests, which ``asked`` counts, as those of a ``FakeServer``.

    Attributes:
        billed: answers by custom id, without the number of the attempt.
        list_lag: seconds for which a new batch is missing in the list.
        steps: how often a batch is looked at before it ends.
        lose: of each path ("/v1/batches"): how many answers are not sent, after the effect.
        lost: the status that is sent in their place.
        outcome: returns how a request ends: None: with an answer; "expired"; or a response.
        status: of batches that have ended.
        hidden: of the answers: "file", "id" (of the file), "half", or "end" (of the last line).
        reads: of files of answers.
        prefix: of each custom id in the answers.
        refuse: returns the errors of a batch that fails as a whole.
        unseen: how often a file that was uploaded is not found.
        forgotten: ids of batches that it does not know any more.
        ignores_after: of its list.
        write: returns the bytes of a file of answers as they are sent.
        describe: returns a batch as it is sent.
    """

    after = "after"

    def __init__(self):
        super().__init__()
        self.billed = Counter()
        self.list_lag = 0.0
        self.steps = 1
        self.lose = Counter()
        self.lost = 502
        self.outcome = lambda request: None
        self.status = "completed"
        self.hidden = ""
        self.reads = 0
        self.prefix = b""
        self.refuse = lambda batch: []
        self.unseen = 0
        self.forgotten = set()
        self.ignores_after = False
        self.write = lambda content: content
        self.describe = lambda batch: batch
        self.files = {}
        self.batches = {}
        self.effects = []
        self._numbers = itertools.count(1)
        self._looks = Counter()
        self._listed = {}

    def _route(self, router):
        router.add_post("/v1/files", self._upload)
        router.add_delete("/v1/files/{id}", self._delete)
        router.add_get("/v1/files/{id}/content", self._content)
        self._route_batches(router, "/v1/batches")
        super()._route(router)

    def _route_batches(self, router, path):
        router.add_post(path, self._create)
        router.add_get(path, self._list)
        router.add_get(f"{path}/{{id}}", self._retrieve)
        router.add_post(f"{path}/{{id}}/cancel", self._cancel)

    def _reply(self, request, content):
        if self.lose[request.path] > 0:
            self.lose[request.path] -= 1
            return web.json_response({"error": "lost"}, status=self.lost)
        return web.json_response(content)

    async def _upload(self, request):
        form = await request.post()
        name = f"file-{next(self._numbers)}"
        self.files[name] = form["file"].file.read()
        self.effects.append("upload")
        return self._reply(request, {"id": name, "object": "file"})

    async def _delete(self, request):
        name = request.match_info["id"]
        if self.files.pop(name, None) is None:
            return web.json_response({"error": "gone"}, status=404)
        return self._reply(request, {"id": name, "deleted": True})

    async def _content(self, request):
        name = request.match_info["id"]
        hidden = "" if name.startswith("err") else self.hidden
        self.reads += 1
        if name not in self.files or hidden == "file":
            return web.json_response({"error": "gone"}, status=404)
        content = self.files[name].replace(b'"custom_id":"', b'"custom_id":"%s' % self.prefix)
        lines = content.splitlines(keepends=True)
        parts = {
            "": content,
            "id": b"",
            "half": b"".join(lines[: len(lines) // 2]),
            "end": content[:-9],
        }
        return web.Response(body=self.write(parts[hidden]))

    async def _create(self, request):
        asked = await request.json()
        self.unseen -= 1
        if self.unseen >= 0 or asked["input_file_id"] not in self.files:
            return web.json_response({"error": "no such file"}, status=400)
        name = f"batch_{next(self._numbers)}"
        self.effects.append("create")
        batch = {
            "id": name,
            "object": "batch",
            "status": "in_progress",
            "created_at": int(time.time()),
            **asked,
        }
        self.batches[name] = batch
        self._listed[name] = time.monotonic() + self.list_lag
        errors = self.refuse(batch)
        if errors:
            batch |= {"status": "failed", "errors": errors}
        else:
            batch |= self._run(self.files[asked["input_file_id"]])
        return self._reply(request, self.describe(batch))

    def _run(self, content):
        """Makes the files of answers and errors. Their order is that of no input.

        A request whose ``outcome`` is "lost" has no line.
        """
        answers = []
        errors = []
        for line in reversed(content.splitlines()):
            asked = orjson.loads(line)
            outcome = self.outcome(asked)
            number = len(answers) + len(errors)
            if outcome == "lost":
                continue
            if outcome == "expired":
                error = {"code": "batch_expired", "message": "too late"}
                errors.append({"custom_id": asked["custom_id"], "response": None, "error": error})
                continue
            if outcome is not None:
                errors.append({"custom_id": asked["custom_id"], "response": outcome})
                continue
            self.billed[asked["custom_id"].rpartition("-")[0]] += 1
            question = asked["body"]["messages"][-1]["content"]
            message = {"role": "assistant", "content": self._answer(asked["body"], 0)}
            choice = {"index": 0, "finish_reason": "stop", "message": message}
            usage = {"prompt_tokens": len(question.split()), "completion_tokens": 2}
            body = {"id": "fake", "choices": [choice], "usage": usage}
            answer = {"status_code": 200, "request_id": f"r{number}", "body": body}
            answers.append({"custom_id": asked["custom_id"], "response": answer, "error": None})
        counts = {"completed": len(answers), "failed": len(errors)}
        made = {"request_counts": counts}
        number = next(self._numbers)
        for kind, lines in (("output", answers), ("error", errors)):
            if lines:
                name = f"{kind[:3]}-{number}"
                self.files[name] = b"".join(orjson.dumps(line) + b"\n" for line in lines)
                made[f"{kind}_file_id"] = name
        return made

    def _shown(self, batch):
        if batch["status"] == "in_progress" and self._looks[batch["id"]] >= self.steps:
            batch["status"] = self.status
        self._looks[batch["id"]] += 1
        if batch["status"] == "in_progress":
            batch = {**batch, "request_counts": {"completed": 0, "failed": 0}}
        if batch["status"] == "in_progress" or self.hidden == "id":
            batch = {**batch, "output_file_id": None}
        return self.describe(batch)

    async def _list(self, request):
        now = time.monotonic()
        names = [name for name in reversed(self.batches) if self._listed[name] <= now]
        after = request.query.get(self.after)
        if after and not self.ignores_after:
            names = names[names.index(after) + 1 :]
        page = names[: int(request.query["limit"])]
        listed = [self._shown(self.batches[name]) for name in page]
        content = {"data": listed, "has_more": page != names}
        return self._reply(request, content)

    async def _retrieve(self, request):
        batch = self._known(request)
        return self._reply(request, self._shown(batch))

    def _known(self, request):
        name = request.match_info["id"]
        if name in self.forgotten or name not in self.batches:
            raise web.HTTPNotFound(text="no such batch")
        return self.batches[name]

    async def _cancel(self, request):
        batch = self._known(request)
        batch["status"] = "cancelled"
        return self._reply(request, batch)

    def state(self):
        """What the provider knows: for tests that go back to an earlier moment."""
        return copy.deepcopy((self.billed, self.files, self.batches, self._looks))

    def restore(self, state):
        self.billed, self.files, self.batches, self._looks = copy.deepcopy(state)
        self._listed = {name: time.monotonic() + self.list_lag for name in self.batches}


class FakeMessages(FakeProvider):
    """The batches of Anthropic's API, whose key it wants."""

    after = "after_id"

    def _route(self, router):
        self.paths["/v1/messages"] = self._message
        router.add_get("/v1/messages/batches/{id}/results", self._content)
        self._route_batches(router, "/v1/messages/batches")
        FakeServer._route(self, router)

    async def _answered(self, request):
        if request.headers.get("x-api-key") != KEY or "Authorization" in request.headers:
            return web.json_response({"error": "no key"}, status=401)
        return await super()._answered(request)

    def _message(self, payload):
        content = [{"type": "text", "text": self._answer(payload, 0)}]
        usage = {"input_tokens": 3, "output_tokens": 2}
        return {"id": "msg", "type": "message", "content": content, "usage": usage}

    async def _create(self, request):
        if request.headers.get("x-api-key") != KEY or "anthropic-version" not in request.headers:
            return web.json_response({"error": "no key"}, status=401)
        name = f"msgbatch_{next(self._numbers)}"
        self.effects.append("create")
        requests = (await request.json())["requests"]
        self.files[name] = b"".join(map(self._result, reversed(requests)))
        self.batches[name] = {
            "id": name,
            "processing_status": "in_progress",
            "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z"),
            "request_counts": {"processing": len(requests), "succeeded": 0},
            "status": "in_progress",
        }
        self._listed[name] = time.monotonic() + self.list_lag
        return self._reply(request, self.batches[name])

    def _result(self, asked):
        """``outcome``: the type of a result, or the type of an error; or "lost": no line."""
        outcome = self.outcome(asked)
        if outcome == "lost":
            return b""
        result = {"type": outcome}
        if outcome is None:
            tag, _, rest = asked["custom_id"].partition("-")
            assert len(tag) == 6
            self.billed[rest.rpartition("-")[0]] += 1
            result = {"type": "succeeded", "message": self._message(asked["params"])}
        elif outcome.endswith("_error"):
            error = {"type": outcome, "message": "in the words of the provider"}
            result = {"type": "errored", "error": {"type": "error", "error": error}}
        return orjson.dumps({"custom_id": asked["custom_id"], "result": result}) + b"\n"

    def _shown(self, batch):
        super()._shown(batch)
        if batch["status"] != "in_progress":
            batch["processing_status"] = "ended"
            results = map(orjson.loads, self.files[batch["id"]].splitlines())
            kinds = Counter(result["result"]["type"] for result in results)
            batch["request_counts"] = {"processing": 0, **kinds}
        return batch
