"""Remembers which servers have had a request with the same leading text.

An engine keeps the prompts that it has processed, from their start, in blocks. So a request costs
less at a server that has had another request with the same leading text: one of its homes. No
engine is queried. If a home has forgotten the text meanwhile, only the routing was in vain.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import xxhash

from datatrove_ckpt.inference.client.body import AnyBody, Body

# Leading texts are compared at every 256 bytes, and further back at every quarter of the text
# before: 26 hashes for 128 kB. Of a long piece the last kilobyte is hashed: texts that differ
# elsewhere only are routed as equal ones.
_STEP = 256
_PART = 4
_HASHED = 1024
_ENDS = [0]
while _ENDS[-1] < 1 << 24:
    _ENDS.append(_ENDS[-1] + max(_STEP, _ENDS[-1] // _PART))
_PIECES = [(max(start, end - _HASHED), end) for start, end in pairwise(_ENDS)]
_REMEMBERED = 80_000  # texts in each of two generations, which take up to 16 MB together
# The engine's prompt begins here. Fields before it, such as a seed, are not part of it.
_STARTS = (b'"messages":', b'"prompt":', b'"input":')


class Prefixes:
    """The servers of leading texts, by the texts' hashes. Servers are bits of an integer.

    A text that no request has had for a whole generation is forgotten.
    """

    def __init__(self) -> None:
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}

    def find(self, body: AnyBody) -> tuple[Sequence[int], int]:
        """Returns the hashes of all leading texts of a request, and the hash of the longest that an
        earlier request had; 0: none.
        """
        texts = _leading_hashes(body)
        for text in reversed(texts):
            if text in self._young or text in self._old:
                return texts, text
        return texts, 0

    def homes(self, text: int) -> int:
        """Returns the servers that have had a request with this leading text."""
        return self._young.get(text) or self._old.get(text, 0)

    def add(self, texts: Sequence[int], server: int) -> None:
        """Adds the leading texts of a request. ``server``: 0: the request waits."""
        if len(self._young) >= _REMEMBERED:
            self._old = self._young
            self._young = {}
        young = self._young
        old = self._old
        if texts and not young.get(texts[-1], 0) & server:
            for text in texts:
                young[text] = (young.get(text) or old.get(text, 0)) | server

    def forget(self, server: int) -> None:
        """Forgets a server that has ended, and its cache with it."""
        for texts in (self._young, self._old):
            for text, homes in texts.items():
                texts[text] = homes & ~server


def _leading_hashes(body: AnyBody) -> list[int]:
    if isinstance(body, Body):
        body = body.with_media_hashed()
    start = next((at for at in map(body.find, _STARTS) if at >= 0), 0)
    left = len(body) - start
    hashes: list[int] = []
    last = 0
    for begin, end in _PIECES:
        if end > left:
            break
        last = xxhash.xxh3_64_intdigest(body[start + begin : start + end], last)
        hashes.append(last)
    return hashes
