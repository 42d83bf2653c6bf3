"""Classifies errors of servers, S3, the hub and others, and retries calls.

Only this module knows the error classes of the libraries below fsspec.
"""

import math
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from typing import NamedTuple, TypeVar
from urllib.parse import unquote

from loguru import logger

from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.common.formatting import duration, error_text
from datatrove_ckpt.errors import CkptError, StorageFailed, causes

T = TypeVar("T")

_PERMANENT_ERRORS = (
    PermissionError,
    FileNotFoundError,
    NotImplementedError,
    ImportError,
    TypeError,
    AttributeError,
)
_LINK = re.compile(r"For more information check: https://\S+")
_QUERY = re.compile(r"(https?://[^\s'\"?]+)\?[^\s'\"]+")
_LOG_IN = "log in (hf auth login, or export HF_TOKEN)"
_HUB_URL = re.compile(
    r"/(?:api/)?(bucket|dataset|model|space)s/([^/?]+/[^/?]+?)(?:\.git)?(?:[/?]|$)|/api/"
)
# Texts of the hub for problems that pass, although their status means a permanent problem.
_PASSING = re.compile(
    "commit has happened since|queue size|time in concurrency queue|lfs-verify|merkledb",
    re.IGNORECASE,
)
# The hub gives the time until a limit resets in a header, and in the text.
_RESET = re.compile(r'"[^"]*";r=(\d+);t=(\d+)')
_IN_TEXT = re.compile(r"retry this action in (?:about )?(\d+|an?) (second|minute|hour)")
_UNITS = {"second": 1, "minute": 60, "hour": 3600}
JITTER = random.SystemRandom()
"""Random numbers of this package at work. Those of ``random`` are the rollouts'."""
_NO_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound"}
_LOST_CONNECTION = {
    "ConnectionError",
    "TimeoutError",
    "TimeoutException",
    "NetworkError",
    "RemoteProtocolError",
}


class FileSystemFailed(OSError):
    """A library below fsspec raised ``__cause__``, which is not an ``OSError``."""


class file_system_call:
    """Wraps a call of fsspec, so that each error is an ``OSError`` or ours.

    So ``except OSError`` handles file systems, and our bugs surface. Removes the frames of
    libraries, because they hold tokens.

    Raises:
        FileSystemFailed: the error is not an ``OSError``.
    """

    __slots__ = ("_outer",)

    def __enter__(self) -> None:
        self._outer = sys.exception()  # belongs to the caller, and keeps its frames

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for cause in causes(error):
            if cause is self._outer:
                break
            cause.__traceback__ = None
        if isinstance(error, Exception) and not isinstance(error, OSError | CkptError):
            raise FileSystemFailed(error_text(error)) from error


def failure_line(error: BaseException) -> str:
    return hub_refusal(error) or library_line(error)


def hub_refusal(error: BaseException) -> str | None:
    """Returns advice if the hub refuses until a person acts (token, rights, name)."""
    for cause in causes(error):
        response = getattr(cause, "response", None)
        if not type(cause).__module__.startswith("huggingface_hub") or response is None:
            continue
        match = _HUB_URL.search(unquote(str(getattr(response, "url", ""))))  # not the storage's
        if match is None:
            return None
        kind, name = match.groups()
        refused = f"the {kind} {name}" if name else "the account"
        if lacks_bucket(cause):
            if kind == "bucket":
                make = f"Make it (hf buckets create {name} --private), correct"
            else:
                make = "Correct"
            return (
                f"{refused} does not exist, or is hidden from this token. {make} the name, or "
                f"{_LOG_IN}"
            )
        status = " ".join(
            f"HTTP {http_status(cause)} {getattr(cause, 'server_message', None) or ''}".split()
        ).rstrip(".")
        if http_status(cause) == 401:
            return f"the hub wants a valid token ({status}): {_LOG_IN}"
        if http_status(cause) == 403:
            return (
                f"this token may not do that with {refused} ({status}). Correct the name, or "
                f"{_LOG_IN}"
            )
        return None
    return None


@contextmanager
def naming_hub() -> Iterator[None]:
    """Adds the setting ``logging_dir`` to a refusal of the hub.

    Raises:
        StorageFailed: the hub refuses, see ``hub_refusal``.
    """
    try:
        yield
    except OSError as error:
        if (refused := hub_refusal(error)) is None:
            raise
        raise StorageFailed(f"{refused}.", setting="logging_dir") from error


def library_line(error: BaseException) -> str:
    """Returns class and message in one line, without links and signatures. An upload error of
    huggingface_hub only names the file, so its cause is added.
    """
    raised = error
    if isinstance(error, FileSystemFailed) and error.__cause__:
        raised = error.__cause__
    inner = ""
    if type(raised) is RuntimeError and raised.__cause__:
        inner = f": {error_text(raised.__cause__)}"
    text = " ".join(_LINK.sub("", f"{error_text(raised)}{inner}").split())
    return _QUERY.sub(r"\1?***", text).rstrip(".")


def is_permanent(error: BaseException | None) -> bool:
    """Whether no further attempt can succeed, whatever the HTTP status."""
    return isinstance(_unwrapped(error), _PERMANENT_ERRORS) or lacks_credentials(error)


def lacks_credentials(error: BaseException | None) -> bool:
    return type(_unwrapped(error)).__name__ in _NO_CREDENTIALS


def s3_code(error: BaseException | None) -> str:
    return str(_s3_response(error).get("Error", {}).get("Code", ""))


def lacks_bucket(error: BaseException) -> bool:
    missing = {type(cause).__name__ for cause in causes(error)} & {
        "BucketNotFoundError",
        "RepositoryNotFoundError",
    }
    return bool(missing) or s3_code(error) == "NoSuchBucket"


def http_status(error: BaseException | None) -> int | None:
    raised = _unwrapped(error)
    places = (
        _s3_response(error).get("ResponseMetadata", {}).get("HTTPStatusCode"),
        # Requests, httpx, huggingface_hub, azure-core.
        getattr(getattr(raised, "response", None), "status_code", None),
        getattr(raised, "status", None),
        getattr(raised, "code", None),  # gcsfs, google.api_core
    )
    return next((status for status in places if isinstance(status, int)), None)


def is_taken(error: BaseException) -> bool:
    return isinstance(error, FileExistsError) or http_status(error) == 412


class Quota(NamedTuple):
    """The requests or tokens that a provider's limit leaves until it resets in ``seconds``."""

    of_tokens: bool
    limit: float
    left: float
    seconds: float


_QUOTA_KINDS = ("-requests", "-tokens", "")  # OpenAI's, Groq's, Together's and others'
WAIT_FIELDS = (
    "retry-after-ms",
    "retry-after",
    "ratelimit",
    *(
        f"x-ratelimit-{part}{kind}"
        for kind in _QUOTA_KINDS
        for part in ("limit", "remaining", "reset")
    ),
)
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|[smhd]|$)")  # "6m0s", "120ms" or "1"
_SECONDS = {"ms": 0.001, "s": 1, "": 1, "m": 60, "h": 3600, "d": 86400}


def quotas(fields: Mapping[str, str]) -> tuple[Quota, ...]:
    result = []
    for kind in _QUOTA_KINDS:
        limit = _number(fields.get(f"x-ratelimit-limit{kind}", ""))
        remaining = _number(fields.get(f"x-ratelimit-remaining{kind}", ""))
        # The text is cut, because the time of a search grows with the square of its length.
        parts = _DURATION.findall(fields.get(f"x-ratelimit-reset{kind}", "")[:50])
        seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts)
        # A larger number is a time, in seconds or milliseconds.
        if remaining is not None and 0 < seconds < 10 * 86400:
            result.append(Quota(kind == "-tokens", limit or math.inf, remaining, seconds))
    return tuple(result)


def retry_after(fields: Mapping[str, str]) -> float | None:
    """Returns the seconds to wait by the ``WAIT_FIELDS`` of a response; None without advice.

    Args:
        fields: the header, with names in lower case.
    """
    exact = _number(fields.get("retry-after-ms", ""))
    if exact is not None:
        return exact / 1000
    after = fields.get("retry-after", "")
    seconds = _number(after)
    if seconds is not None:
        return seconds
    with suppress(ValueError, TypeError, OverflowError):
        return max(0.0, parsedate_to_datetime(after).timestamp() - time.time())
    used_up = [
        float(until)
        for remaining, until in _RESET.findall(fields.get("ratelimit", ""))
        if remaining == "0"
    ]
    used_up += [quota.seconds for quota in quotas(fields) if quota.left < 1]
    return max(used_up, default=None)


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    if math.isnan(number):
        return None
    return max(number, 0.0)


def advised_seconds(error: BaseException) -> float | None:
    for cause in causes(error):
        advice = retry_after(_headers(cause))
        if advice is not None:
            return advice
    if match := _IN_TEXT.search(library_line(error)):
        return float(_UNITS[match[2]] * (int(match[1]) if match[1].isdigit() else 1))
    return None


def _headers(error: BaseException) -> dict[str, str]:
    response = getattr(error, "response", None)
    places = (
        _s3_response(error).get("ResponseMetadata", {}).get("HTTPHeaders"),
        getattr(response, "headers", None),  # requests, httpx, huggingface_hub, azure-core
        getattr(error, "headers", None),
    )
    found = next((headers for headers in places if isinstance(headers, Mapping)), {})
    return {str(name).lower(): str(value) for name, value in found.items()}


def _s3_response(error: BaseException | None) -> JsonObject:
    raised = _unwrapped(error)
    for candidate in (raised, getattr(raised, "__cause__", None)):
        response = getattr(candidate, "response", None)
        if isinstance(response, dict):
            return response
    return {}


def _unwrapped(error: BaseException | None) -> BaseException | None:
    """Returns the file system's error, which huggingface_hub may wrap in a ``RuntimeError``."""
    while isinstance(error, FileSystemFailed) or type(error) is RuntimeError:
        if error.__cause__ is None:
            break
        error = error.__cause__
    return error


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """Decides which failures are retried, and after how many seconds.

    The waits grow geometrically from ``first`` to ``longest``. ``jitter`` is the share of a wait
    that is random: 0 for one caller, 1 ("full jitter") for thousands of requests that failed
    together.

    Attributes:
        retried: the HTTP statuses that another attempt may change.
        limited: statuses that mean "not now". Their waits count against ``limited_patience``, not
            against ``patience``.
        patience: seconds in which calls may fail in a row.
        longest_advice: an advised wait counts up to this, and never extends the patience.
        spread: up to this share of an advised wait is added at random.
        sleep: waits. Tests, and callers that can stop a wait, replace it.
    """

    retried: frozenset[int] = frozenset()
    limited: frozenset[int] = frozenset()

    patience: float = math.inf
    limited_patience: float = math.inf
    first: float = 1.0
    longest: float = 60.0
    growth: float = 2.0
    jitter: float = 0.0
    longest_advice: float = 0.0
    spread: float = 0.1
    meanwhile: str = ""
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], object] = time.sleep

    def wait(self, failures: int, advice: float | None = None) -> float:
        # The exponent is bounded: 2.0 ** 1100 overflows.
        longest = self.first * self.growth ** min(failures - 1, 100)
        grown = min(self.longest, longest) * JITTER.uniform(1 - self.jitter, 1)
        if advice is None:
            return grown
        return max(grown, min(advice, self.longest_advice) * JITTER.uniform(1, 1 + self.spread))

    def is_transient(self, error: BaseException, failures: int = 1) -> bool:
        """Whether an error may pass, after so many ``failures`` in a row.

        An unknown error may pass, because libraries have many names for a lost connection.
        """
        # The upload was aborted, or completed by an attempt that got no answer.
        if s3_code(error) == "NoSuchUpload":
            return True
        status = http_status(error)
        return not is_permanent(error) and (status is None or status in self.retried)

    def run(
        self,
        call: Callable[[], T],
        problem: str,
        explain: Callable[[BaseException], str] = failure_line,
    ) -> T:
        """Repeats the call while its errors may pass. Raises the last error."""
        attempts = FailureCounter(self, explain)
        while True:
            try:
                return call()
            except CkptError:  # a refusal of ours
                raise
            except Exception as error:
                seconds = attempts.failed(problem, error)
            self.sleep(seconds)


class ReadingPolicy(RetryPolicy):
    """Treats an unknown error as permanent. Otherwise a damaged file would be read for minutes."""

    def is_transient(self, error: BaseException, failures: int = 1) -> bool:
        for cause in causes(error):
            status = http_status(cause)
            if status is not None:
                return status in self.retried
            if type(cause).__name__ == "OfflineModeIsEnabled":
                return False
        kinds = {kind.__name__ for cause in causes(error) for kind in type(cause).__mro__}
        return not is_permanent(error) and bool(kinds & _LOST_CONNECTION)


class HubPolicy(RetryPolicy):
    def is_transient(self, error: BaseException, failures: int = 1) -> bool:
        if _PASSING.search(library_line(error)):
            return True
        url = str(getattr(getattr(_unwrapped(error), "response", None), "url", ""))
        is_of_storage = url and "/api/" not in url and ".git/info/lfs" not in url
        if is_of_storage and http_status(error) in (400, 401, 403):
            # The hub's storage refused the content, because a signed URL has expired.
            return failures <= 5
        return isinstance(error, OSError) and super().is_transient(error)


@dataclass(eq=False)
class FailureCounter:
    _policy: RetryPolicy
    _explain: Callable[[BaseException], str] = failure_line

    def __post_init__(self) -> None:
        self.succeeded()

    def succeeded(self) -> None:
        self._failures = 0
        self._limited = 0.0
        self._since = 0.0

    def failed(self, problem: str, error: Exception) -> float:
        """Logs the failure. Returns the seconds to wait.

        Raises:
            Exception: ``error``, if another attempt is pointless, or all have failed for too long.
        """
        policy = self._policy
        now = policy.clock()
        if not self._failures:
            self._since = now
        self._failures += 1
        status = next(
            (code for cause in causes(error) if (code := http_status(cause)) is not None), None
        )
        limited = status in policy.limited
        remaining = policy.patience - (now - self._since - self._limited)
        if limited:
            remaining = policy.limited_patience - self._limited
        if remaining <= 0 or not policy.is_transient(error, self._failures):
            raise error
        advice = advised_seconds(error)
        seconds = min(remaining, policy.wait(self._failures, advice))
        self._limited += seconds if limited else 0.0
        advised = ", as the server advises" if advice is not None else ""
        bounded = f", for {duration(remaining)} at most" if remaining < math.inf else ""
        logger.warning(
            f"{problem}: {self._explain(error)}. Next attempt in "
            f"{duration(seconds)}{advised}{bounded}{policy.meanwhile}."
        )
        return seconds


# Requests to an inference server; the patience is ``server_patience_seconds``.
SERVER = RetryPolicy(
    # 424: TGI failed to generate; 444, 460, 499: nginx, AWS and Gemini cut the connection.
    retried=frozenset({408, 409, 424, 425, 429, 444, 460, 498, 499, *range(500, 600)}) - {501},
    limited=frozenset({429, 498, 503, 529}),  # 498: Groq's flex tier is full
    first=0.5,
    longest=30.0,
    jitter=1.0,
    longest_advice=120.0,
    spread=0.0,
)
REJECTED = frozenset({400, 413, 414, 422, 431})
"""The only statuses of an inference server about one request: its content or its size."""
OF_ONE_TEXT = frozenset({403, 406, 451})
"""The statuses with which a filter may refuse a text while it lets others pass."""
BUSY = frozenset({502, 503, 504, 529})
"""The statuses of an inference server that is overloaded or not ready, but not dead."""

# Waits for endpoints and our servers, for GPU memory after a failed start, and before restarts.
ENDPOINT = RetryPolicy(first=0.25, longest=5.0)
READY = RetryPolicy(first=0.05, longest=math.inf, growth=1.2)
RELAUNCH = RetryPolicy(first=1.0, longest=1.0)
RESTART = RetryPolicy(first=1.0, longest=60.0)

# Input on S3, the hub and others. A rank that ends gives its GPU back.
READING = ReadingPolicy(
    retried=frozenset({408, 425, 429, 500, 502, 503, 504, *range(520, 525)}),
    limited=frozenset({429}),
    patience=600.0,
    limited_patience=3600.0,
    jitter=0.5,
    longest_advice=3600.0,
)

OPENING = replace(READING, patience=60.0)
"""Reads the first listing of a job, when a missing network is likelier than an outage."""

# Output on S3 and others. Generation continues meanwhile.
STORAGE = RetryPolicy(
    retried=frozenset(range(300, 600)) - {401, 403, 404, 405, 501},
    patience=300.0,
    first=0.5,
    longest=20.0,
    jitter=0.5,
    longest_advice=300.0,
)

# Output on the hub, and requests before and after generation.
HUB = HubPolicy(
    retried=STORAGE.retried - {400, 410, 413, 422},
    limited=frozenset({429}),
    patience=3600.0,
    jitter=0.7,
    longest_advice=6 * 3600.0,
    meanwhile="; generation continues",
)
HUB_LOOK = replace(HUB, patience=300.0, meanwhile="")
HUB_PROBE = replace(HUB_LOOK, patience=10.0, limited_patience=0.0)  # a user waits for doctor

# Uploads to a mirror, in upload intervals.
MIRROR = RetryPolicy(first=1.0, longest=16.0)


def code_of_rank(error: BaseException) -> int:
    """Returns the exit code of the error's class, or 1 if its cause may pass."""
    code = getattr(error, "exit_code", 1)
    if code in (2, 3) and READING.is_transient(error):  # the hub, or S3, is away
        return 1
    if code == 3 and any(getattr(cause, "may_pass", False) for cause in causes(error)):
        return 1
    return code
