"""Which frames of an error are the user's: where a rollout has raised, and tracebacks without our own frames.

Frames of this package tell a user nothing: what an error of ours means is in its message.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from traceback import walk_stack, walk_tb
from types import CodeType, TracebackType

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
    places = [(frame.f_code, line) for frame, line in walk_tb(error.__traceback__)]
    if not places or _is_ours(places[-1][0]):
        return ""
    others = [place for place in places if not _is_ours(place[0])]
    own = [place for place in others if not place[0].co_filename.startswith(_INSTALLED)]
    return _place(*(own or others)[-1])


def called_at() -> str:
    """The place in the user's code that has called ours, as ", in job.py, line 9 (rollout)"; "" if a library has."""
    for frame, line in walk_stack(sys._getframe()):
        if str(frame.f_globals.get("__name__")).partition(".")[0] != datatrove_ckpt.__name__:
            return "" if frame.f_code.co_filename.startswith(_INSTALLED) else _place(frame.f_code, line)
    return ""


def cut_own_frames(error: BaseException) -> None:
    """Removes our own frames from the tracebacks of an error of ours and of its causes. The user's frames stay."""
    for cause in causes(error):
        cause.__traceback__ = None if cause is error else _after_ours(cause.__traceback__)


def _after_ours(trace: TracebackType | None) -> TracebackType | None:
    """What follows the last of our frames at the beginning; the last one itself if nothing follows."""
    while trace is not None and trace.tb_next is not None and _is_ours(trace.tb_frame.f_code):
        trace = trace.tb_next
    return trace


def _is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(_PACKAGE)


def _place(code: CodeType, line: int) -> str:
    path, here = Path(code.co_filename), Path.cwd()
    shown = path.relative_to(here) if path.is_relative_to(here) else path
    return f", in {shown}, line {line} ({code.co_name})"
