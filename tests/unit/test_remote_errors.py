"""The errors of remote file systems, and nothing else, are retried."""

from __future__ import annotations

import ftplib
import importlib
from contextlib import suppress

import aiohttp
import botocore.exceptions
import botocore.parsers
import huggingface_hub.errors
import pytest

from datatrove_ckpt.remote_errors import _FAMILIES, http_status, io_errors, is_permanent


@pytest.mark.parametrize(
    "error",
    [
        OSError("reset"),
        TimeoutError(),
        FileNotFoundError("no bucket"),
        EOFError(),
        NotImplementedError("no such operation"),
        aiohttp.ClientConnectionError(),
        botocore.exceptions.EndpointConnectionError(endpoint_url="http://x"),
        botocore.exceptions.ClientError({}, "PutObject"),
        botocore.parsers.ResponseParserError("<html>"),
        ftplib.error_temp("421 too many connections"),
        huggingface_hub.errors.LocalEntryNotFoundError("offline"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_a_file_system_raises_is_an_io_error(error: Exception) -> None:
    assert isinstance(error, io_errors())


@pytest.mark.parametrize(
    "error", [TypeError(), ValueError(), KeyError(), AttributeError(), RuntimeError(), KeyboardInterrupt()]
)
def test_a_bug_of_ours_is_none(error: BaseException) -> None:
    assert not isinstance(error, io_errors())


def test_each_family_that_is_installed_is_a_class_and_no_os_error() -> None:
    checked = 0
    for family in _FAMILIES:
        module, _, name = family.rpartition(".")
        with suppress(ImportError):
            assert not issubclass(getattr(importlib.import_module(module), name), OSError), family
            checked += 1
    assert checked >= 6


def lfs_upload(cause: Exception) -> None:
    """As huggingface_hub does without hf_xet."""
    try:
        raise cause
    except Exception as error:
        raise RuntimeError("Error while uploading 'a.parquet' to the Hub.") from error


class Response:
    def __init__(self, status_code: int) -> None:
        self.status_code = status_code


def http_error(status: int) -> OSError:
    error = OSError("refused")
    error.response = Response(status)  # type: ignore[attr-defined]
    return error


@pytest.mark.parametrize(("status", "permanent"), [(403, True), (503, False)])
def test_an_io_error_that_is_wrapped_in_a_runtime_error_is_one(status: int, permanent: bool) -> None:
    try:
        lfs_upload(http_error(status))
    except io_errors() as error:
        assert http_status(error) == status
        assert is_permanent(error) is permanent


@pytest.mark.parametrize("cause", [TypeError(), RuntimeError()])
def test_a_bug_that_is_wrapped_in_a_runtime_error_is_none(cause: Exception) -> None:
    def upload() -> None:
        try:
            lfs_upload(cause)
        except io_errors():
            pass

    with pytest.raises(RuntimeError, match="Error while uploading"):
        upload()
