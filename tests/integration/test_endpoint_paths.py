"""Endpoint URLs with a path: what a gateway serves there is found, as datatrove finds it and where
it does not.
"""

import asyncio
import threading
from contextlib import contextmanager

import pytest
from aiohttp import web

from datatrove_ckpt import InferenceConfig, InferenceRunner
from datatrove_ckpt.errors import ServerRefused
from datatrove_ckpt.inference.servers.endpoints import ExternalServers
from tests.jobs import ask, documents, writer


@contextmanager
def gateway(api, lists_models=True, fails=lambda number, path: 0):
    """A server whose OpenAI API is at the path ``api`` only: its URL, and the paths of its
    requests.

    Args:
        fails: the status of a response instead of an answer, 0 for none; gets its number and its path.
    """
    loop, ready, paths, port = asyncio.new_event_loop(), threading.Event(), [], []

    async def answer(request):
        paths.append(request.path_qs)
        if status := fails(len(paths), request.path):
            return web.Response(status=status)
        if request.path == f"{api}/models" and lists_models:
            return web.json_response({"data": [{"id": "m"}]})
        if request.path != f"{api}/chat/completions":
            raise web.HTTPNotFound
        choice = {"message": {"content": "yes"}, "finish_reason": "stop"}
        return web.json_response({"choices": [choice], "usage": {}})

    async def start():
        app = web.Application()
        app.router.add_route("*", "/{any:.*}", answer)
        serving = web.AppRunner(app, access_log=None, shutdown_timeout=0)
        await serving.setup()
        await web.TCPSite(serving, "127.0.0.1", 0).start()
        port.append(serving.addresses[0][1])
        return serving

    def serve():
        serving = loop.run_until_complete(start())
        ready.set()
        loop.run_forever()
        loop.run_until_complete(serving.cleanup())
        loop.close()

    thread = threading.Thread(target=serve)
    thread.start()
    ready.wait()
    try:
        yield f"http://127.0.0.1:{port[0]}", paths
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


@pytest.mark.matrix
@pytest.mark.parametrize(
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
    with gateway(api, lists_models) as (url, paths):
        config = InferenceConfig("endpoint", "m", endpoint_url=url + given)
        InferenceRunner(ask, config, writer(tmp_path)).run(documents(2))
        asked = [path for path in paths if "completions" in path]
        assert asked == [f"{api}/chat/completions" + given[given.find("?") :] * ("?" in given)] * 2
        (found,) = asyncio.run(ExternalServers(config).ask())
        assert found.url == f"{url}{api}/models"
        assert found.models == ({"m": None} if lists_models else None)


def test_an_endpoint_of_which_it_is_not_known_where_its_api_is_gets_no_requests(tmp_path, log):
    def fails(number, path):
        return 429 if path.startswith("/busy") else 0

    with gateway("/prefix/v1", fails=fails) as (url, paths):
        config = InferenceConfig("endpoint", "m", endpoint_url=[f"{url}/busy", f"{url}/prefix"])
        InferenceRunner(ask, config, writer(tmp_path)).run(documents(4))
    assert {path for path in paths if "completions" in path} == {"/prefix/v1/chat/completions"}
    assert any(
        "1 of 2 endpoints do not answer" in line and "/busy: HTTP 429" in line for line in log
    )


@pytest.mark.parametrize("key, says", [(None, "sends none: set api_key_env"), ("a key", "refuses")])
@pytest.mark.parametrize("refused", ["models", "completions"])
def test_a_server_that_wants_a_key_says_whether_one_was_sent(tmp_path, key, says, refused):
    def fails(number, path):
        return 401 if path.endswith(refused) else 0

    with gateway("/v1", fails=fails) as (url, _):
        config = InferenceConfig("endpoint", "m", endpoint_url=url, api_key=key)
        with pytest.raises(ServerRefused, match=says):
            InferenceRunner(ask, config, writer(tmp_path)).run(documents(2))


def test_https_where_the_server_speaks_http_ends_at_once_and_says_so(tmp_path):
    with gateway("/v1") as (url, _):
        config = InferenceConfig("endpoint", "m", endpoint_url=url.replace("http", "https"))
        with pytest.raises(ServerRefused, match=r"/v1/models speaks http: correct its URL"):
            InferenceRunner(ask, config, writer(tmp_path)).run(documents(2))
