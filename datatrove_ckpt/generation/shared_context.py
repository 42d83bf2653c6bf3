"""``shared_context``: the keyword arguments of the rollout, in any of its four forms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.generation.exits import no_exit

if TYPE_CHECKING:
    from datatrove_ckpt.process.preemption import Preemption

# Any, because a dict is invariant: a user's dict[str, int] is no dict[str, object].
Shared: TypeAlias = dict[str, Any]
SharedManager: TypeAlias = AbstractContextManager[Shared]
SharedContext: TypeAlias = Shared | Callable[[], Shared | SharedManager] | SharedManager | None


@contextmanager
def shared_arguments(context: SharedContext, preemption: Preemption) -> Iterator[Shared]:
    """Enters the context and gives the arguments.

    Raises:
        ConfigError: it gave something else than a dict.
        UnexpectedExit: it tried to end the process.
    """
    # The object that a @contextmanager function returns is callable, too: check for a context manager first.
    if not isinstance(context, AbstractContextManager) and callable(context):
        with no_exit("shared_context", preemption.shutdown), preemption.interruptible():
            context = context()
    if isinstance(context, AbstractContextManager):
        with ExitStack() as stack:
            with no_exit("shared_context", preemption.shutdown), preemption.interruptible():
                entered = stack.enter_context(context)
            yield entered or {}
    elif context is None or isinstance(context, dict):
        yield context or {}
    else:
        raise ConfigError(f"shared_context: gave a {type(context).__name__} instead of a dict.")
