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

# Leading texts are compared at every 256 bytes, and further back at every eighth of the text
# before: 43 hashes for 128 kB. Of a long piece the last kilobyte is hashed: texts that differ
# elsewhere only are routed as equal ones.
_STEP = 256
_PART = 8
_HASHED = 1024
_ENDS = [0]
while _ENDS[-1] < 1 << 24:
    _ENDS.append(_ENDS[-1] + max(_STEP, _ENDS[-1] // _PART))
_PIECES = [(max(start, end - _HASHED), end) for start, end in pairwise(_ENDS)]
_REMEMBERED = 1 << 15  # texts in each of two generations; a text takes about 200 bytes
# The engine's prompt begins here. Fields before it, such as a seed, are not part of it.
_STARTS = (b'"messages":', b'"prompt":', b'"input":')


class Prefixes:
    """The servers of leading texts, by the texts' hashes. Servers are bits of an integer.

    A text that no request has had for a whole generation is forgotten.
    """

    def __init__(self) -> None:
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}

    def enter(self, body: AnyBody) -> tuple[Sequence[int], int]:
        """Enters all leading texts of a request.

        Returns:
            Their hashes, and the hash of the longest that an earlier request had; 0: none.
        """
        if len(self._young) >= _REMEMBERED:
            self._old = self._young
            self._young = {}
        hashes = _leading_hashes(body)
        known = 0
        for text in hashes:
            homes = self._young.get(text)
            if homes is None:
                homes = self._old.get(text)
                self._young[text] = homes or 0
            if homes is not None:
                known = text
        return hashes, known

    def homes(self, text: int) -> int:
        """Returns the servers that have had a request with this leading text."""
        return self._young.get(text, 0)

    def add(self, texts: Sequence[int], server: int) -> None:
        young = self._young
        if texts and not young.get(texts[-1], 0) & server:
            for text in texts:
                young[text] = young.get(text, 0) | server

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
