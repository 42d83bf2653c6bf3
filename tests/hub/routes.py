"""Which URL asks for what, with the methods and paths of the real hub."""

import re
from urllib.parse import unquote

_BUCKET = r"/api/(?P<type>bucket)s/(?P<repo>[^/]+/[^/]+)"
_REPO = r"/api/(?P<type>\w+)s/(?P<repo>[^/]+/[^/]+)"

_JOB = r"/api/jobs/(?P<namespace>[^/]+)"

_ROUTES = [
    (method, kind, re.compile(f"^{pattern}$"))
    for method, kind, pattern in (
        ("GET", "whoami", r"/api/whoami-v2"),
        ("POST", "card-check", r"/api/validate-yaml"),
        ("POST", "job-run", _JOB),
        ("GET", "job-list", _JOB),
        ("GET", "job-inspect", _JOB + r"/(?P<id>\w+)"),
        ("POST", "job-cancel", _JOB + r"/(?P<id>\w+)/cancel"),
        ("POST", "create", r"/api/repos/create"),
        (
            "GET",
            "auth-check",
            _REPO + r"/auth-check(?P<write>/write)?",
        ),
        ("POST", "create", _BUCKET),
        ("GET", "info", _BUCKET),
        ("GET", "tree", _BUCKET + r"/tree(?:/(?P<path>.*))?"),
        ("POST", "paths-info", _BUCKET + r"/paths-info"),
        ("POST", "batch", _BUCKET + r"/batch"),
        ("GET", "xet-token", _BUCKET + r"/xet-(?P<access>read|write)-token"),
        ("GET|HEAD", "resolve", r"/(?P<type>bucket)s/(?P<repo>[^/]+/[^/]+)/resolve/(?P<path>.+)"),
        ("PUT", "xet-upload", r"/xet/(?P<repo>[^/]+/[^/]+)/(?P<oid>\w+)"),
        (
            "GET",
            "tree",
            _REPO + r"/tree/(?P<revision>[^/]+)(?:/(?P<path>.*))?",
        ),
        (
            "POST",
            "paths-info",
            _REPO + r"/paths-info/(?P<revision>[^/]+)",
        ),
        (
            "GET",
            "commits",
            _REPO + r"/commits/(?P<revision>[^/]+)",
        ),
        (
            "POST",
            "preupload",
            _REPO + r"/preupload/(?P<revision>[^/]+)",
        ),
        ("POST", "commit", _REPO + r"/commit/(?P<revision>[^/]+)"),
        (
            "GET",
            "info",
            _REPO + r"(?:/revision/(?P<revision>[^/]+))?",
        ),
        (
            "POST",
            "lfs-batch",
            r"(?:/(?P<type>dataset|space)s)?/(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch",
        ),
        ("PUT", "lfs-upload", r"/lfs/(?P<type>\w+)/(?P<repo>[^/]+/[^/]+)/(?P<oid>\w+)"),
        ("POST", "lfs-verify", r"/lfs/(?P<type>\w+)/(?P<repo>[^/]+/[^/]+)/verify"),
        (
            "GET|HEAD",
            "resolve",
            r"(?:/(?P<type>dataset|space)s)?/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)",
        ),
    )
]


def route(method, raw_path):
    """The request's kind, its repository, and the parts of its path."""
    for methods, kind, pattern in _ROUTES:
        found = pattern.match(raw_path) if method in methods.split("|") else None
        if found is not None:
            parts = {
                name: unquote(value)
                for name, value in found.groupdict().items()
                if value is not None
            }
            default = "bucket" if kind == "xet-upload" else "model"
            return kind, (parts.pop("type", default), parts.pop("repo", "")), parts
    return "other", ("", ""), {}
