"""FakeHub: what the real huggingface_hub client asks for, answered from memory, with faults on
request.
"""

import asyncio
from dataclasses import dataclass
from email.utils import format_datetime

from aiohttp import web

from datatrove_ckpt.checkpoint.layout import OWNER
from datatrove_ckpt.testing import FakeServer
from tests.hub.api import Answers, Problem, moment
from tests.hub.buckets import Buckets
from tests.hub.faults import Clock, Fault
from tests.hub.routes import route
from tests.hub.state import ATTRIBUTES, File, Repo, sha256, upload_mode


@dataclass
class Request:
    """One request. ``at``: the hub's time."""

    path: str
    kind: str
    at: float
    token: str | None


@dataclass
class Access:
    """What a token may do."""

    role: str = "write"
    """read or write."""
    expired: bool = False


class FakeHub(FakeServer):
    """A hub at ``url``, in its own thread.

    Kinds of requests, for faults and counters: create, info, refs, tree, paths-info, commits,
    preupload, lfs-batch, lfs-upload, lfs-verify, commit, resolve, auth-check, other;
    of buckets also batch, xet-token, xet-upload; of Jobs (``jobs.py``) job-run, job-list,
    job-inspect, job-cancel.
    """

    token = "hf_FakeWriteTokenOfTheTests"
    read_token = "hf_FakeReadTokenOfTheTests"
    expired_token = "hf_FakeExpiredTokenOfTheTests"

    def __init__(self):
        super().__init__()
        self.clock = Clock()
        self.user, self.orgs = "someone", ("org",)
        """Who the tokens belong to, with the right to write to its own namespace and those of
        ``orgs``.
        """
        self.tokens = {
            self.token: Access(),
            self.read_token: Access("read"),
            self.expired_token: Access(expired=True),
        }
        self.repos = {}
        self.requests = []
        self.lag_commits = 0
        """How many commits behind are answers of the kinds in ``lag_kinds``, where they name a
        branch. Those of a bucket catch up, by one change with each look.
        """
        self.lag_kinds = {"tree", "paths-info"}
        self.jobs = None
        self._faults = []
        self._answers = Answers(self)
        self._buckets = Buckets(self)

    # What a test asks.

    def repo(self, name, kind="dataset"):
        return self.repos[kind, name]

    def files(self, name, revision="main", kind="dataset"):
        """Content by path, without ``.gitattributes`` and the record of a folder's owner."""
        repo = self.repo(name, kind)
        commit = repo.find(revision)
        assert commit is not None, f"{name} has no revision {revision}"
        listed = (path for path in sorted(commit.tree) if path != ATTRIBUTES and OWNER not in path)
        return {path: repo.blobs[commit.tree[path].sha256] for path in listed}

    def owners(self, name, kind="dataset"):
        """The records of the owners of folders."""
        commit = self.repo(name, kind).find("main")
        assert commit is not None
        return [path for path in commit.tree if OWNER in path]

    def commits(self, name, revision="main", kind="dataset"):
        """Commits after the initial one, the oldest first, without the note of a folder's owner."""
        commit = self.repo(name, kind).find(revision)
        assert commit is not None, f"{name} has no revision {revision}"
        return [
            one
            for one in list(commit.history())[-2::-1]
            if not any(OWNER in path for path in one.added)
        ]

    # What a test arranges.

    def create_repo(self, name, kind="dataset", private=False, branches=()):
        repo = self.repos[kind, name] = Repo(kind, name, private)
        for branch in branches:
            repo.branches[branch] = repo.branches["main"]
        return repo

    def put(self, name, files, revision="main", kind="dataset"):
        """A commit by somebody else, without HTTP. Makes the repository if it is not there."""
        repo = self.repos.get((kind, name)) or self.create_repo(name, kind)
        added = []
        for path, content in files.items():
            repo.blobs[sha256(content)] = content
            lfs = upload_mode(path, len(content), content[:512]) == "lfs"
            added.append(File.of(path, sha256(content), content, lfs))
        return repo.commit(revision, "by somebody else", self.clock.now(), added, [])

    def remove(self, name, paths, kind="dataset"):
        self.repo(name, kind).commit("main", "by somebody else", self.clock.now(), [], paths)

    def fail(self, kind, status=500, times=1, **how):
        """The next ``times`` requests of ``kind`` get ``status``. See ``Fault``."""
        fault = Fault(kind, status, times, **how)
        self._faults.append(fault)
        return fault

    # The server.

    def _route(self, router):
        router.add_route("*", "/{path:.*}", self._handle)

    async def _handle(self, http):
        body = await http.read()
        kind, repo, arguments = route(http.method, http.rel_url.raw_path)
        token = http.headers.get("Authorization", "").removeprefix("Bearer ") or None
        request = Request(http.path_qs, kind, self.clock.now(), token)
        self.requests.append(request)
        self.asked[kind] += 1
        try:
            response = await self._answered(http, request, repo, arguments, body)
        except Problem as problem:
            response = problem.response()
        if response is _DROP:
            if http.transport is not None:
                http.transport.close()
            return web.Response()
        response.headers["Date"] = format_datetime(moment(request.at), usegmt=True)
        return response

    async def _answered(self, http, request, repo, arguments, body):
        faulty = await self.fault(request.kind, after_effect=False)
        if faulty is not None:
            return faulty
        access = self._access(request)
        if request.kind == "whoami":
            return web.json_response(
                {"type": "user", "name": self.user, "orgs": [], "auth": {"type": "access_token"}}
            )
        if request.kind.startswith("job-"):
            assert self.jobs is not None, "this test has no Jobs"
            answer = self.jobs.answer(http, request.kind, arguments, body)
            return await self.fault(request.kind, after_effect=True) or answer
        if repo[0] == "bucket":
            response = self._buckets.answer(http, request.kind, repo[1], arguments, body, access)
        else:
            response = await self._answers.answer(http, request.kind, repo, arguments, body, access)
        return await self.fault(request.kind, after_effect=True) or response

    async def fault(self, kind, after_effect=False):
        """What a fault of the test answers instead."""
        for fault in self._faults:
            if not fault.take(kind, after_effect):
                continue
            await asyncio.sleep(fault.seconds)
            if fault.status is None:
                return _DROP
            text = fault.message or f"fault of the test: {fault.status} for {kind}"
            return Problem(fault.status, text, headers=fault.headers).response()
        return None

    def _access(self, request):
        # Whose URL is signed.
        if request.token is None or request.kind in ("lfs-upload", "xet-upload"):
            return None
        access = self.tokens.get(request.token)
        if access is None or access.expired:
            raise Problem(401, "Invalid credentials in Authorization header")
        return access


_DROP = web.Response()
"""Stands for no answer."""
