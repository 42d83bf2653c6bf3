"""How a rank is asked to stop, as its settings say. See ``preemption.py``."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from datatrove_ckpt.errors import ConfigError

SIGNALS = ("SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP")
# Slurm kills 30 s (KillWait) after SIGTERM. That leaves 10 s to stop the server and to requeue the job.
DRAIN_SECONDS = 20.0


def check_signals(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the names unchanged.

    Raises:
        ConfigError: a name is not a signal, or a signal that no process can catch.
    """
    if isinstance(names, str):
        raise ConfigError(f"drain_signals: must be a list of names such as {list(SIGNALS)}; it is {names!r}.")
    for name in names:
        if name not in signal.Signals.__members__:
            raise ConfigError(f"drain_signals: {name!r} is no signal of this system; give names such as SIGTERM.")
        if name in ("SIGKILL", "SIGSTOP"):
            raise ConfigError(f"drain_signals: no process can catch {name}.")
    return tuple(names)
