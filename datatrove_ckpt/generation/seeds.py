"""A seed for each request, from the run's seed and from which request it is.

Engines that honour seeds then sample the same when a request is sent again, after a kill or a server's death. One seed
for all requests would not do: two rollouts of a document, or two equal calls of one, would be one sample.
"""

from __future__ import annotations

import orjson
import xxhash

_BITS = 31
"""The range that vLLM, SGLang, llama.cpp and OpenAI all take: not negative, and below 2**31."""


def request_seed(seed: int, ordinal: int, doc_id: str, rollout_idx: int, digest: str, occurrence: int) -> int:
    """Returns the ``seed`` of a request: a number from 0 to 2**31 - 1.

    Args:
        seed: the run's, ``InferenceConfig.seed``.
        ordinal, doc_id: the document. Ids may repeat in an input, on purpose: the ordinal tells them apart.
        digest: the payload's, without a seed. The n-th call would depend on the order of parallel calls.
        occurrence: counts equal payloads within one rollout, from 0.
    """
    request = orjson.dumps([seed, ordinal, doc_id, rollout_idx, digest, occurrence])
    return int(xxhash.xxh3_64_intdigest(request)) >> (64 - _BITS)
