"""What release 0.2.0 pickled with a step: its executor.pik names this class."""

from typing import Any, NamedTuple


class Description(NamedTuple):
    """Describes the user's code as version 5 of the identity did."""

    fields: dict[str, object]
    notes: dict[str, str]
    own: dict[str, object]
    counts: dict[str, int]
    edges: list[tuple[Any, ...]]
    state: frozenset[str]
    documented: bool
    left: list[str]
