"""WorkCounts: what a rank did, counted where it happens. The history keeps it, displays show it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Self


class Added:
    """A dataclass whose records add up field by field. The sum has the class of the first one."""

    __slots__ = ()
    __dataclass_fields__: Any

    def __add__(self, other: Added) -> Self:
        values = self.fields()
        for name, value in values.items():
            if isinstance(value, bool):
                values[name] = value and getattr(other, name)
            else:
                values[name] = value + getattr(other, name)
        return type(self)(**values)

    def fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(slots=True)
class WorkCounts(Added):
    """What attempts did. A kill loses the last minute of these counts; counts of documents are
    exact.

    Attributes:
        requests: requests that a server answered.
        failed: requests that ended without an answer.
        cached: requests that were answered from the request cache.
        sent: attempts of requests that were sent to a server.
        retries: attempts that failed and whose request was sent again.
        resent: attempts that were lost with their server and whose request was sent again.
        restarts: of servers.
        errors: failed attempts by kind, such as "timeout", "connection" or "HTTP 503".
        cached_tokens: prompt tokens that the server took from its own cache.
        reasoning_tokens: those among the completion tokens.
        cost: of the answers, in billionths, at the ``prices`` of the config.
        tiers: answers by the ``service_tier`` that the server names.
    """

    documents: int = 0
    requests: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached: int = 0
    sent: int = 0
    retries: int = 0
    resent: int = 0
    restarts: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    cost: int = 0
    tiers: Counter[str] = field(default_factory=Counter)

    @property
    def lost(self) -> int:
        """Attempts that ended without an answer, and whose request was sent again."""
        return self.retries + self.resent

    def numbers(self) -> list[int]:
        return [getattr(self, name) for name in _WORK_NUMBERS]

    @classmethod
    def from_json(cls, numbers: Sequence[int], errors: Counter[str], tiers: Counter[str]) -> Self:
        named = dict(zip(_WORK_NUMBERS, numbers, strict=False))
        return cls(**named, errors=errors, tiers=tiers)


_WORK_NUMBERS = tuple(entry.name for entry in fields(WorkCounts) if entry.type == "int")
