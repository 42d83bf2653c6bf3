"""Stands for hf_xet's session: content goes to the fake hub in one PUT per file, under its SHA-256.

Buckets take content over Xet only, and hf_xet is a native client for a protocol of its own.
"""

import hashlib
import re
from pathlib import Path
from types import SimpleNamespace

_BUCKET = re.compile(r"(?P<url>.+)/api/buckets/(?P<bucket>[^/]+/[^/]+)/xet-write-token")


class XetSession:
    """What ``huggingface_hub.utils._xet.get_xet_session`` gives, as far as uploads use it.

    It asks for a token once: that of the fake hub does not expire.
    """

    def __init__(self):
        self._tokens = set()

    def new_upload_commit(self, token_refresh_url, token_refresh_headers, **others):
        return UploadCommit(token_refresh_url, token_refresh_headers, self._tokens)

    def sigint_abort(self):
        pass


class UploadCommit:
    """Uploads when it is left without an error, as hf_xet's does."""

    def __init__(self, token_url, headers, tokens):
        self._token_url, self._headers, self._tokens = token_url, headers, tokens
        self._content = []

    def start_upload_file(self, path, sha256=None):
        return self.start_upload_bytes(Path(path).read_bytes())

    def start_upload_bytes(self, content, sha256=None):
        self._content.append(content)
        info = SimpleNamespace(hash=hashlib.sha256(content).hexdigest(), file_size=len(content))
        return SimpleNamespace(result=lambda: SimpleNamespace(xet_info=info))

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if error is not None:
            return
        from huggingface_hub.utils import get_session, hf_raise_for_status

        known = self._token_url, self._headers["authorization"]
        if known not in self._tokens:
            hf_raise_for_status(get_session().get(self._token_url, headers=self._headers))
            self._tokens.add(known)
        found = _BUCKET.match(self._token_url)
        assert found is not None
        for content in self._content:
            url = f"{found['url']}/xet/{found['bucket']}/{hashlib.sha256(content).hexdigest()}"
            hf_raise_for_status(get_session().put(url, content=content))
