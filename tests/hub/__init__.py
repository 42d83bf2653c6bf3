"""A fake Hugging Face hub on loopback, for the real huggingface_hub client.

``FakeHub`` is the server (in a thread of its own), and ``pointed_at(hub, folder)`` has new
processes talk to it, as well as the huggingface_hub that this process has already imported. In
tests: the fixtures ``hub`` (server, this process points at it) and ``FakeHub`` itself.

Content goes over plain LFS, so the client needs ``HF_HUB_DISABLE_XET=1``. Buckets take content over
Xet only: there the client's transport is replaced (``xet.py``), in this process alone. All else
about buckets is the real client.
"""

from tests.hub.client import pointed_at
from tests.hub.server import FakeHub

__all__ = ["FakeHub", "pointed_at"]
