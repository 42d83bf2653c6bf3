"""What a file system's library raises is an ``OSError`` for the rest of the package; a bug of ours
is not.
"""

from types import SimpleNamespace

import aiohttp
import botocore.exceptions
import botocore.parsers
import huggingface_hub.errors
import pytest
from multidict import CIMultiDict

from datatrove_ckpt.common.retrying import (
    STORAGE,
    FileSystemFailed,
    advised_seconds,
    failure_line,
    file_system_call,
    http_status,
)
from tests.disk_errors import Answered

LIBRARIES = [
    aiohttp.ClientConnectionError("reset"),
    botocore.exceptions.EndpointConnectionError(endpoint_url="http://x"),
    botocore.exceptions.ClientError({}, "PutObject"),
    botocore.parsers.ResponseParserError("<html>"),
    type("OssError", (Exception,), {})("a library that nobody thought of"),
    ValueError("no account name"),
]


def called(error):
    """The error as it leaves a call into a file system."""
    try:
        with file_system_call():
            raise error
    except BaseException as left:
        return left


@pytest.mark.parametrize("error", LIBRARIES)
def test_what_a_library_raises_is_an_os_error_that_shows_the_librarys(error):
    left = called(error)
    assert isinstance(left, FileSystemFailed)
    assert left.__cause__ is error
    assert failure_line(left).startswith(type(error).__name__)


@pytest.mark.parametrize(
    "error",
    [
        OSError("reset"),
        TimeoutError(),
        FileNotFoundError("no bucket"),
        huggingface_hub.errors.LocalEntryNotFoundError("offline"),
        KeyboardInterrupt(),
    ],
)
def test_an_os_error_and_an_interrupt_stay_as_they_are(error):
    assert called(error) is error


@pytest.mark.parametrize("status, permanent", [(403, True), (503, False)])
def test_the_cause_of_a_failed_lfs_upload_is_looked_at(status, permanent):
    """huggingface_hub without hf_xet wraps it in a RuntimeError."""
    wrapped = RuntimeError("Error while uploading 'a.parquet' to the Hub.")
    wrapped.__cause__ = refused = OSError("refused")
    refused.response = SimpleNamespace(status_code=status)
    left = called(wrapped)
    assert http_status(left) == status
    assert STORAGE.is_transient(left) is not permanent


def test_what_another_attempt_cannot_change_is_permanent():
    for error in (PermissionError(), botocore.exceptions.NoCredentialsError(), TypeError()):
        assert not STORAGE.is_transient(called(error)), error
    assert STORAGE.is_transient(called(KeyError()))


@pytest.mark.parametrize(
    "error",
    [
        Answered(response={"ResponseMetadata": {"HTTPHeaders": {"retry-after": "7"}}}),
        Answered(response=SimpleNamespace(status_code=503, headers={"Retry-After": "7"})),
        Answered(status=503, headers=CIMultiDict({"Retry-After": "7"})),
    ],
    ids=["botocore", "huggingface_hub", "aiohttp"],
)
def test_retry_after_is_found_in_the_errors_of_every_library(error):
    outer = OSError("SlowDown")
    outer.__cause__ = error
    assert [advised_seconds(called(one)) for one in (error, outer)] == [7, 7]
