"""Which frames of an error are the user's: where a rollout has raised, and tracebacks without our own frames.

Frames of this package tell a user nothing: what an error of ours means is in its message.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import datatrove_ckpt
from datatrove_ckpt.errors import causes

_PACKAGE = str(Path(datatrove_ckpt.__file__).parent)
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def raised_at(error: BaseException) -> str:
    """The place in the user's code as ", in job.py, line 9 (rollout)"; "" if our own code raised it.

    In a library that the user's code called, it is the call.
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    frames = list(_frames(error.__traceback__))
    if not frames or _is_ours(frames[-1]):
        return ""
    others = [frame for frame in frames if not _is_ours(frame)]
    own = [frame for frame in others if not frame.tb_frame.f_code.co_filename.startswith(_INSTALLED)]
    place = (own or others)[-1]
    code = place.tb_frame.f_code
    return f", in {_shown(code.co_filename)}, line {place.tb_lineno} ({code.co_name})"


def cut_own_frames(error: BaseException) -> None:
    """Removes our own frames from the tracebacks of an error of ours and of its causes. The user's frames stay."""
    for cause in causes(error):
        cause.__traceback__ = None if cause is error else _after_ours(cause.__traceback__)


def _after_ours(trace: TracebackType | None) -> TracebackType | None:
    """What follows the last of our frames at the beginning; the last one itself if nothing follows."""
    while trace is not None and trace.tb_next is not None and _is_ours(trace):
        trace = trace.tb_next
    return trace


def _frames(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _is_ours(frame: TracebackType) -> bool:
    return frame.tb_frame.f_code.co_filename.startswith(_PACKAGE)


def _shown(name: str) -> str:
    path, here = Path(name), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else name
