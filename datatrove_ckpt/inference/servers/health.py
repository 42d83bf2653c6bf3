"""Health probes: what a server's HTTP addresses say about it."""

from __future__ import annotations

from datatrove_ckpt.errors import TooManyOpenFiles
from datatrove_ckpt.inference.client.transport import ExchangeFailed, get
from datatrove_ckpt.inference.client.urls import HiddenUrl
from datatrove_ckpt.redaction import HiddenDict

NO_ANSWER = "does not answer"


async def answers(url: str, headers: HiddenDict, seconds: float) -> bool:
    """Whether the URL answers 200 within ``seconds``."""
    try:
        return (await get(HiddenUrl(url), headers, seconds)).status == 200
    except ExchangeFailed:
        return False


async def request_health(url: str, headers: HiddenDict, server_type: str, seconds: float) -> str | None:
    """None if the server at this base URL reports itself healthy, else what is wrong."""
    # A custom server need not have /health. It has /v1/models, otherwise it would not have become ready.
    path = "v1/models" if server_type == "custom" else "health"
    try:
        status = (await get(HiddenUrl(f"{url}/{path}"), headers, seconds)).status
    except ExchangeFailed as error:
        return NO_ANSWER if error.kind == "TimeoutError" else f"gives {error.kind}"
    except TooManyOpenFiles:
        return None  # says nothing about the server
    return f"answers HTTP {status}" if status >= 500 else None
