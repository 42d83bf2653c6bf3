"""The result of a check before a run. Errors of a check become findings."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from datatrove_ckpt.common.retrying import failure_line
from datatrove_ckpt.common.threads import in_thread
from datatrove_ckpt.errors import CkptError
from datatrove_ckpt.run_folder.run_plan import WrongMarker

REMOTE_SECONDS = 60.0
"""Seconds that a remote folder may take to answer."""


class RemoteFailed(CkptError):
    """A remote folder did not do what a run needs."""


FindingState = Literal["ok", "note", "warning", "problem"]


T = TypeVar("T")


@dataclass(frozen=True)
class Finding:
    """One result of a check, which is a generator of findings.

    Attributes:
        what: the property that was checked, such as "locks".
        subject: the thing that was checked, such as "checkpoints". ``run_check`` adds it.
        error: a run raises it; None: a run starts.
        markers: a run removes them.
    """

    state: FindingState
    what: str
    message: str
    subject: str = ""
    error: Exception | None = None
    markers: Sequence[WrongMarker] = ()

    def to_json(self) -> dict[str, str]:
        names = ("state", "what", "message", "subject")
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        return f"{self.state:<8} {self.subject}, {self.what}: {' '.join(self.message.split())}"


def run_check(
    subject: str,
    check: Callable[..., Iterable[Finding] | None],
    *arguments: object,
    property_name: str = "checked",
) -> Iterator[Finding]:
    """Makes a check. An error that it raises is a problem."""
    try:
        for finding in check(*arguments) or ():
            yield replace(finding, subject=finding.subject or subject)
    except Exception as error:  # a list of all problems is worth more than the traceback of one
        text = f"this could not be checked: {failure_line(error)}."
        if isinstance(error, CkptError):
            text = str(error)
        yield Finding("problem", property_name, text, subject, error)


def with_timeout(function: Callable[[], T], name: str) -> T:
    """Calls a function, for ``REMOTE_SECONDS`` at most.

    Raises:
        RemoteFailed: the function took longer. It continues in a daemon thread, which keeps no
            process alive.
    """
    result = in_thread(function, "datatrove-ckpt check")
    wait([result], REMOTE_SECONDS)
    if not result.done():
        raise RemoteFailed(
            f"{name}: no answer within {REMOTE_SECONDS:.0f} s. Check the network, or the mount."
        )
    return result.result()
