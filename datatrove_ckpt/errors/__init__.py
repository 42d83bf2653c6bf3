"""The errors of this package. Each message names what happened, where, and what to do next.

CkptError
├── ConfigError
├── CheckpointError
│   ├── CheckpointCorrupt      no crash can leave such a file
│   ├── CheckpointMismatch     another run, or a changed input
│   │   └── VersionMismatch    another version of this package
│   ├── OutputMismatch         the output folder differs from the checkpoint
│   ├── CheckpointLocked       another process works on this rank
│   │   └── Fenced             another process took over this rank
│   └── StorageFailed
├── InputError                 a damaged input file, or one without documents
├── DocumentError
│   ├── DocumentFailed
│   ├── DocumentNotSerializable
│   ├── InvalidFileName
│   ├── TooManyDeadLetters
│   └── OutputFailed           a finished chunk could not be written or published
├── TooManyOpenFiles           ulimit -n
├── UnexpectedExit             sys.exit in code that the rank ran
├── GivenUp                    tasks wait until their cause is corrected
├── WorkerDied
├── Preempted                  the same command resumes
├── WaitsForBatches            --no-wait: the same command collects the answers
├── LimitReached               max_cost or max_total_tokens: a higher limit resumes
│   └── GoalReached            until: that many documents are in the output
├── ServerError
│   ├── ServerStartFailed
│   ├── ServerDied             it has no restart left
│   ├── ServerUnavailable      no request is answered
│   └── ServerRefused          no request of this run can succeed
└── RequestError
    ├── RequestRejected        this request can never succeed; kept in the request cache
    ├── RequestFailed          given up after every retry
    ├── RequestPoisoned        this request kills servers
    └── BadAnswer              on_loop, on_refusal or on_cut_off sets its document aside

Rollouts see datatrove's own ``InferenceError`` and ``ServerError``. Their ``error`` attribute holds
one of the errors above. This room imports no other room.
"""

import json
import os
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

# Control characters except line break and tab, bidirectional marks, line separators, lone
# surrogates.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Returns the text for a terminal, with control characters escaped as in JSON."""
    return _UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text.replace("\r\n", "\n"))


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yields the error, its causes and the members of groups, each once."""
    waiting: list[object] = [error]  # keeps them alive, so that no other object gets their ids
    seen: set[int] = set()
    for candidate in waiting:
        if id(candidate) not in seen:
            seen.add(id(candidate))
            if isinstance(candidate, list | tuple):  # which may contain itself
                waiting += candidate
            elif isinstance(candidate, BaseException):
                yield candidate
                # The error of datatrove's, the members of a group.
                parts = getattr(candidate, "error", None), getattr(candidate, "exceptions", None)
                waiting += [candidate.__cause__ or candidate.__context__, candidate.args, *parts]


class CkptError(Exception):
    """Base of every error of this package. Raised itself, it means that tasks of a cluster are not
    complete.

    Messages quote servers, documents and files. Python prints them when an error ends a script.

    Args:
        setting: the setting that the message is about. Its name stands before the message, as the
            user wrote it.
        changes: settings with which the same command continues. Each mapping is one way, the best
            way first. The command line prints them as whole commands.
        starts_over: a run from the beginning helps, which may take over the old results. The
            message ends with how to start it.

    Attributes:
        prefix: names of the model and endpoint, before the message.
        advice: sentences after the message, each after a space.
        exit_code: exit code of a rank or worker that the error stops, for a scheduler such as
            Kubernetes. 2 and 4 stop all ranks, 3 this rank; 143 restarts it always, 1 a few times;
            75 means "later", as in sysexits.
        may_pass: another attempt may succeed.
    """

    exit_code = 1
    may_pass = False
    prefix = ""
    advice = ""

    def __init__(
        self,
        *parts: object,
        setting: str = "",
        changes: Sequence[Mapping[str, object]] = (),
        starts_over: Literal["", "anew", "with old results"] = "",
    ) -> None:
        if setting:
            parts = (f"{setting_name(setting)}: ", *parts)
        if starts_over:
            parts = (*parts, f" {start_over(starts_over == 'with old results')}")
        Exception.__init__(self, *parts)
        self.setting = setting
        self.changes = changes
        self.starts_over = starts_over

    def __str__(self) -> str:
        message = "".join(map(str, self.args))
        return printable(with_originals(f"{self.prefix}{message}{self.advice}"))


def _message_in(body: str) -> str:
    try:
        value = json.loads(body)
    except ValueError:
        return body
    if isinstance(value, list) and value:  # Gemini's
        value = value[0]
    for name in ("error", "message", "detail"):
        if isinstance(value, dict):
            value = value.get(name, value)
    if isinstance(value, str):
        return value
    return body


def named(error: CkptError, name: str) -> CkptError:
    if name and not str(error).startswith(f"{name}: "):
        error.prefix = f"{name}: {error.prefix}"
    return error


class ConfigError(CkptError, ValueError):
    """A setting cannot work.

    It is also a ValueError, because datatrove raises that for the same mistakes.
    """

    exit_code = 2


class CheckpointError(CkptError):
    """Base of the errors about a checkpoint folder."""


class CheckpointCorrupt(CheckpointError):
    """A checkpoint file has a content that no crash can leave.

    Causes are a damaged disk, a partial copy, an edit by hand, or a file of another version of this
    package. Restore the file from a copy, or start the rank again with an empty folder.
    """

    def __init__(self, *parts: object) -> None:
        super().__init__(*parts)
        self.path = next((part for part in parts if isinstance(part, Path)), None)
        """The file, if it is a part of the message."""


class CheckpointMismatch(CheckpointError):
    """The checkpoint was made with other settings or from another input.

    Restore the settings or the input, set ``accept_changes``, or use another
    ``checkpoints_local_dir``.
    """

    exit_code = 2


class VersionMismatch(CheckpointMismatch):
    """Another version of this package wrote the checkpoint or its mirror; this version cannot
    continue it.

    Nothing was changed.
    """


class OutputMismatch(CheckpointError):
    """The output folder and the checkpoint differ: committed files are missing or changed, or
    unknown files are there.

    The message names files, and the command that has missing files made again.
    """

    exit_code = 3


class CheckpointLocked(CheckpointError):
    """Another process works on this rank.

    The message names its host and its pid; wait for it, or stop it.
    """


class Fenced(CheckpointLocked):
    """Another process took over this rank after this process had started.

    This process writes nothing more; the other process continues.
    """


class StorageFailed(CheckpointError):
    """The disk refused a write, a sync or a rename. Everything saved before is safe.

    Correct the cause (a full disk, missing permissions, a lost mount), then run the same command
    again.
    """

    may_pass = True


class InputError(CkptError):
    """An input file is damaged or cut off, or none of its lines is a document.

    The rank is not complete. Correct the setting or the file, and run the same command again.
    """

    exit_code = 3


class DocumentError(CkptError):
    """Base of the errors about documents or their output files."""

    exit_code = 3


class DocumentFailed(DocumentError):
    """A rollout raised, or one of its requests could not be answered. The answers of other
    documents are saved.

    Fix the cause and run the same command again, or set ``on_document_error="dead_letter"``.
    """


class DocumentNotSerializable(DocumentError):
    """A document holds a value that the journal cannot keep."""


class InvalidFileName(DocumentError):
    """A document's metadata gives a file name outside the output folder, or one that no file system
    takes.

    Correct the document, or choose another ``output_filename``.
    """


class TooManyDeadLetters(DocumentError):
    """More documents failed than ``max_dead_letters`` allows, so they probably have one cause.

    Fix that cause first.
    """


class OutputFailed(DocumentError):
    """A finished chunk could not be written or uploaded. Its journal is kept, so no request is sent
    again.

    Correct the cause (a value that the writer cannot write, missing permissions, a remote that
    fails), and run the same command again.
    """

    may_pass = True


class TooManyOpenFiles(CkptError):
    """No more file or connection could be opened. Everything saved before is safe.

    Raise the limit (``ulimit -n``) or lower ``max_concurrent_generations``, and run the same
    command again.
    """


class UnexpectedExit(CkptError):
    """A step before the runner, ``shared_context`` or a rollout called ``sys.exit``, or raised
    another BaseException.

    It would end the process with documents missing, and often with exit code 0. Raise an
    ``Exception`` instead.
    """


class GivenUp(CkptError):
    """Tasks were given up; no process retries them until their cause, which the message names, is
    corrected.
    """

    exit_code = 3


class WorkerDied(CkptError):
    """The worker processes of some tasks were killed, ``max_rank_attempts`` times each, or could
    not be started.

    What they had finished is saved; run the same command again.
    """


class Preempted(CkptError):
    """A signal or the job's time limit stopped the rank early.

    Finished work is saved; the same command resumes.
    """

    exit_code = 128 + signal.SIGTERM


class WaitsForBatches(CkptError):
    """Batches of requests are at the provider, and ``--no-wait`` ends the run meanwhile.

    Run the same command again later: it collects the answers.
    """

    exit_code = os.EX_TEMPFAIL


class LimitReached(CkptError):
    """``max_cost`` or ``max_total_tokens`` ended the run; some tasks are not complete.

    Finished work is saved; the same command with a higher limit resumes.
    """

    exit_code = 4


class GoalReached(LimitReached):
    """``until`` ended the run: at least so many documents are in the output files.

    The same command with a higher number resumes.
    """

    exit_code = 0


class ServerError(CkptError):
    """Base of the errors about an inference server as a whole."""

    may_pass = True


class ServerStartFailed(ServerError):
    """The server never became ready.

    The message shows its command, its exit code and the end of its log.
    """


class ServerDied(ServerError):
    """The server was ready and died.

    A run ends with this error when ``server_max_restarts`` are used up.
    """


class ServerUnavailable(ServerError):
    """No request was answered for ``server_patience_seconds``: the server is away, or fails for all
    requests.

    Finished work is saved. When the server is back, run the same command again.
    """


class ServerRefused(ServerError):
    """The server refuses every request of this run (401, 402, 403, 404 and the like, redirects).

    Check the key, the model's name and the URL. Or its answers have no finish_reason, or have one
    against ``accept_null_finish_reason``: see docs/servers.md.
    """

    status: int | None = None
    body = ""


class RequestError(CkptError):
    """Base of the errors about one request."""


class RequestRejected(RequestError):
    """The server rejected this request for good (400, 413, 414, 422, 431). ``retry_errors`` sends
    it again.

    The message starts with ``BadRequestError``, because datatrove's rollouts search for that word.
    With several models or ``endpoints``, the name of the model or endpoint stands before it.
    """

    def __init__(self, status: int, body: str, remembered: bool = False) -> None:
        self.status = status
        self.body = body
        self.remembered = remembered
        self.message = " ".join(_message_in(body).split())
        """What the server said."""
        super().__init__(f"BadRequestError: HTTP {status}: {self.message}")
        if remembered:
            self.advice = " (a saved answer; retry_errors=True sends it again)"

    @property
    def cause(self) -> str:
        return f"{self.message} ({self.prefix}BadRequestError: HTTP {self.status})"

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.status, self.body, self.remembered), {"prefix": self.prefix}


class RequestFailed(RequestError):
    """A request failed again and again while others were answered. The next run sends it again.

    If its server answered enough others, ``is_documents`` is true, and ``on_document_error``
    decides. Otherwise it stops the rank (``DocumentFailed``).
    """

    may_pass = True
    is_documents = False


class RequestPoisoned(RequestError):
    """This request kills servers: several died with it in flight, one of them with no other
    request.
    """


class BadAnswer(RequestError):
    """An answer loops, refuses or is cut off, also after the retries of ``on_loop``,
    ``on_refusal`` or ``on_cut_off``.

    If the setting ends in "drop", ``is_dropped`` is true, and the rollout gives None. Otherwise the
    document becomes a dead letter.
    """

    is_dropped = False


# names of settings --------------------------------------------------------------------------------
# As the user wrote them, else as datatrove does. The short form of a job has other names for some
# settings of datatrove's. The form belongs to the process, whose ranks share it; a step carries it
# into worker processes and jobs.

SHORT = {
    "checkpoints_local_dir": "run_folder",
    "output_folder": "run_folder",
    "output_writer": "run_folder",
    "logging_dir": "run_folder",
    "data_folder": "input",
    "glob_pattern": "input",
    "model_name_or_path": "model",
    "endpoint_url": "endpoint",
    "rollout_fn": "rollout",
}
"""The settings that have another name in the short form."""

_form = ""
_copies: dict[str, str] = {}


def form() -> str:
    """Returns the source of the settings in the short form: a file, "the command line" or "run()";
    "" if they are in the long form.
    """
    return _form


def use_form(form: str) -> None:
    global _form
    _form = form


@contextmanager
def written_in(form: str) -> Iterator[None]:
    before = _form
    use_form(form)
    try:
        yield
    finally:
        use_form(before)


def name_copy(copy: object, original: str) -> None:
    _copies[str(copy)] = original


def with_originals(text: str) -> str:
    for copy, original in _copies.items():
        text = text.replace(copy, original)
    return text


def setting_name(setting: str) -> str:
    if not _form:
        return setting
    if setting == "executor":
        return _form
    # The short form has these settings beside the others.
    for outer in ("default_generation_params.", "rollout_fn."):
        setting = setting.removeprefix(outer)
    return SHORT.get(setting, setting)


def start_over(keeps_results: bool) -> str:
    folders = "checkpoints_local_dir, output_folder and logging_dir"
    old = "output_folder and checkpoints_local_dir"
    if _form:
        folders = "run_folder"
        old = "run_folder"
    if keeps_results:
        return f"To start over, choose another {folders}, and set finished_from to the old {old}."
    return f"To start over, choose another {folders}."


def step_name(index: int, step: object) -> str:
    name = type(step).__name__
    if _form:
        return name
    return f"pipeline[{index}] {name}"


def step_place(index: int, step: object) -> str:
    return _form or step_name(index, step)


def setting_of(setting: str, place: str) -> str:
    if _form:
        return setting_name(setting)
    return f"{setting} of {place}"
