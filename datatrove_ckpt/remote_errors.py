"""What errors of remote file systems mean: S3, the hub, and others of fsspec.

Most libraries below fsspec raise classes of their own, few of which are an ``OSError``. Only this module reads them.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Any

from datatrove_ckpt.errors import causes
from datatrove_ckpt.formatting import error_text
from datatrove_ckpt.redaction import frames_cut

# Another attempt cannot change these.
_PERMANENT_ERRORS = (PermissionError, FileNotFoundError, NotImplementedError, ImportError, TypeError, AttributeError)
_LINK = re.compile(r"For more information check: https://\S+")  # httpx's, about the status
_QUERY = re.compile(r"(https?://[^\s'\"?]+)\?[^\s'\"]+")
# Of requests that the hub refuses with a final status, and accepts a moment later.
_PASSING = re.compile(
    "commit has happened since|queue size|time in concurrency queue|lfs-verify|merkledb", re.IGNORECASE
)
# How the hub says when a limit that is used up starts anew: in a header, and in the text.
_AT = re.compile(r'"[^"]*";r=(\d+);t=(\d+)')
_IN_TEXT = re.compile(r"retry this action in (?:about )?(\d+|an?) (second|minute|hour)")
_UNITS = {"second": 1, "minute": 60, "hour": 3600}
_NO_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound"}


class FileSystemFailed(OSError):
    """A library below fsspec raised an error that is no ``OSError``. ``__cause__`` is that error."""


class file_system_call(frames_cut):
    """Put around calls into fsspec, and around nothing else: whatever the library raises leaves as an ``OSError``.

    So ``except OSError`` retries or reports what a file system did, and a bug of ours surfaces at once. A list of error
    classes instead would miss libraries: each has its own, such as ``aiohttp.ClientError``.

    The libraries' frames are cut, because they hold tokens: a log with values would show HF_TOKEN.

    Raises:
        FileSystemFailed: for an error that is no ``OSError``.
    """

    __slots__ = ()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if isinstance(error, Exception) and not isinstance(error, OSError):
            raise FileSystemFailed(error_text(error)) from error


def failure_text(error: BaseException) -> str:
    """Class and message of the error, as the library raised it."""
    return error_text(error.__cause__ if isinstance(error, FileSystemFailed) and error.__cause__ else error)


def failure_line(error: BaseException) -> str:
    """As ``failure_text``, in one line, without httpx's links to explanations and the signatures in URLs of storages.

    huggingface_hub wraps what happened to an upload in an error that only names the file: both are shown.
    """
    found = error.__cause__ if isinstance(error, FileSystemFailed) and error.__cause__ else error
    inner = f": {error_text(found.__cause__)}" if type(found) is RuntimeError and found.__cause__ else ""
    text = " ".join(_LINK.sub("", f"{error_text(found)}{inner}").split())
    return _QUERY.sub(r"\1?***", text).rstrip(".")


def is_permanent(error: BaseException | None) -> bool:
    """Whether another attempt cannot succeed, whatever the HTTP status: no permission, no bucket, no credentials."""
    return isinstance(_unwrapped(error), _PERMANENT_ERRORS) or lacks_credentials(error)


def says_to_repeat(error: BaseException) -> bool:
    """Whether the hub's text says that the request may be made again, whatever its status."""
    return _PASSING.search(failure_line(error)) is not None


def is_of_storage(error: BaseException) -> bool:
    """Whether the storage refused content, not the hub: its signed URLs expire, and the next attempt gets new ones."""
    url = str(getattr(getattr(_unwrapped(error), "response", None), "url", ""))
    return http_status(error) in (400, 401, 403) and bool(url) and "/api/" not in url and ".git/info/lfs" not in url


def lacks_credentials(error: BaseException | None) -> bool:
    """Whether the client found no credentials to send."""
    return type(_unwrapped(error)).__name__ in _NO_CREDENTIALS


def s3_code(error: BaseException | None) -> str:
    """S3's own name for the error, such as "NoSuchBucket"; "" if S3 gave none."""
    return str(_s3_response(error).get("Error", {}).get("Code", ""))


def http_status(error: BaseException | None) -> int | None:
    """The HTTP status; None if the error holds none."""
    found = _unwrapped(error)
    places = (
        _s3_response(error).get("ResponseMetadata", {}).get("HTTPStatusCode"),
        getattr(getattr(found, "response", None), "status_code", None),  # requests, httpx, huggingface_hub, azure-core
        getattr(found, "status", None),  # aiohttp
        getattr(found, "code", None),  # gcsfs, google.api_core
    )
    return next((status for status in places if isinstance(status, int)), None)


def advised_seconds(error: BaseException) -> float | None:
    """How long the server asks to wait; None if it does not say."""
    for one in causes(error):
        headers = _headers(one)
        advice = parse_retry_after(headers.get("retry-after", ""))
        if advice is not None:
            return advice
        used_up = [float(seconds) for left, seconds in _AT.findall(headers.get("ratelimit", "")) if left == "0"]
        if used_up:
            return max(used_up)
    if match := _IN_TEXT.search(failure_line(error)):
        return float(_UNITS[match[2]] * (int(match[1]) if match[1].isdigit() else 1))
    return None


def parse_retry_after(value: str) -> float | None:
    """The seconds that the header Retry-After asks to wait; None if it is missing or says nothing."""
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return None
    return None if math.isnan(seconds) else max(seconds, 0.0)


def _headers(error: BaseException) -> dict[str, str]:
    """The headers of the HTTP response, with names in lower case; none if the error itself holds no response."""
    response = getattr(error, "response", None)
    places = (
        response.get("ResponseMetadata", {}).get("HTTPHeaders") if isinstance(response, dict) else None,  # botocore
        getattr(response, "headers", None),  # requests, httpx, huggingface_hub, azure-core
        getattr(error, "headers", None),  # aiohttp
    )
    found = next((headers for headers in places if isinstance(headers, Mapping)), {})
    return {str(name).lower(): str(value) for name, value in found.items()}


def _s3_response(error: BaseException | None) -> dict[str, Any]:
    """S3's response as botocore parsed it from XML, hence ``Any``. s3fs raises Python's own errors from botocore's."""
    raised = _unwrapped(error)
    for found in (raised, getattr(raised, "__cause__", None)):
        response = getattr(found, "response", None)
        if isinstance(response, dict):
            return response
    return {}


def _unwrapped(error: BaseException | None) -> BaseException | None:
    """The error as the file system raised it. huggingface_hub wraps that of an LFS upload in a ``RuntimeError``."""
    while isinstance(error, FileSystemFailed) or type(error) is RuntimeError:
        if error.__cause__ is None:
            break
        error = error.__cause__
    return error
