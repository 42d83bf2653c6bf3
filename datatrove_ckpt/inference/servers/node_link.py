"""How the nodes of one task prove to each other that they belong together, before one listens to the other.

Both ends prove that they know the value of the environment variable DATATROVE_CKPT_LINK_KEY, by HMAC-SHA256 of a random
number that the other end chose. ``InferenceConfig`` makes the key where a run is submitted: sbatch and srun pass the
environment on to every node, and nobody but the user can read it there. A file would need a folder that all nodes
share, and argv and the pickled step are readable for others.

Anybody on the allowed hosts can connect and say nothing. So a connection has a deadline until it is proven, and only
``_MAX_GUESTS`` connections wait for their proof at once. One more ends the oldest: a node of ours needs milliseconds,
so those who say nothing cannot keep it out.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets

from datatrove_ckpt.config.inference_config import LINK_KEY_VARIABLE
from datatrove_ckpt.errors import ServerStartFailed

HEAD, WORKER = b"head", b"worker"
"""The role of the node that makes a proof. It is part of the proof, so that no proof can be sent back to its maker."""

MAX_LINE = 1024
"""Bytes of a line; what is longer is not ours."""

_PROOF_TIMEOUT = 10.0  # seconds
_MAX_GUESTS = 32


def require_link_key() -> None:
    """Raises ServerStartFailed if this node has no key."""
    if not os.environ.get(LINK_KEY_VARIABLE):
        raise ServerStartFailed(
            f"{LINK_KEY_VARIABLE} is not set on this node, so the nodes of this task cannot prove that they belong "
            "together. A run makes the key when it is submitted, and sbatch passes it on (--export=ALL, its default). "
            "Submit the run again; or, if you start the nodes yourself, export one random value to all of them."
        )


class Guests:
    """The connections that have not proven anything yet."""

    def __init__(self) -> None:
        self._writers: dict[asyncio.StreamWriter, None] = {}  # in order of arrival

    def __len__(self) -> int:
        return len(self._writers)

    def add(self, writer: asyncio.StreamWriter) -> None:
        """Counts a connection until ``remove``. The oldest ends if there are too many."""
        if len(self._writers) >= _MAX_GUESTS:
            oldest = next(iter(self._writers))
            self.remove(oldest)
            oldest.transport.abort()
        self._writers[writer] = None

    def remove(self, writer: asyncio.StreamWriter) -> None:
        self._writers.pop(writer, None)

    def abort(self) -> None:
        """Ends all of them."""
        for writer in self._writers:
            writer.transport.abort()


async def authenticate(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, own: bytes, peer: bytes
) -> bool | None:
    """Whether the other end knows our key; None if it ended, or said nothing in time. It gets the same proof from us.

    Args:
        own, peer: roles of the two ends.
    """
    challenge = secrets.token_hex(16).encode()
    try:
        async with asyncio.timeout(_PROOF_TIMEOUT):
            writer.write(challenge + b"\n")
            peer_challenge = await read_line(reader)
            if not peer_challenge:
                return None
            writer.write(_proof(own, peer_challenge.strip()) + b"\n")
            proof = await read_line(reader)
            return hmac.compare_digest(proof.strip(), _proof(peer, challenge)) if proof else None
    except TimeoutError:
        return None


def _proof(role: bytes, challenge: bytes) -> bytes:
    # The key gets no name of its own: tracebacks show the values of names.
    digest = hmac.digest(os.environ.get(LINK_KEY_VARIABLE, "").encode(), role + b" " + challenge, "sha256")
    return digest.hex().encode()


async def read_line(reader: asyncio.StreamReader) -> bytes:
    """One line; empty once the connection is closed."""
    try:
        return await reader.readline()
    except (OSError, ValueError):  # ValueError: a line that is too long
        return b""
