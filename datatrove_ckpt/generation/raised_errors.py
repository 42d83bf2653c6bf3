"""The errors of a rank that ends, as scripts for datatrove's runner expect them.

Such a script catches datatrove's ``InferenceError`` when a document fails, and its ``ServerError`` when the server
does. ``errors.py`` imports nothing, and so cannot inherit from them. These subclasses have the same names, and inherit
from both sides.

Pickled, which sends it to another process, an error keeps its message and the text of ``error``; document and payload
stay behind, because not every document can be pickled, and a payload may hold a secret.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from datatrove.data import Document
from datatrove.pipeline.inference import types

from datatrove_ckpt import errors
from datatrove_ckpt.generation.user_frames import cut_own_frames
from datatrove_ckpt.process.task_errors import quiet_task_errors


class DocumentFailed(errors.DocumentFailed, types.InferenceError):
    """See ``errors.DocumentFailed``.

    Attributes:
        document: the document; None if one of its requests was not answered.
        error: what the rollout raised; of an ``InferenceError`` its ``error``.
        payload: of the request that failed; None if no request did.
    """

    def __init__(
        self,
        message: str,
        document: Document | None = None,
        error: str | BaseException = "",
        payload: dict[str, Any] | None = None,
    ) -> None:
        Exception.__init__(self, message)
        self.document = document
        self.error = error
        self.payload = payload

    def __reduce__(self) -> tuple[type[DocumentFailed], tuple[str, None, str], dict[str, Any]]:
        return type(self), (str(self), None, str(self.error)), {"__notes__": list(getattr(self, "__notes__", ()))}


class _OfServer(types.InferenceError, types.ServerError):
    """Both, because datatrove raises now the one and now the other for the same failure of a server."""

    def __init__(self, message: str) -> None:
        Exception.__init__(self, message)
        self.document = None
        self.error = message
        self.payload = None


class ServerStartFailed(errors.ServerStartFailed, _OfServer):
    """See ``errors.ServerStartFailed``."""


class ServerDied(errors.ServerDied, _OfServer):
    """See ``errors.ServerDied``."""


class ServerUnavailable(errors.ServerUnavailable, _OfServer):
    """See ``errors.ServerUnavailable``."""


class ServerRefused(errors.ServerRefused, _OfServer):
    """See ``errors.ServerRefused``."""


_RAISED: dict[type, type[_OfServer]] = {
    kind.__bases__[0]: kind for kind in (ServerStartFailed, ServerDied, ServerUnavailable, ServerRefused)
}


class raised_for_scripts:
    """Around a rank: raises the subclass of each error that has one here. Tracebacks of our errors show the user's
    frames only: executors and Python print them after the message, with everything that was in a variable.
    """

    def __enter__(self) -> None:
        quiet_task_errors()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, errors.CkptError):
            return
        cut_own_frames(error)
        if (raised := _RAISED.get(type(error))) is not None:
            raise raised(str(error)) from error.__cause__


def first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first failure: the others followed from it."""
    error = group.exceptions[0]
    return first_of(error) if isinstance(error, BaseExceptionGroup) else error
