"""Finds the places in the user's code from which an error or a call came, for messages, and warns
of a rollout that blocks the event loop, where an agent would wait for itself.
"""

import asyncio
import sys
import sysconfig
import threading
from collections import defaultdict
from pathlib import Path
from traceback import walk_stack, walk_tb
from types import CodeType

from loguru import logger

import datatrove_ckpt
from datatrove_ckpt.common.threads import in_thread


def first_failure(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


_PACKAGE = str(Path(datatrove_ckpt.__file__).parent)
_INSTALLED = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)


def user_frame_of(error: BaseException) -> str:
    """Returns the line of the user's code as ", in job.py, line 9 (rollout)"; "" if our own code
    raised the error.

    For an error of a library, this is the line of the user's call.
    """
    frames = [(frame.f_code, line) for frame, line in walk_tb(first_failure(error).__traceback__)]
    if not frames or is_package_code(frames[-1][0]):
        return ""
    outside = [frame_line for frame_line in frames if not is_package_code(frame_line[0])]
    user_frames = [
        frame_line for frame_line in outside if not frame_line[0].co_filename.startswith(_INSTALLED)
    ]
    return _line_text(*(user_frames or outside)[-1])


def user_call_site() -> str:
    for frame, line in walk_stack(sys._getframe()):
        # Not by its file: a dataclass has an __init__ without one.
        if str(frame.f_globals.get("__name__")).partition(".")[0] != datatrove_ckpt.__name__:
            if frame.f_code.co_filename.startswith(_INSTALLED):
                return ""
            return _line_text(frame.f_code, line)
    return ""


def runs_at(thread: int) -> str:
    """Returns the line of the user's code that a thread runs, formatted as in ``user_frame_of``; ""
    if it runs our code, or no user code.
    """
    for frame, line in walk_stack(sys._current_frames().get(thread)):
        if is_package_code(frame.f_code):
            return ""
        if not frame.f_code.co_filename.startswith(_INSTALLED):
            return _line_text(frame.f_code, line)
    return ""


def stands_at(thread: int) -> str:
    line = runs_at(thread)
    frame = sys._current_frames().get(thread)
    if line or frame is None:
        return line
    return _line_text(frame.f_code, frame.f_lineno)


def is_package_code(code: CodeType) -> bool:
    return code.co_filename.startswith(_PACKAGE)


def _line_text(code: CodeType, line: int) -> str:
    path = Path(code.co_filename)
    here = Path.cwd()
    relative_path = path
    if path.is_relative_to(here):
        relative_path = path.relative_to(here)
    return f", in {relative_path}, line {line} ({code.co_name})"


# a blocked event loop -----------------------------------------------------------------------------


_BLOCKED_SECONDS = 10.0
_watching: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)
"""A lock for each loop's thread: one of the ranks on that loop watches at a time."""
_named = {""}


async def warn_when_blocked() -> None:
    beat = threading.Event()
    has_ended = threading.Event()
    loop_thread = threading.get_ident()

    def watch() -> None:
        with _watching[loop_thread]:
            while not has_ended.is_set():
                if beat.wait(_BLOCKED_SECONDS):
                    beat.clear()
                    continue
                line = runs_at(loop_thread)
                if line not in _named:
                    _named.add(line)
                    logger.warning(
                        f"For {_BLOCKED_SECONDS:g} s, the rollout has blocked the event "
                        f"loop{line}, and all other requests. Move the call into a thread: "
                        "`await asyncio.to_thread(function, ...)`."
                    )
                beat.wait()
                beat.clear()

    in_thread(watch, "datatrove-ckpt loop watch")
    try:
        while True:
            beat.set()
            await asyncio.sleep(1.0)
    finally:
        has_ended.set()
        beat.set()
