"""How engines are asked for what is no text: embeddings, classes, scores.

A way is a path and the names that a server has there for what is asked. An ``Engine`` has a row for each way that it
knows. Answers differ, too, but tell themselves apart: ``inference.client.typed_answers`` reads all of their forms,
because an endpoint may be any engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class WayTo:
    """One way of an engine.

    Attributes:
        path: as ``generate`` takes it: "/v1/..." is below the API's URL, any other below the server's.
        names: of the payload's keys, in the order in which the method of ``generate`` takes its arguments.
        fixed: what each payload has, too. A payload's own value comes first.
    """

    path: str
    names: tuple[str, ...]
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def payload(self, values: tuple[object, ...], params: Mapping[str, Any]) -> dict[str, Any]:
        """The payload of a request."""
        named = dict(zip(self.names, values, strict=True))
        return {**named, **self.fixed, **params}


# OpenAI's own client asks every server for base64. A server that does not know it answers with numbers, which are read.
EMBED = WayTo("/v1/embeddings", ("input",), {"encoding_format": "base64"})

VLLM_WAYS = {
    "embed": EMBED,
    "classify": WayTo("/classify", ("input",)),
    "score": WayTo("/score", ("text_1", "text_2")),  # for each request to /v1/score it logs a warning
}
