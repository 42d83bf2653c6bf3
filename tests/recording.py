"""A server that keeps requests as they came."""

import orjson
import pytest
from aiohttp import web

from datatrove_ckpt.testing import FakeServer


class Recording(FakeServer):
    """Keeps path, headers and body of each request, and quotes them in its errors.

    ``said``: in place of an error. ``answers_probes``: answers a request with one word.
    """

    status = 200
    said = b""
    answers_probes = False

    def __init__(self):
        super().__init__()
        self.requests = []

    async def _answered(self, request):
        body = await request.read()
        self.requests.append((str(request.rel_url), request.headers, body))
        if self.status == 200 or (self.answers_probes and b'"JSON"' in body):
            return await super()._answered(request)
        if self.status == 0:
            request.transport.write(b"HTTP/1.1 no status\r\n\r\n")
            request.transport.close()
        error = {"error": f"{request.rel_url} {dict(request.headers)}"}
        return web.Response(body=self.said or orjson.dumps(error), status=self.status or 500)


@pytest.fixture
def recording():
    with Recording() as server:
        yield server
