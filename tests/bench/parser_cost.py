"""CPU time to parse one HTTP response, in microseconds: median and minimum of 21 rounds.

    python -m tests.bench.parser_cost

The response is that of vLLM to a chat request: 0.8 kB, of which 0.7 kB are JSON.
"""

from __future__ import annotations

import json
import statistics
import time
import timeit
from functools import partial
from typing import Any

from datatrove_ckpt.inference.client.http1 import ResponseParser

_ROUNDS, _RESPONSES = 21, 2000

_MESSAGE = {"role": "assistant", "content": "An answer. " * 20, "refusal": None, "tool_calls": [], "reasoning": None}
_BODY = json.dumps(
    {
        "id": "chatcmpl-6f3c0d0b4d5e4b0f9f2f8a1c7d9e0b1a",
        "object": "chat.completion",
        "created": 1_760_000_000,
        "model": "mock",
        "choices": [{"index": 0, "message": _MESSAGE, "logprobs": None, "finish_reason": "stop", "stop_reason": None}],
        "usage": {"prompt_tokens": 500, "total_tokens": 560, "completion_tokens": 60, "prompt_tokens_details": None},
        "prompt_logprobs": None,
    }
).encode()
_HEAD = b"HTTP/1.1 200 OK\r\ndate: Fri, 31 Dec 1999 23:59:59 GMT\r\nserver: uvicorn\r\ncontent-type: text/json\r\n"
_WHOLE = _HEAD + b"content-length: %d\r\n\r\n%s" % (len(_BODY), _BODY)
_CHUNKED = _HEAD + b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(_BODY), _BODY)
_LONG = _HEAD + b"content-length: %d\r\n\r\n%s" % (256 * len(_BODY), 256 * _BODY)
_CASES = {
    "whole": [_WHOLE],
    "head and body apart": [_WHOLE[: -len(_BODY)], _BODY],
    "chunked": [_CHUNKED],
    f"{len(_LONG) >> 10} kB in pieces of 64 kB": [_LONG[i : i + (1 << 16)] for i in range(0, len(_LONG), 1 << 16)],
}


def parse(pieces: list[bytes]) -> Any:
    parser = ResponseParser()
    for piece in pieces:
        complete = parser.feed(piece)
    assert complete
    return parser.response()


def main() -> None:
    print("| response | median us | minimum us |")
    print("|---|---|---|")
    for name, pieces in _CASES.items():
        timer = timeit.Timer(partial(parse, pieces), timer=time.process_time)
        us = [seconds / _RESPONSES * 1e6 for seconds in timer.repeat(_ROUNDS, _RESPONSES)]
        print(f"| {name} | {statistics.median(us):.1f} | {min(us):.1f} |", flush=True)


if __name__ == "__main__":
    main()
