"""Replaces vLLM on two nodes, as a program named vllm. The head node's part answers only while the
other part is connected, and hangs when that connection is lost. Answers come from the counting
server that COUNTING_SERVER names.
"""

import asyncio
import os
import socket
import sys
import time
from pathlib import Path

import aiohttp
from aiohttp import web


def value(name):
    return sys.argv[sys.argv.index(name) + 1]


def install(folder):
    """Put the program into a folder for PATH."""
    folder.mkdir()
    program = folder / "vllm"
    program.write_text(f"#!{sys.executable}\n{Path(__file__).read_text()}")
    program.chmod(0o755)


def serve_headless(master):
    while True:
        try:
            line = socket.create_connection(master)
            break
        except OSError:
            time.sleep(0.02)
    line.recv(1)


def serve(master, port):
    with socket.create_server(master) as listener:
        line = listener.accept()[0]
    line.setblocking(False)

    async def complete(request):
        try:
            line.recv(1)
            await asyncio.sleep(600)
        except BlockingIOError:
            pass
        url = f"{os.environ['COUNTING_SERVER']}{request.path}"
        async with (
            aiohttp.ClientSession() as session,
            session.post(url, data=await request.read()) as answer,
        ):
            return web.Response(
                body=await answer.read(), status=answer.status, content_type="application/json"
            )

    async def well(request):
        return web.json_response({})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    for path in ("/health", "/v1/models"):
        app.router.add_get(path, well)
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None, shutdown_timeout=0)


if __name__ == "__main__":
    address = value("--master-addr"), int(value("--master-port"))
    if "--headless" in sys.argv:
        serve_headless(address)
    else:
        serve(address, int(value("--port")))
