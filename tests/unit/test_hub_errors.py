"""What answers of the hub mean, and how long they ask to wait."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from types import SimpleNamespace

import pytest

from datatrove_ckpt.errors import OutputFailed
from datatrove_ckpt.output import hub_errors
from datatrove_ckpt.output.hub_errors import Patience, advised_seconds, hub_failure, is_final, waiting_text
from datatrove_ckpt.remote_errors import FileSystemFailed


def answer(status: int, text: str = "", url: str = "https://hub/api/x", **headers: str) -> OSError:
    """An error of the client, as ``StoppableCalls`` raises it."""
    error = FileSystemFailed(text)
    inner = RuntimeError(f"{status} for url: {url}. {text}")
    inner.response = SimpleNamespace(  # type: ignore[attr-defined]
        status_code=status, url=url, headers={name.replace("_", "-"): value for name, value in headers.items()}
    )
    error.__cause__ = inner
    return error


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (answer(429, Retry_After="3600"), 3600),
        (answer(429, RateLimit='"api";r=0;t=55'), 55),
        (answer(429, RateLimit='"api";r=7;t=55, "commits";r=0;t=900'), 900),
        (answer(429, "You can retry this action in about 1 hour"), 3600),
        (answer(429, "You can retry this action in 12 minutes"), 720),
        (ConnectionResetError("reset"), None),
    ],
)
def test_the_hubs_advice_is_found_wherever_it_stands(error: OSError, seconds: float | None) -> None:
    assert advised_seconds(error) == seconds


def test_a_date_is_advice_too() -> None:
    then = format_datetime(datetime.now(UTC) + timedelta(hours=1), usegmt=True)
    advised = advised_seconds(answer(429, Retry_After=then))
    assert advised is not None
    assert 3000 < advised <= 3600


@pytest.mark.parametrize(
    ("error", "final"),
    [
        *((answer(status), True) for status in (400, 401, 403, 404, 422)),
        *((answer(status), False) for status in (409, 412, 429, 500, 504)),
        (answer(400, "lfs-verify failed"), False),
        (answer(403, url="https://storage/bucket/abc?X-Amz-Signature=1"), False),
        (TimeoutError("no answer within 600 s"), False),
    ],
)
def test_what_no_retry_can_help_is_known(error: OSError, final: bool) -> None:
    assert is_final(error) is final


def test_waiting_that_the_hub_asked_for_costs_no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(hub_errors, "time", SimpleNamespace(monotonic=lambda: now[0]))
    patience = Patience()
    for _ in range(20):
        seconds = patience.seconds("a commit", answer(429, Retry_After="3600"))
        assert 3600 <= seconds <= 3600 * 1.1 + 1
        now[0] += seconds
    now[0] += hub_errors.PATIENCE_SECONDS - 10
    assert patience.seconds("a commit", answer(503)) <= hub_errors._LONGEST_SECONDS
    now[0] += 20
    with pytest.raises(OutputFailed, match=r"a commit: RuntimeError: 503 .*Check the network, HF_ENDPOINT"):
        patience.seconds("a commit", answer(503))
    patience.succeeded()
    assert patience.seconds("a commit", answer(503)) <= 1


def test_a_storage_that_goes_on_refusing_is_final() -> None:
    patience, refused = Patience(), answer(403, url="https://storage/bucket/abc")
    for _ in range(hub_errors._STORAGE_ATTEMPTS):
        patience.seconds("an upload", refused)
    with pytest.raises(OutputFailed, match="The token may not write there"):
        patience.seconds("an upload", refused)


def test_ranks_that_were_refused_together_do_not_return_together() -> None:
    waits = {Patience().seconds("a commit", answer(412)) for _ in range(20)}
    waits |= {Patience().seconds("a commit", answer(429, Retry_After="60")) for _ in range(20)}
    assert len(waits) == 40


def test_messages_show_no_signatures_and_say_what_comes_next() -> None:
    error = answer(403, url="https://storage/abc?X-Amz-Signature=secret&X=1")
    assert "secret" not in hub_failure(error)
    assert "https://storage/abc?***" in hub_failure(error)
    assert waiting_text(answer(412), 2.0) == (
        "another process committed at the same moment (HTTP 412). Next attempt in 2 s."
    )
    said = waiting_text(answer(429, Retry_After="3600"), 3600.0)
    assert said.endswith("Next attempt in 1 h, as the hub advises; generation goes on.")
