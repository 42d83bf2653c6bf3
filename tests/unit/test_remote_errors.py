"""The errors of remote file systems, and nothing else, are retried."""

from __future__ import annotations

import aiohttp
import botocore.exceptions
import huggingface_hub.errors
import pytest

from datatrove_ckpt.remote_errors import io_errors


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
