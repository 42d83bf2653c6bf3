"""Every error this package raises on purpose. Each message says what happened, where, and what to do next.

CkptError
├── ConfigError                a setting that cannot work; names the key, its value and what is allowed
├── CheckpointError
│   ├── CheckpointCorrupt      a checkpoint file that no crash of ours can explain; names file and line
│   ├── CheckpointMismatch     the checkpoint belongs to another run, or the input changed under it
│   ├── CheckpointLocked       another process works on this rank
│   └── StorageFailed          the disk refused a write, a sync or a rename
├── DocumentError
│   ├── DocumentFailed         a rollout raised, or a request of it could not be answered
│   ├── DocumentNotSerializable  a value in a document that cannot be kept or written
│   └── OutputFailed           a finished chunk could not be written or published
├── ServerError
│   ├── ServerStartFailed      never became ready; holds the command, the exit code and the log's tail
│   ├── ServerDied             was ready, and is gone
│   └── ServerRefused          401, 403, 404: no request of this run can succeed
└── RequestError
    ├── RequestRejected        400, 413, 422: this request can never succeed; kept in the request cache
    └── RequestFailed          given up after every retry; asked for again by the next run

What a rollout sees are datatrove's own ``InferenceError`` and ``ServerError``, whose ``error`` attribute holds one
of these. This module imports nothing, so every room may import it.
"""

from __future__ import annotations


class CkptError(Exception):
    """Base of every error of this package."""


class ConfigError(CkptError, ValueError):
    """A setting that cannot work. Also a ValueError, which is what datatrove raises for the same mistakes."""


class CheckpointError(CkptError):
    """Something about the checkpoint folder."""


class CheckpointCorrupt(CheckpointError):
    """A checkpoint file holds what no crash can have left there."""


class CheckpointMismatch(CheckpointError):
    """The checkpoint was made by another run, or from another input."""


class CheckpointLocked(CheckpointError):
    """Another process holds this rank's checkpoint."""


class StorageFailed(CheckpointError):
    """The disk refused an effect. Nothing that was saved before is lost; the same command resumes."""


class DocumentError(CkptError):
    """Something about one document or the file it goes to."""


class DocumentFailed(DocumentError):
    """A rollout raised. What other documents got is saved."""


class DocumentNotSerializable(DocumentError):
    """A document holds a value that can be neither kept in the journal nor written."""


class OutputFailed(DocumentError):
    """A finished chunk could not be written to the output folder. Its journal is kept."""


class ServerError(CkptError):
    """Something about the inference server as a whole."""


class ServerStartFailed(ServerError):
    """The server never became ready."""


class ServerDied(ServerError):
    """The server was ready and is gone."""


class ServerRefused(ServerError):
    """The server refuses every request of this run (401, 403, 404)."""


class RequestError(CkptError):
    """Something about one request."""


class RequestRejected(RequestError):
    """The server says that this request can never succeed (400, 413, 422).

    Its text starts with ``BadRequestError``, the word datatrove's rollouts look for.
    """

    def __init__(self, status: int, body: str) -> None:
        self.status = status
        self.body = body
        super().__init__(f"BadRequestError: HTTP {status}: {body}")

    def __reduce__(self) -> tuple[type[RequestRejected], tuple[int, str]]:
        return type(self), (self.status, self.body)


class RequestFailed(RequestError):
    """A request was given up after its last retry."""
