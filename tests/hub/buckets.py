"""Buckets: folders of files without commits.

Each batch of changes is kept as a commit here, which no request shows.
"""

import json
from collections import Counter

from aiohttp import web

from tests.hub.api import (
    Problem,
    content_of,
    date,
    is_recursive,
    listing,
    may_write,
    paths_of,
)
from tests.hub.state import ATTRIBUTES, File, folders


class Buckets:
    """One method for each kind of request."""

    def __init__(self, hub):
        self._hub = hub
        self._looks = Counter[str]()
        """How many listings each state was asked for."""

    def answer(self, http, kind, name, arguments, body, access):
        writes = kind in ("create", "batch") or arguments.get("access") == "write"
        if writes:
            may_write(self._hub, name, access)
        if kind == "create":
            return self._create(name, body)
        bucket = self._hub.repos.get(("bucket", name))
        if bucket is None or (bucket.private and access is None and kind != "xet-upload"):
            raise Problem(404 if access else 401, "Bucket not found", "RepoNotFound")
        return getattr(self, "_" + kind.replace("-", "_"))(http, bucket, arguments, body)

    def _create(self, name, body):
        url = f"{self._hub.url}/buckets/{name}"
        if ("bucket", name) in self._hub.repos:
            message = "You already created this bucket"
            answer = {"error": message, "url": url}  # which the client reads
            return web.json_response(answer, status=409, headers={"X-Error-Message": message})
        private = (json.loads(body) if body else {}).get("visibility") == "private"
        self._hub.create_repo(name, "bucket", private)
        return web.json_response({"url": url})

    def _info(self, http, bucket, arguments, body):
        files = _files(bucket.branches["main"])
        size = sum(file.size for file in files.values())
        answer = {"id": bucket.name, "private": bucket.private, "createdAt": date(0.0)}
        return web.json_response(answer | {"size": size, "totalFiles": len(files)})

    def _tree(self, http, bucket, arguments, body):
        files = self._listed(bucket, "tree")
        below = arguments.get("path", "").strip("/")
        prefix = f"{below}/" if below else ""
        start = below  # no folders, and a prefix is no path
        entries = []
        if not is_recursive(http):
            start = prefix
            below_it = [path for path in folders(files) if path.startswith(prefix)]
            entries = [{"type": "directory", "path": path} for path in below_it]
        entries += [
            _entry(file) for path, file in files.items() if path == below or path.startswith(start)
        ]
        return listing(self._hub, http, entries, prefix)

    def _paths_info(self, http, bucket, arguments, body):
        files = self._listed(bucket, "paths-info")
        return web.json_response(
            [_entry(files[path]) for path in paths_of(http, body) if path in files]
        )

    def _resolve(self, http, bucket, arguments, body):
        file = _files(bucket.branches["main"]).get(arguments["path"])
        if file is None:
            raise Problem(404, "Entry not found", "EntryNotFound")
        return content_of(http, bucket.blobs[file.sha256], {"ETag": f'"{file.sha256}"'})

    def _listed(self, bucket, kind):
        """What listings show: at first a state some changes ago, then newer ones.

        Downloads show what is there.
        """
        now = bucket.branches["main"]
        self._looks[now.oid] += 1
        late = (
            self._hub.lag_commits + 1 - self._looks[now.oid] if kind in self._hub.lag_kinds else 0
        )
        return _files(now.behind(max(late, 0)))

    def _xet_token(self, http, bucket, arguments, body):
        return web.json_response(
            {"accessToken": "xet", "exp": 4102444800, "casUrl": f"{self._hub.url}/xet"}
        )

    def _xet_upload(self, http, bucket, arguments, body):
        bucket.blobs[arguments["oid"]] = body
        bucket.uploads.append(arguments["oid"])
        return web.Response()

    def _batch(self, http, bucket, arguments, body):
        added, deleted = [], []
        for line in body.splitlines():
            change = json.loads(line)
            path = change["path"]
            if change["type"] == "deleteFile":
                deleted.append(path)
            else:
                sha = change["xetHash"]
                added.append(File.of(path, sha, bucket.blobs[sha], lfs=True))
        bucket.commit("main", "batch", self._hub.clock.now(), added, deleted)
        return web.json_response({"failed": []})


def _files(state):
    return {path: file for path, file in state.tree.items() if path != ATTRIBUTES}


def _entry(file):
    entry = {"type": "file", "path": file.path, "size": file.size, "xetHash": file.sha256}
    return entry | {"mtime": date(0.0), "uploadedAt": date(0.0)}
