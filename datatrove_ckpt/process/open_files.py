"""Raises the limit on open files to what a rank needs, and names it in errors when it is reached.

Each request in flight is an open file, here and in the server, which inherits the limit. The soft
limit is often 1024, and a process may raise it up to the hard limit. It is raised no higher than
needed: some programs walk through all numbers up to the limit, and ``select`` fails above 1024.
"""

import errno
import os
import resource
from contextlib import suppress
from typing import Literal

from loguru import logger

from datatrove_ckpt.errors import ConfigError, TooManyOpenFiles

# The lifeline pipe, the log while it starts, one connection for health and one for metrics.
_PER_SERVER = 4
# 64 journals, the database with its log, a staged file, input files, uploads and the mirror's
# connections.
_FILES = 128
# What a library may open in addition, if the hard limit has room.
_SPARE = 256
# Under "auto", per server: more than any engine runs by default (vLLM 1024).
_MOST_PER_SERVER = 4096
_FEWEST = 64


def files_needed(requests: int, servers: int) -> int:
    try:
        opened = sum(1 for _ in os.scandir("/dev/fd"))
    except OSError:
        opened = 32
    return opened + requests + servers * _PER_SERVER + _FILES


def requests_at_once(setting: int | Literal["auto"], servers: int) -> int:
    """Returns how many requests may be in flight at once.

    Args:
        setting: ``max_concurrent_generations``, for each server. For "auto", as many as the hard
            limit allows: 64 at least, and 4096 per server at most.
    """
    if setting != "auto":
        return setting * servers
    # Connections to one of several servers may be idle while all requests go to the others.
    fitting = (limits()[1] - files_needed(0, servers) - _SPARE) // (2 if servers > 1 else 1)
    return max(_FEWEST, min(_MOST_PER_SERVER * servers, fitting))


def raise_limit(requests: int, servers: int, ranks: int = 1) -> int:
    """Raises the soft limit to what the rank needs.

    Returns:
        How many of these ranks the limit allows at one time, at least one.

    Raises:
        ConfigError: the hard limit is too low. Only an administrator can raise it.
    """
    needed = files_needed(requests, servers)
    other_ranks_files = (ranks - 1) * _FILES
    make_room(needed + other_ranks_files + _SPARE + (requests if servers > 1 else 0))
    allowed = limits()[0]
    if allowed < needed:
        raise ConfigError(too_low(requests, servers, needed, allowed))
    at_once = min(ranks, 1 + (allowed - needed) // _FILES)
    if at_once < ranks:
        logger.warning(
            f"Only {at_once} of {ranks} tasks run at one time: they need "
            f"{needed + other_ranks_files} open files, and this process may have {allowed} "
            "(ulimit -n)."
        )
    return at_once


def make_room(files: int) -> None:
    soft, hard = limits()
    wanted = min(files, hard)
    if soft < wanted:
        with suppress(ValueError, OSError):  # some systems allow less than the hard limit
            resource.setrlimit(
                resource.RLIMIT_NOFILE, (wanted, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
            )


def too_low(requests: int, servers: int, needed: int, allowed: int) -> str:
    fitting = (allowed - (needed - requests)) // servers
    lower = ""
    if fitting > 0:
        lower = f", or set max_concurrent_generations to at most {fitting}"
    return (
        f"max_concurrent_generations: {requests} requests at once need {needed} open files, and "
        f"this process may have {allowed} (ulimit -Hn). Raise the limit where the tasks run "
        f"(ulimit -n {needed}){lower}."
    )


def limits() -> tuple[int, int]:
    both = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (2**31 - 1 if limit == resource.RLIM_INFINITY else limit for limit in both)
    return soft, hard


def refuse_exhaustion(error: BaseException, action: str) -> None:
    """Raises TooManyOpenFiles if the error means that the limit is reached."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        raise TooManyOpenFiles(
            f"{action}: too many open files (this process may have {limits()[0]}). Raise the "
            "limit (ulimit -n) or lower max_concurrent_generations, and run again."
        ) from error


# Descriptors that forks close: a copy of a lifeline pipe would keep a server running, and a copy of
# a lock would keep a GPU leased, or a rank locked. Programs get only ``pass_fds``.


_ours: set[int] = set()


def own_descriptor(descriptor: int) -> int:
    """Makes forks close the descriptor, and returns it."""
    _ours.add(descriptor)
    return descriptor


def close_descriptor(descriptor: int) -> None:
    """Closes a descriptor of this process, unless a fork has closed it already."""
    if descriptor in _ours:
        _ours.discard(descriptor)
        os.close(descriptor)


def _close_all() -> None:
    while _ours:
        os.close(_ours.pop())


os.register_at_fork(after_in_child=_close_all)
