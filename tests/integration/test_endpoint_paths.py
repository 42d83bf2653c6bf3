"""Endpoint URLs with a path: what a gateway serves there is found, as datatrove finds it and where
it does not.
"""

import asyncio

import pytest
from aiohttp import web

from datatrove_ckpt import InferenceConfig
from datatrove_ckpt.errors import ServerRefused
from datatrove_ckpt.inference.servers.host import ask_endpoints
from datatrove_ckpt.testing import FakeServer
from tests.jobs import run_job


class Gateway(FakeServer):
    """A server whose OpenAI API is at the path ``api`` only.

    Args:
        fails: the status of a response instead of an answer, None for none; gets the path.

    Attributes:
        requested: the paths of its requests, with their queries.
    """

    def __init__(self, api, lists_models=True, fails=lambda path: None):
        super().__init__()
        self.requested = []
        self._api = api
        self._lists_models = lists_models
        self._fails = fails

    def _route(self, router):
        router.add_route("*", "/{any:.*}", self._routed)

    async def _routed(self, request):
        self.requested.append(request.path_qs)
        if status := self._fails(request.path):
            return web.Response(status=status)
        if request.path == f"{self._api}/models" and self._lists_models:
            return await self._models(request)
        if request.path != f"{self._api}/chat/completions":
            raise web.HTTPNotFound
        return await self._answered(request.clone(rel_url="/v1/chat/completions"))


@pytest.mark.matrix(
    "api, given, lists_models",
    [
        ("/v1", "", True),
        ("/v1", "/v1", True),
        ("/api/openai/v3", "/api/openai/v3/", False),
        ("/api/openai", "/api/openai", True),
        ("/prefix/v1", "/prefix", True),  # what datatrove does at localhost
        ("/x/v1", "/x/v1/chat/completions", False),
        ("/deployments/m", "/deployments/m?api-version=2", False),
    ],
)
def test_an_endpoint_is_found_at_its_path(tmp_path, api, given, lists_models):
    with Gateway(api, lists_models) as server:
        url = server.url
        config = InferenceConfig("endpoint", "m", endpoint_url=url + given)
        run_job(tmp_path, config, 2)
        asked = [path for path in server.requested if "completions" in path]
        assert asked == [f"{api}/chat/completions" + given[given.find("?") :] * ("?" in given)] * 2
        (found,) = asyncio.run(ask_endpoints(config))
        assert found.url == f"{url}{api}/models"
        assert found.models == ({"fake": None} if lists_models else None)


def test_an_endpoint_of_which_it_is_not_known_where_its_api_is_gets_no_requests(tmp_path, log):
    with Gateway("/prefix/v1", fails=lambda path: 429 * path.startswith("/busy")) as server:
        urls = [f"{server.url}/busy", f"{server.url}/prefix"]
        config = InferenceConfig("endpoint", "m", endpoint_url=urls)
        run_job(tmp_path, config, 4)
    assert {path for path in server.requested if "completions" in path} == {
        "/prefix/v1/chat/completions"
    }
    assert any(
        "1 of 2 endpoints do not answer" in line and "/busy: HTTP 429" in line for line in log
    )


@pytest.mark.parametrize("key, says", [(None, "sends none: set api_key_env"), ("a key", "refuses")])
@pytest.mark.parametrize("refused", ["models", "completions"])
def test_a_server_that_wants_a_key_says_whether_one_was_sent(tmp_path, key, says, refused):
    with Gateway("/v1", fails=lambda path: 401 * path.endswith(refused)) as server:
        config = InferenceConfig("endpoint", "m", endpoint_url=server.url, api_key=key)
        with pytest.raises(ServerRefused, match=says):
            run_job(tmp_path, config, 2)


def test_https_where_the_server_speaks_http_ends_at_once_and_says_so(tmp_path, server):
    config = InferenceConfig("endpoint", "m", endpoint_url=server.url.replace("http", "https"))
    with pytest.raises(ServerRefused, match=r"/v1/models speaks http: correct its URL"):
        run_job(tmp_path, config, 2)
