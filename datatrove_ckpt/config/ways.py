"""How engines are asked for what is no text: embeddings, classes, scores.

``inference.client.answers`` reads all forms of answers, whatever the engine: an endpoint may
be any.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from datatrove_ckpt.common import JsonObject


@dataclass(frozen=True)
class WayTo:
    """One way of an engine.

    Attributes:
        path: "/v1/..." is below the API's URL, any other below the server's.
        names: of the payload's keys, in the order of the arguments of ``generate``'s method.
        fixed: what each payload has, too. A payload's own value comes first.
    """

    path: str
    names: tuple[str, ...]
    fixed: Mapping[str, object] = field(default_factory=dict)

    def payload(self, values: tuple[object, ...], params: Mapping[str, object]) -> JsonObject:
        named = dict(zip(self.names, values, strict=True))
        return {**named, **self.fixed, **params}


# As OpenAI's own client does. A server that does not know base64 answers with numbers.
EMBED = WayTo("/v1/embeddings", ("input",), {"encoding_format": "base64"})

VLLM_WAYS = {
    "embed": EMBED,
    "classify": WayTo("/classify", ("input",)),
    "score": WayTo("/score", ("text_1", "text_2")),  # each request to /v1/score logs a warning
}
