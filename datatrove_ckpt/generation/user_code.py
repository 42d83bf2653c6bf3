"""The user's code that a rank calls: what the rollout function gets besides the document and ``generate``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeAlias

from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.process.preemption import Preemption

# Any, because a dict is invariant: a user's dict[str, int] is no dict[str, object].
Shared: TypeAlias = dict[str, Any]
SharedManager: TypeAlias = AbstractContextManager[Shared]
SharedContext: TypeAlias = Shared | Callable[[], Shared | SharedManager] | SharedManager | None


@contextmanager
def open_shared(context: SharedContext, preemption: Preemption) -> Iterator[Shared]:
    """The keyword arguments for the rollout, from any of the four forms of ``shared_context``."""
    # The object that a @contextmanager function returns is callable, too: check for a context manager first.
    if not isinstance(context, AbstractContextManager) and callable(context):
        with preemption.interruptible():
            context = context()
    if isinstance(context, AbstractContextManager):
        with ExitStack() as stack:
            with preemption.interruptible():
                entered = stack.enter_context(context)
            yield entered or {}
    elif context is None or isinstance(context, dict):
        yield context or {}
    else:
        raise ConfigError(f"shared_context: gave a {type(context).__name__} instead of a dict.")
