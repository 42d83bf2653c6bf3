"""What errors of remote file systems mean: S3, the hub, and others of fsspec.

Most libraries below fsspec raise classes of their own, few of which are an ``OSError``. Only this module reads them.
"""

from __future__ import annotations

import re
from types import TracebackType
from typing import Any

from datatrove_ckpt.formatting import error_text
from datatrove_ckpt.redaction import frames_cut

# Another attempt cannot change these. Every other error may be temporary.
_PERMANENT_STATUS = {401, 403, 404, 405, 501}
_PERMANENT_ERRORS = (PermissionError, FileNotFoundError, NotImplementedError, ImportError, TypeError, AttributeError)
_LINK = re.compile(r"For more information check: https://\S+")
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
    """As ``failure_text``, in one line, without httpx's links to explanations of the status."""
    return " ".join(_LINK.sub("", failure_text(error)).split()).rstrip(".")


def is_permanent(error: BaseException | None) -> bool:
    """Whether another attempt cannot succeed: no permission, no bucket, no credentials."""
    if s3_code(error) == "NoSuchUpload":  # it was aborted, or completed by an attempt whose answer got lost
        return False
    if isinstance(_unwrapped(error), _PERMANENT_ERRORS):
        return True
    return http_status(error) in _PERMANENT_STATUS or lacks_credentials(error)


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


def response_headers(error: BaseException | None) -> dict[str, str]:
    """The headers of the HTTP response, with names in lower case; none if the error holds no response."""
    found = _unwrapped(error)
    headers = getattr(getattr(found, "response", None), "headers", None) or {}
    return {str(name).lower(): str(value) for name, value in headers.items()}


def response_url(error: BaseException | None) -> str:
    """The URL that the HTTP response came from; "" if the error holds none."""
    return str(getattr(getattr(_unwrapped(error), "response", None), "url", ""))


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
