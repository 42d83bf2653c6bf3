"""What errors of remote file systems mean: S3, the hub, and whatever else fsspec knows.

Each library raises errors of its own, few of which are an ``OSError``. They are told apart here and nowhere else.
"""

from __future__ import annotations

import sys
from http.client import HTTPException
from typing import Any

# The base classes of what fsspec's file systems let through, as "module.Class".
_FAMILIES = (
    "aiohttp.ClientError",
    "adlfs.utils.AzureError",
    "azure.core.exceptions.AzureError",
    "botocore.exceptions.BotoCoreError",
    "botocore.exceptions.ClientError",
    "gcsfs.retry.HttpError",
    "google.auth.exceptions.GoogleAuthError",
    "httpx.HTTPError",
    "httpx2.HTTPError",
    "huggingface_hub.errors.HfHubHTTPError",
    "paramiko.SSHException",
    "pyarrow.ArrowException",
    "requests.RequestException",
    "smbprotocol.exceptions.SMBException",
    "urllib3.exceptions.HTTPError",
)

# What another attempt cannot change. Every other error may pass.
_PERMANENT_STATUS = {401, 403, 404, 405, 501}
_NO_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound"}


def io_errors(*others: type[Exception]) -> tuple[type[Exception], ...]:
    """The classes that mean: the file system failed, or cannot do this. For ``except io_errors() as error:``.

    ``others`` are added to them. Python evaluates the expression after ``except`` only when something was raised.
    Libraries that are not imported by then have raised nothing, so they are not imported here either. ``Exception``
    would also catch bugs of ours, and retry them.
    """
    paths = (family.rpartition(".") for family in _FAMILIES)
    found = (getattr(sys.modules.get(module), name, None) for module, _, name in paths)
    loaded = [kind for kind in found if isinstance(kind, type) and issubclass(kind, Exception)]
    return (OSError, EOFError, HTTPException, ImportError, NotImplementedError, *loaded, *others)


def is_permanent(error: BaseException | None) -> bool:
    """Whether another attempt cannot succeed: no permission, no bucket, no credentials."""
    if s3_code(error) == "NoSuchUpload":  # it was aborted, or completed by an attempt whose answer got lost
        return False
    if isinstance(error, PermissionError | FileNotFoundError | NotImplementedError | ImportError):
        return True
    return http_status(error) in _PERMANENT_STATUS or lacks_credentials(error)


def lacks_credentials(error: BaseException | None) -> bool:
    """Whether the client found no credentials to send."""
    return type(error).__name__ in _NO_CREDENTIALS


def s3_code(error: BaseException | None) -> str:
    """S3's own name for the error, such as "NoSuchBucket"; "" if S3 gave none."""
    return str(_s3_answer(error).get("Error", {}).get("Code", ""))


def http_status(error: BaseException | None) -> int | None:
    """The HTTP status, as botocore, requests, httpx and aiohttp (and what uses them) keep it."""
    answer = _s3_answer(error).get("ResponseMetadata", {}).get("HTTPStatusCode")
    response = getattr(error, "response", None)
    for status in (answer, getattr(response, "status_code", None), getattr(error, "status", None)):
        if isinstance(status, int):
            return status
    return None


def _s3_answer(error: BaseException | None) -> dict[str, Any]:
    """What S3 answered: s3fs raises Python's own errors, caused by botocore's."""
    for found in (error, getattr(error, "__cause__", None)):
        response = getattr(found, "response", None)
        if isinstance(response, dict):
            return response
    return {}
