"""Which errors mean that a remote file system failed, and what each of them says: S3, the hub, and others of fsspec.

Most libraries below fsspec raise classes of their own, few of which are an ``OSError``. Only this module knows them.
"""

from __future__ import annotations

import sys
from http.client import HTTPException
from typing import Any

# Base classes of what fsspec's file systems raise, as "module.Class". Only classes that are no ``OSError`` are listed:
# requests.RequestException, HfHubHTTPError of huggingface_hub and the network errors of hf_xet are one.
_FAMILIES = (
    "aiohttp.ClientError",
    "azure.core.exceptions.AzureError",
    "botocore.exceptions.BotoCoreError",
    "botocore.exceptions.ClientError",
    "botocore.parsers.ResponseParserError",  # a rate limit answered with invalid XML, see s3fs issue 484
    "ftplib.Error",
    "gcsfs.retry.ChecksumError",
    "gcsfs.retry.HttpError",
    "gcsfs.retry.NonRetryableError",
    "google.api_core.exceptions.GoogleAPIError",
    "google.auth.exceptions.GoogleAuthError",
    "httpx.HTTPError",
    "httpx2.HTTPError",
    "paramiko.SSHException",
    "smbprotocol.exceptions.SMBException",
    "urllib3.exceptions.HTTPError",
)

# Another attempt cannot change these. Every other error may be temporary.
_PERMANENT_STATUS = {401, 403, 404, 405, 501}
_NO_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound"}


def io_errors(*others: type[Exception]) -> tuple[type[Exception], ...]:
    """The classes that mean: the file system failed, or cannot do this. Use it as ``except io_errors() as error:``.

    ``others`` are added to the classes. ``except Exception`` would also catch bugs of ours, and retry them.

    Python evaluates the expression after ``except`` only when something was raised. By then every library that raised
    something is imported, so this function imports none. For the same reason it can look at the error: a
    ``RuntimeError`` counts if an I/O error caused it. huggingface_hub wraps a failed LFS upload in one.
    """
    paths = (family.rpartition(".") for family in _FAMILIES)
    found = (getattr(sys.modules.get(module), name, None) for module, _, name in paths)
    loaded = [kind for kind in found if isinstance(kind, type) and issubclass(kind, Exception)]
    kinds: tuple[type[Exception], ...] = (OSError, EOFError, HTTPException, ImportError, NotImplementedError)
    kinds += (*loaded, *others)
    raised = sys.exception()
    if type(raised) is RuntimeError and isinstance(raised.__cause__, kinds):
        return (*kinds, RuntimeError)
    return kinds


def is_permanent(error: BaseException | None) -> bool:
    """Whether another attempt cannot succeed: no permission, no bucket, no credentials."""
    if s3_code(error) == "NoSuchUpload":  # it was aborted, or completed by an attempt whose answer got lost
        return False
    if isinstance(_unwrapped(error), PermissionError | FileNotFoundError | NotImplementedError | ImportError):
        return True
    return http_status(error) in _PERMANENT_STATUS or lacks_credentials(error)


def lacks_credentials(error: BaseException | None) -> bool:
    """Whether the client found no credentials to send."""
    return type(error).__name__ in _NO_CREDENTIALS


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


def _s3_response(error: BaseException | None) -> dict[str, Any]:
    """S3's response as botocore parsed it from XML, hence ``Any``. s3fs raises Python's own errors from botocore's."""
    for found in (error, getattr(error, "__cause__", None)):
        response = getattr(found, "response", None)
        if isinstance(response, dict):
            return response
    return {}


def _unwrapped(error: BaseException | None) -> BaseException | None:
    """The cause of a ``RuntimeError``, see ``io_errors``; every other error as it is."""
    return error.__cause__ if type(error) is RuntimeError else error
