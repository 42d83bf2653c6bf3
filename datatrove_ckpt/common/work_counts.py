"""What a rank did, counted where it happens, and how far it is. The history keeps it, displays show
it.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Self

Unit = Literal["bytes", "rows"]


class Addable:
    """A dataclass whose records add up field by field. The sum has the class of the first one."""

    __slots__ = ()
    __dataclass_fields__: Any

    def __add__(self, other: Any) -> Self:
        values = self.fields()
        for name, value in values.items():
            if isinstance(value, bool):
                values[name] = value and getattr(other, name)
            else:
                values[name] = value + getattr(other, name)
        return type(self)(**values)

    def numbers(self) -> list[int]:
        """Returns the whole numbers, in the order of their fields."""
        return [value for value in self.fields().values() if isinstance(value, int)]

    @classmethod
    def of_numbers(cls, numbers: Sequence[int], **others: Any) -> Self:
        """Reads ``numbers()``; a later release may have written more of them."""
        names = [name for name in cls.__dataclass_fields__ if name not in others]
        return cls(**dict(zip(names, numbers, strict=False)), **others)

    def fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


class Tokens(NamedTuple):
    """Tokens of an answer.

    ``cached``, ``written``: of the prompt, those that the server took from its cache, and others
    that it put there. ``reasoning``: of the completion.
    """

    prompt: int
    completion: int
    cached: int = 0
    written: int = 0
    reasoning: int = 0


@dataclass(slots=True)
class WorkCounts(Addable):
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
        endpoints, endpoint_costs: answers by the endpoint that gave them, if the config has
            ``endpoints``, and their cost.
        endpoint_errors: the errors by the endpoint, likewise.
        calls, failed_calls, call_milliseconds: of ``generate.once``, by name.
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
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    cost: int = 0
    errors: Counter[str] = field(default_factory=Counter, kw_only=True)
    tiers: Counter[str] = field(default_factory=Counter, kw_only=True)
    endpoints: Counter[str] = field(default_factory=Counter, kw_only=True)
    endpoint_costs: Counter[str] = field(default_factory=Counter, kw_only=True)
    endpoint_errors: Counter[str] = field(default_factory=Counter, kw_only=True)
    calls: Counter[str] = field(default_factory=Counter, kw_only=True)
    failed_calls: Counter[str] = field(default_factory=Counter, kw_only=True)
    call_milliseconds: Counter[str] = field(default_factory=Counter, kw_only=True)

    @property
    def lost(self) -> int:
        """Attempts that ended without an answer, and whose request was sent again."""
        return self.retries + self.resent


class InputPosition(NamedTuple):
    """How much of its input a rank has read.

    ``done``, ``total``: in ``unit``. ``total`` is None if the input's size is not known; ``unit``
    is None if not even the position is, and then ``done`` is 0. ``tasks``: ranks from this one on
    have no input; None if it is not known.
    """

    done: int = 0
    total: int | None = None
    unit: Unit | None = None
    tasks: int | None = None

    @property
    def share(self) -> float | None:
        """From 0 to 1; None if it is not known. An empty input is done."""
        if self.unit is None or self.total is None:
            return None
        if not self.total:
            return 1.0
        return min(1.0, self.done / self.total)
