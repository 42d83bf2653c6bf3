"""Health probes: what a server's HTTP addresses say about it."""

from __future__ import annotations

import aiohttp

from datatrove_ckpt.redaction import HiddenDict, frames_cut

NO_ANSWER = "does not answer"


async def answers(session: aiohttp.ClientSession, url: str, headers: HiddenDict) -> bool:
    """Whether the URL answers 200 within the session's timeout."""
    try:
        with frames_cut():
            async with session.get(url, headers=headers, allow_redirects=False) as response:
                return response.status == 200
    except (aiohttp.ClientError, OSError, TimeoutError):
        return False


async def request_health(
    session: aiohttp.ClientSession, url: str, headers: HiddenDict, server_type: str, seconds: float
) -> str | None:
    """None if the server at this base URL reports itself healthy, else what is wrong."""
    # A custom server need not have /health. It has /v1/models, otherwise it would not have become ready.
    path = "v1/models" if server_type == "custom" else "health"
    try:
        timeout = aiohttp.ClientTimeout(total=seconds)
        with frames_cut():
            async with session.get(f"{url}/{path}", headers=headers, timeout=timeout) as response:
                return f"answers HTTP {response.status}" if response.status >= 500 else None
    except TimeoutError:
        return NO_ANSWER
    except (aiohttp.ClientError, OSError) as error:
        return f"gives {type(error).__name__}"
