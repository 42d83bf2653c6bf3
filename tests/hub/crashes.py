"""A client of the hub that may die before and after each request."""

import gc
import threading

from huggingface_hub import get_session

from tests.crashes import CrashingDisk, disk_in_place
from tests.hub.server import route

_SENDERS = [f"datatrove-ckpt {name}" for name in ("upload", "mirror", "hub")]


class CrashingClient:
    """A client that may die before and after each request, and sends nothing when it is dead.

    Attributes:
        writes: kinds of requests that count as effects; None: all.
    """

    disk = None
    writes = None

    def __init__(self, send):
        self._send = send

    def send(self, client, request, **options):
        kind = route(request.method, request.url.path)[0]
        self._effect(f"before {kind}", kind)
        response = self._send(client, request, **options)
        self._effect(f"after {kind}", kind)
        return response

    def _effect(self, label, kind):
        if self.disk is not None:
            with self.disk._lock:
                self.disk.before(
                    "request" if self.writes is None or kind in self.writes else "look", (), label
                )

    def crash(self, number, folder, counted, attempt):
        """Returns the effect at which the attempt crashed; None if it ended before."""
        self.disk = CrashingDisk(number, folder, counted=counted)
        with disk_in_place(self.disk):
            attempt()
        # A dead process sends nothing more, but the threads of this one would.
        for thread in threading.enumerate():
            if thread.name in _SENDERS:
                thread.join(300)
        gc.collect()
        crashed = self.disk.crashed_at
        if crashed is not None:
            next(self.disk.survivors())
        self.disk = None
        return crashed


def crashing_client(monkeypatch):
    """In the place of huggingface_hub's."""
    library = type(get_session())  # httpx's or httpx2's, as huggingface_hub has it
    crashing = CrashingClient(library.send)
    monkeypatch.setattr(
        library, "send", lambda *arguments, **options: crashing.send(*arguments, **options)
    )
    return crashing
