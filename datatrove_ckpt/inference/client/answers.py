"""What a server's answer says: completions parsed as datatrove parses them, and Retry-After.

Whatever is not a finished completion raises ``TryAgain``: a server that dies answers 200 with half a text.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

import orjson

_NOT_AN_ENDING = (None, "abort", "error")
_BUSY = (502, 503, 504, 529)
_MAX_RETRY_AFTER = 120.0


@dataclass(slots=True)
class Completion:
    """One answer. ``reasoning`` is empty when the server does not separate it from the text."""

    text: str
    finish_reason: str
    usage: dict[str, Any]
    reasoning: str = ""


class TryAgain(Exception):
    """An attempt failed in a way that another one may not.

    Attributes:
        retry_after: seconds the server asks us to wait.
        unreachable: the failure says something about the server, not about the request.
        status: the HTTP status, 0 if none came.
    """

    def __init__(self, cause: str, retry_after: float = 0.0, *, unreachable: bool = False, status: int = 0) -> None:
        super().__init__(cause)
        self.retry_after = retry_after
        self.unreachable = unreachable
        self.status = status

    @property
    def is_sound(self) -> bool:
        """The server is well, and only asks for patience."""
        return 400 <= self.status < 500

    @property
    def is_busy(self) -> bool:
        """The server says that it has too much to do, or is not ready."""
        return self.status in _BUSY


def parse_chat(raw: bytes) -> Completion:
    """An answer of /v1/chat/completions.

    Raises:
        TryAgain: it is no finished completion.
    """
    choice, usage = _first_choice(raw)
    message = choice.get("message")
    if not isinstance(message, dict):
        raise TryAgain("the answer's choice has no message")
    reasoning = message.get("reasoning") or message.get("reasoning_content") or ""
    return _completion(message.get("content") or "", choice, usage, reasoning)


def parse_completion(raw: bytes) -> Completion:
    """An answer of /v1/completions.

    Raises:
        TryAgain: it is no finished completion.
    """
    choice, usage = _first_choice(raw)
    if "text" not in choice:
        raise TryAgain("the answer's choice has no text")
    return _completion(choice["text"] or "", choice, usage, "")


def _completion(text: Any, choice: dict[str, Any], usage: dict[str, Any], reasoning: Any) -> Completion:
    finish_reason = choice.get("finish_reason")
    if finish_reason in _NOT_AN_ENDING:
        raise TryAgain(f"the answer did not end (finish_reason {finish_reason!r})")
    if not (isinstance(text, str) and isinstance(finish_reason, str) and isinstance(reasoning, str)):
        raise TryAgain("the answer's text, reasoning or finish_reason is not a string")
    return Completion(text, finish_reason, usage, reasoning)


def _first_choice(raw: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """The answer's first choice and its token counts."""
    try:
        answer = orjson.loads(raw)
    except orjson.JSONDecodeError:
        raise TryAgain(f"the answer is not JSON: {raw[:200].decode(errors='replace')!r}") from None
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise TryAgain("the answer has no choices")
    usage = answer.get("usage")
    return choices[0], usage if isinstance(usage, dict) else {}


def parse_retry_after(value: str) -> float:
    """Seconds the server asks us to wait; 0 when it does not say, or says what nobody understands."""
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return 0.0
    return min(max(seconds, 0.0), _MAX_RETRY_AFTER) if seconds == seconds else 0.0  # NaN is not equal to itself
