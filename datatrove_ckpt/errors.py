"""Every error this package raises on purpose. Each message says what happened, where, and what to do next.

CkptError
├── ConfigError                a setting that cannot work; names the key, its value and what is allowed
├── CheckpointError
│   ├── CheckpointCorrupt      a checkpoint file that no crash of ours can explain; names file and line
│   ├── CheckpointMismatch     the checkpoint belongs to another run, or the input changed under it
│   ├── CheckpointLocked       another process works on this rank
│   │   └── Fenced             another process has taken this rank over meanwhile
│   └── StorageFailed          the disk refused a write, a sync or a rename
├── DocumentError
│   ├── DocumentFailed         a rollout raised, or a request of it could not be answered
│   ├── DocumentNotSerializable  a value in a document that cannot be kept or written
│   ├── TooManyDeadLetters     more documents failed than max_dead_letters allows
│   └── OutputFailed           a finished chunk could not be written or published
├── Preempted                  told to end early, by a signal or the job's time limit; the same command resumes
├── ServerError
│   ├── ServerStartFailed      never became ready; holds the command, the exit code and the log's tail
│   ├── ServerDied             was ready, is gone, and may not be restarted once more
│   └── ServerRefused          401, 403, 404: no request of this run can succeed
└── RequestError
    ├── RequestRejected        400, 413, 422: this request can never succeed; kept in the request cache
    ├── RequestFailed          given up after every retry; asked for again by the next run
    └── RequestPoisoned        kills the server: it did so alone, after several deaths it had a part in

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


class Fenced(CheckpointLocked):
    """Another process has taken this rank over since this one started. This one writes nothing more."""


class StorageFailed(CheckpointError):
    """The disk refused an effect. Nothing that was saved before is lost; the same command resumes."""


class DocumentError(CkptError):
    """Something about one document or the file it goes to."""


class DocumentFailed(DocumentError):
    """A rollout raised. What other documents got is saved."""


class DocumentNotSerializable(DocumentError):
    """A document holds a value that can be neither kept in the journal nor written."""


class TooManyDeadLetters(DocumentError):
    """More documents became dead letters than the user allows: something is wrong with all of them."""


class OutputFailed(DocumentError):
    """A finished chunk could not be written to the output folder. Its journal is kept."""


class Preempted(CkptError):
    """The rank was told to end before its documents were done. What was finished is saved."""


class ServerError(CkptError):
    """Something about the inference server as a whole."""


class ServerStartFailed(ServerError):
    """The server never became ready."""


class ServerDied(ServerError):
    """The server was ready and is gone; inside a run that means: more often than ``server_max_restarts`` allows."""


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


class RequestPoisoned(RequestError):
    """A request that was in flight at several deaths of servers, and then killed one that had nothing else to do."""
