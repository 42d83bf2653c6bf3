"""The server that the commands ask:

FakeServer with outages, and with a trap at a number of requests.
"""

from __future__ import annotations

from dataclasses import dataclass

from datatrove_ckpt.testing import FakeServer
from tests.people.inputs import REJECTED, answer_of


@dataclass
class Outage:
    """Answers with an HTTP status that is not a document's fault.

    Attributes:
        status: what is answered.
        after: requests that are still answered well; counts down.
        lasts: requests that fail before all is well again; None: until somebody ends the outage.
    """

    status: int
    after: int
    lasts: int | None = None

    def next(self):
        """The status of the next request; None: it is answered well."""
        self.after -= 1
        if self.after >= 0 or (self.lasts is not None and -self.after > self.lasts):
            return None
        return self.status


class Endpoint:
    """A FakeServer whose answers follow from model and question alone.

    Attributes:
        outage: the outage under way or to come; None: the server is well.
        requests: requests so far.
        trap: called once, in the server's thread, before the request with this number since
            ``set_trap`` is answered.
    """

    def __init__(self):
        self.outage = None
        self.requests = 0
        self._trap = None
        self._trap_at = 0
        self.server = FakeServer(answer=self._answer, status=self._status)

    def set_trap(self, at, trap):
        self._trap_at = self.requests + at
        self._trap = trap

    def _status(self, payload, times):
        self.requests += 1
        if self._trap is not None and self.requests >= self._trap_at:
            trap, self._trap = self._trap, None
            trap()
        if self.outage is not None and (status := self.outage.next()) is not None:
            return status
        return 400 if REJECTED in payload["messages"][-1]["content"] else None

    def _answer(self, payload, times):
        return answer_of(payload["model"], payload["messages"][-1]["content"])
