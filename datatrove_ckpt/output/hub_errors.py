"""What a failed call to the hub means, and when to make it again.

    failure                             reaction
    429                                 wait as long as the hub advises (Retry-After, RateLimit, its text), also an hour
    412, 409                            another process committed meanwhile: again, with jitter
    5xx, reset, timeout, no answer      again, with backoff; a commit may have happened nevertheless
    401, 403, 404, 400 and the like     the rank stops: no retry can help

Generation goes on while a call waits. Waiting that the hub did not ask for ends after ``PATIENCE_SECONDS``.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from datatrove_ckpt.backoff import backoff_seconds
from datatrove_ckpt.errors import OutputFailed
from datatrove_ckpt.formatting import duration, error_text
from datatrove_ckpt.remote_errors import FileSystemFailed, http_status, is_permanent, response_headers, response_url

PATIENCE_SECONDS = 3600.0
"""How long calls may fail in a row, besides the time that the hub asked to wait."""

LOOK_PATIENCE_SECONDS = 300.0
"""The same for look-ups before and after generation, when nothing else goes on."""

LONGEST_ADVICE_SECONDS = 6 * 3600.0
_FIRST_SECONDS = 1.0
_LONGEST_SECONDS = 60.0
_LIMITED_SECONDS = 60.0  # after a 429 without advice, at first
_LIMITED_LONGEST_SECONDS = 900.0
_STORAGE_ATTEMPTS = 5
_SPREAD = 0.1  # ranks that were told the same moment must not return together

_LIMITED = 429
_CONTENTION = (409, 412)
_FINAL = (400, 410, 413, 422)
# Of requests that are refused with a final status, and are accepted a moment later.
_PASSING = re.compile(
    "commit has happened since|queue size|time in concurrency queue|lfs-verify|merkledb", re.IGNORECASE
)
_AT = re.compile(r'"[^"]*";r=(\d+);t=(\d+)')
_IN_TEXT = re.compile(r"retry this action in (?:about )?(\d+|an?) (second|minute|hour)")
_UNITS = {"second": 1, "minute": 60, "hour": 3600}
_LINK = re.compile(r"For more information check: https://\S+")  # httpx's, about the status
_QUERY = re.compile(r"(https?://[^\s'\"?]+)\?[^\s'\"]+")


class Patience:
    """Decides after each failure of one kind of call how long to wait. One object for each series of calls.

    Args:
        at_most: seconds for which calls may fail in a row; None: ``PATIENCE_SECONDS``.
    """

    def __init__(self, at_most: float | None = None) -> None:
        self._at_most = at_most
        self._failures = 0
        self._deadline: float | None = None

    def succeeded(self) -> None:
        self._failures, self._deadline = 0, None

    def seconds(self, what: str, error: OSError) -> float:
        """Seconds to wait before the next attempt. ``what`` starts the message.

        Raises:
            OutputFailed: another attempt is pointless, or all have failed for that long.
        """
        now = time.monotonic()
        self._failures += 1
        if self._deadline is None:
            self._deadline = now + (PATIENCE_SECONDS if self._at_most is None else self._at_most)
        pointless = is_final(error) or (_of_storage(error) and self._failures > _STORAGE_ATTEMPTS)
        if pointless or (now >= self._deadline and http_status(error) != _LIMITED):
            raise OutputFailed(f"{what}: {hub_failure(error)}. {_advice(error)}") from error
        if http_status(error) == _LIMITED:
            wait = self._when_limited(error)
            self._deadline += wait
            return wait
        return backoff_seconds(self._failures, _FIRST_SECONDS, _LONGEST_SECONDS, jitter=0.7)

    def _when_limited(self, error: OSError) -> float:
        advised = advised_seconds(error)
        if advised is None:
            return backoff_seconds(self._failures, _LIMITED_SECONDS, _LIMITED_LONGEST_SECONDS, jitter=0.5)
        return min(advised, LONGEST_ADVICE_SECONDS) * random.uniform(1, 1 + _SPREAD) + random.uniform(0, 1)


def is_final(error: BaseException) -> bool:
    """Whether no later attempt can succeed."""
    if _PASSING.search(_text(error)) or _of_storage(error):
        return False
    return is_permanent(error) or http_status(error) in _FINAL


def is_contention(error: BaseException) -> bool:
    """Whether another process committed at the same time."""
    return http_status(error) in _CONTENTION


def is_limited(error: BaseException) -> bool:
    """Whether a limit of the hub is reached: nothing happened, and the hub says when it may."""
    return http_status(error) == _LIMITED


def advised_seconds(error: BaseException) -> float | None:
    """How long the hub asks to wait; None if it does not say."""
    headers = response_headers(error)
    advised = _retry_after(headers)
    if advised is None:
        advised = _reset(headers)
    if advised is None and (match := _IN_TEXT.search(_text(error))):
        advised = float(_UNITS[match[2]] * (int(match[1]) if match[1].isdigit() else 1))
    return advised


def _retry_after(headers: Mapping[str, str]) -> float | None:
    value = headers.get("retry-after", "").strip()
    if value.isdigit():
        return float(value)
    try:
        return max(0.0, (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return None


def _reset(headers: Mapping[str, str]) -> float | None:
    """The seconds until a limit that is used up starts anew."""
    found = _AT.findall(headers.get("ratelimit", ""))
    return max((float(seconds) for left, seconds in found if left == "0"), default=None)


def _of_storage(error: BaseException) -> bool:
    """Whether the storage refused content, not the hub: its signed URLs expire, and the next attempt gets new ones."""
    url = response_url(error)
    return http_status(error) in (400, 401, 403) and bool(url) and "/api/" not in url and ".git/info/lfs" not in url


def hub_failure(error: BaseException) -> str:
    """Class and message of the error in one line, without the signatures in URLs of the storage."""
    return _QUERY.sub(r"\1?***", " ".join(_LINK.sub("", _text(error)).split())).rstrip(".")


def _text(error: BaseException) -> str:
    """The client wraps what happened to an upload in an error that only names the file."""
    found = error.__cause__ if isinstance(error, FileSystemFailed) and error.__cause__ else error
    inner = f": {error_text(found.__cause__)}" if type(found) is RuntimeError and found.__cause__ else ""
    return f"{error_text(found)}{inner}"


def waiting_text(error: BaseException, seconds: float, generating: bool = True) -> str:
    """What a log line says about a failed attempt and the next one. ``generating``: documents are, meanwhile."""
    again = f"Next attempt in {duration(seconds)}"
    if is_contention(error):
        return f"another process committed at the same moment (HTTP {http_status(error)}). {again}."
    advised = ", as the hub advises" if is_limited(error) and advised_seconds(error) is not None else ""
    return f"{hub_failure(error)}. {again}{advised}{'; generation goes on' if generating else ''}."


def _advice(error: BaseException) -> str:
    kept = "Nothing that was saved is lost: run the same command again"
    status = http_status(error)
    if status in (401, 403):
        return (
            "The token may not write there, or has expired: set HF_TOKEN, or run hf auth login, with one that may. "
            f"{kept}."
        )
    if status == 404 or isinstance(error, FileNotFoundError):
        return f"Make the repository and the branch, or correct output_folder. {kept}."
    if isinstance(error, ImportError) or isinstance(error.__cause__, ImportError):
        return f"Install the extra hub. {kept}."
    return f"Check the network, HF_ENDPOINT, and the state of the hub. {kept}."
