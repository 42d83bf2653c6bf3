"""The answers of the fake hub, request by request."""

import asyncio
import base64
import json
from datetime import UTC, datetime, timedelta
from urllib.parse import parse_qs

from aiohttp import web

from tests.hub.state import File, folders, sha256, upload_mode


class Problem(Exception):
    """An answer that is an error. ``code`` is what the client sorts errors by."""

    def __init__(self, status, message, code="", headers=None):
        super().__init__(message)
        self.status, self.message = status, message
        self.headers = {
            "X-Error-Message": message,
            **({"X-Error-Code": code} if code else {}),
            **(headers or {}),
        }

    def response(self):
        return web.json_response({"error": self.message}, status=self.status, headers=self.headers)


def may_write(hub, name, access):
    """
    Raises:
        Problem: nobody, or with a token that may not write to NAMESPACE/NAME.
    """
    if access is None:
        raise Problem(401, "Invalid username or password.")
    mine = name.partition("/")[0] in (hub.user, *hub.orgs)
    if access.role == "read" or not mine:
        text = "Forbidden: you must use a write token to upload to a repository."
        raise Problem(
            403, text if access.role == "read" else "You don't have the rights to write here."
        )


class Answers:
    """One method for each kind of request; reads and changes the hub's repositories."""

    def __init__(self, hub):
        self._hub = hub

    async def answer(self, http, kind, repo, arguments, body, access):
        if kind == "other":
            raise Problem(404, "Not Found")
        if kind == "card-check":
            return web.json_response({"errors": [], "warnings": []})
        if kind == "create":
            return self._create(body, access)
        found = self._repo(repo, access, signed=kind == "lfs-upload")
        if "write" in arguments or kind in ("preupload", "lfs-batch", "lfs-verify", "commit"):
            may_write(self._hub, repo[1], access)
        if kind == "commit":
            return await self._commit(found, arguments, body)
        return getattr(self, "_" + kind.replace("-", "_"))(http, found, arguments, body)

    # Who, and which repository.

    def _repo(self, key, access, signed):
        repo = self._hub.repos.get(key)
        if repo is None or (repo.private and access is None and not signed):
            raise Problem(404 if access else 401, "Repository not found", "RepoNotFound")
        return repo

    def _revision(self, repo, revision, kind=""):
        commit = repo.find(revision)
        if commit is None:
            raise Problem(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        late = (
            self._hub.lag_commits
            if kind in self._hub.lag_kinds and revision not in repo.commits
            else 0
        )
        return commit.behind(late)

    def _create(self, body, access):
        asked = json.loads(body)
        kind = asked.get("type", "model")
        name = f"{asked.get('organization') or self._hub.user}/{asked['name']}"
        may_write(self._hub, name, access)
        url = f"{self._hub.url}/{'' if kind == 'model' else kind + 's/'}{name}"
        if (kind, name) in self._hub.repos:
            raise Problem(409, "You already created this repo")
        private = asked.get("visibility") == "private" or bool(asked.get("private"))
        self._hub.create_repo(name, kind, private)
        return web.json_response({"url": url, "name": name, "id": name})

    # What is in a repository.

    def _info(self, http, repo, arguments, body):
        commit = self._revision(repo, arguments.get("revision", "main"), "info")
        return web.json_response({"id": repo.name, "sha": commit.oid, "private": repo.private})

    def _auth_check(self, http, repo, arguments, body):
        return web.Response(text="OK")

    def _commits(self, http, repo, arguments, body):
        answer = [
            {"id": commit.oid, "title": commit.title, "date": date(commit.at)}
            for commit in self._revision(repo, arguments["revision"], "commits").history()
        ]
        return page(self._hub, http, answer, 50)

    def _tree(self, http, repo, arguments, body):
        commit = self._revision(repo, arguments["revision"], "tree")
        below = arguments.get("path", "").strip("/")
        prefix = f"{below}/" if below else ""
        entries = [_entry(file) for path, file in commit.tree.items() if path.startswith(prefix)]
        entries += [_folder(path) for path in folders(commit.tree) if path.startswith(prefix)]
        if below and not entries:
            raise Problem(
                404, f"{below} does not exist on {arguments['revision']}", "EntryNotFound"
            )
        return listing(self._hub, http, entries, prefix)

    def _paths_info(self, http, repo, arguments, body):
        commit = self._revision(repo, arguments["revision"], "paths-info")
        known = folders(commit.tree)
        answer = []
        for path in paths_of(http, body):
            if path in commit.tree:
                answer.append(_entry(commit.tree[path]))
            elif path.rstrip("/") in known:
                answer.append(_folder(path.rstrip("/")))
        return web.json_response(answer)

    def _resolve(self, http, repo, arguments, body):
        commit = self._revision(repo, arguments["revision"], "resolve")
        file = commit.tree.get(arguments["path"])
        if file is None:
            raise Problem(404, "Entry not found", "EntryNotFound", {"X-Repo-Commit": commit.oid})
        content = repo.blobs[file.sha256]
        etag = file.sha256 if file.lfs else file.oid
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit.oid}
        return content_of(http, content, headers)

    # Content comes in.

    def _preupload(self, http, repo, arguments, body):
        tree = self._revision(repo, arguments["revision"]).tree
        answer = []
        for file in json.loads(body)["files"]:
            mode = upload_mode(file["path"], file["size"], base64.b64decode(file["sample"]))
            there = tree.get(file["path"])
            oid = {} if there is None else {"oid": there.sha256 if there.lfs else there.oid}
            ignored = file["path"].endswith(repo.ignored)
            answer.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": ignored} | oid)
        return web.json_response({"files": answer, "shouldUseXet": False})

    def _lfs_batch(self, http, repo, arguments, body):
        objects = []
        base = f"{self._hub.url}/lfs/{repo.kind}/{repo.name}"
        for one in json.loads(body)["objects"]:
            known = {"oid": one["oid"], "size": one["size"]}
            if one["oid"] not in repo.blobs:
                known["actions"] = {"upload": {"href": f"{base}/{one['oid']}?signature=1"}}
                known["actions"]["verify"] = {"href": f"{base}/verify"}
            objects.append(known)
        answer = {"transfer": "basic", "objects": objects}
        return web.json_response(answer, content_type="application/vnd.git-lfs+json")

    def _lfs_upload(self, http, repo, arguments, body):
        repo.blobs[arguments["oid"]] = body
        repo.uploads.append(arguments["oid"])
        return web.Response(headers={"ETag": f'"{arguments["oid"]}"'})

    def _lfs_verify(self, http, repo, arguments, body):
        asked = json.loads(body)
        if len(repo.blobs.get(asked["oid"], b"")) != asked["size"]:
            raise Problem(404, "The object is not in the storage")
        return web.json_response({"success": True})

    async def _commit(self, repo, arguments, body):
        branch = arguments["revision"].removeprefix("refs/heads/")
        head = self._revision(repo, branch)
        if branch not in repo.branches:
            raise Problem(400, f"{branch} is no branch")
        lines = [json.loads(line) for line in body.splitlines() if line.strip()]
        header = lines[0]["value"]
        await asyncio.sleep(0)  # another one may be made meanwhile
        now = repo.branches[branch]
        if header.get("parentCommit") not in (None, now.oid) or now is not head:
            raise Problem(412, "A commit has happened since. Please refresh and try again.")
        added, deleted = _operations(repo, now.tree, lines[1:])
        made = repo.commit(branch, header["summary"], self._hub.clock.now(), added, deleted)
        url = f"{self._hub.url}/{'' if repo.kind == 'model' else repo.kind + 's/'}{repo.name}/commit/{made.oid}"
        return web.json_response({"success": True, "commitOid": made.oid, "commitUrl": url})


def content_of(http, content, headers):
    """Content, or the range of it that was asked for."""
    status, part = 200, content
    headers = headers | {"Accept-Ranges": "bytes"}
    asked = http.http_range
    if asked.start is not None or asked.stop is not None:
        start, stop, _ = asked.indices(len(content))
        if start >= stop:
            raise Problem(
                416, "Range not satisfiable", headers={"Content-Range": f"bytes */{len(content)}"}
            )
        status, part = 206, content[start:stop]
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
    return web.Response(
        body=part, status=status, headers=headers, content_type="application/octet-stream"
    )


def _operations(repo, tree, lines):
    """The files that a commit adds, and the paths that it deletes."""
    added = []
    deleted = []
    for line in lines:
        value = line["value"]
        path = value["path"]
        match line["key"]:
            case "file":
                content = base64.b64decode(value["content"])
                repo.blobs[sha256(content)] = content
                added.append(File.of(path, sha256(content), content, lfs=False))
            case "lfsFile":
                if value["oid"] not in repo.blobs:
                    raise Problem(
                        400, f"The content of {path} is not in the storage: upload it first"
                    )
                added.append(File.of(path, value["oid"], repo.blobs[value["oid"]], lfs=True))
            case "deletedFile":
                if path not in tree:
                    raise Problem(
                        404, f"A file with the name {path} does not exist", "EntryNotFound"
                    )
                deleted.append(path)
    return added, deleted


def page(hub, http, entries, size):
    """``size`` of the entries, and where the next ones are."""
    start = int(http.query.get("cursor", 0))
    headers = {}
    if start + size < len(entries):
        following = http.rel_url.update_query(cursor=str(start + size))
        headers["Link"] = f'<{hub.url}{following.raw_path_qs}>; rel="next"'
    return web.json_response(entries[start : start + size], headers=headers)


def listing(hub, http, entries, prefix):
    """The entries below a folder, or directly in it."""
    if not is_recursive(http):
        entries = [entry for entry in entries if "/" not in entry["path"][len(prefix) :]]
    return page(hub, http, sorted(entries, key=lambda entry: entry["path"]), 1000)


def is_recursive(http):
    return http.query.get("recursive", "false").lower() == "true"


def paths_of(http, body):
    if http.content_type == "application/json":
        paths = json.loads(body)["paths"]
        return [paths] if isinstance(paths, str) else paths
    return parse_qs(body.decode()).get("paths", [])


def _entry(file):
    entry = {"type": "file", "oid": file.oid, "size": file.size, "path": file.path}
    if file.lfs:
        entry["lfs"] = {"oid": file.sha256, "size": file.size, "pointerSize": 130}
    return entry


def _folder(path):
    return {"type": "directory", "oid": sha256(path.encode())[:40], "size": 0, "path": path}


def moment(seconds):
    """A time of the hub's clock, as a date."""
    return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)


def date(seconds):
    """A time of the hub's clock as the hub writes dates."""
    at = moment(seconds)
    return at.strftime("%Y-%m-%dT%H:%M:%S.") + f"{at.microsecond // 1000:03d}Z"
