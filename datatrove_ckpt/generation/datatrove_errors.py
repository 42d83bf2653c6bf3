"""Errors of a rank that scripts for datatrove's runner can catch.

Scripts catch datatrove's ``InferenceError`` and ``ServerError``, which ``errors`` does not import:
these subclasses inherit from both sides.

A pickled error lacks document and payload: a document may not be picklable, and a payload may hold
a secret.
"""

from collections.abc import Mapping, Sequence

from datatrove.data import Document
from datatrove.pipeline.inference import types

from datatrove_ckpt import errors
from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.common.formatting import safe_text
from datatrove_ckpt.common.redaction import redact
from datatrove_ckpt.errors import causes
from datatrove_ckpt.generation.user_frames import is_package_code
from datatrove_ckpt.process.task_errors import safe_log


class DocumentFailed(errors.DocumentFailed, types.InferenceError):
    """This is also datatrove's ``InferenceError``.

    Attributes:
        document: the document; None if one of its requests was not answered.
        error: the error that the rollout raised; for an ``InferenceError`` its ``error``.
        payload: the payload of the request that failed; None if no request failed.
    """

    def __init__(
        self,
        message: str,
        document: Document | None = None,
        error: str | BaseException = "",
        payload: JsonObject | None = None,
        changes: Sequence[Mapping[str, object]] = (),
    ) -> None:
        errors.CkptError.__init__(self, message, changes=changes)
        self.document = document
        self.error = error
        self.payload = payload

    def __reduce__(self) -> tuple[object, ...]:
        return (
            type(self),
            (str(self), None, safe_text(self.error)),
            {"__notes__": list(getattr(self, "__notes__", ())), "changes": self.changes},
        )


class _ServerFailure(errors.CkptError, types.InferenceError, types.ServerError):
    document: None = None
    payload: None = None

    def __init__(self, message: str) -> None:
        errors.CkptError.__init__(self, message)
        self.error = message


class ServerStartFailed(errors.ServerStartFailed, _ServerFailure):
    """This is also one of datatrove's errors."""


class ServerDied(errors.ServerDied, _ServerFailure):
    """This is also one of datatrove's errors."""


class ServerUnavailable(errors.ServerUnavailable, _ServerFailure):
    """This is also one of datatrove's errors."""


class ServerRefused(errors.ServerRefused, _ServerFailure):
    """This is also one of datatrove's errors."""


_RAISED: dict[type, type[_ServerFailure]] = {
    raised.__bases__[0]: raised
    for raised in (ServerStartFailed, ServerDied, ServerUnavailable, ServerRefused)
}


class raised_for_scripts:
    """Replaces errors of a server by their subclasses of this module.

    Removes secrets from our errors and the errors that caused them, and our frames from their
    tracebacks: executors and Python print these after the message, with the values of variables.
    """

    def __enter__(self) -> None:
        safe_log()

    def __exit__(
        self,
        kind: object,
        error: BaseException | None,
        trace: object,
    ) -> None:
        if not isinstance(error, errors.CkptError):
            return
        for cause in causes(error):
            frames = None if cause is error else cause.__traceback__
            while frames is not None and frames.tb_next and is_package_code(frames.tb_frame.f_code):
                frames = frames.tb_next
            cause.__traceback__ = frames
            cause.args = tuple(
                redact(part) if isinstance(part, str) else part for part in cause.args
            )
        if (raised := _RAISED.get(type(error))) is not None:
            failure = raised(str(error))
            failure.changes = error.changes
            raise failure from error.__cause__
