"""Checks the user's rollout function, and binds the arguments of ``shared_context``.

A rollout is refused before the run only if it provably fails: a plain ``def`` may return an
awaitable.
"""

import inspect
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.generation.side_effects import SETUP, watched
from datatrove_ckpt.process.shutdown import no_exit
from datatrove_ckpt.rollouts import ReadyMade, Rollout

if TYPE_CHECKING:
    from datatrove_ckpt.process.preemption import Preemption


def name_of(function: object) -> str:
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__qualname__", type(function).__qualname__))


# Any, because a dict is invariant: a user's dict[str, int] is no dict[str, object].
Shared = dict[str, Any]
SharedManager = AbstractContextManager[Shared]
SharedContext = Shared | Callable[[], Shared | SharedManager] | SharedManager | None

_ADVICE = "Write `async def rollout(document, generate)`, and `await generate(payload)` in it"


class NotAwaitable(ConfigError):
    """A rollout returned something that cannot be awaited."""


def check_rollout(rollout_fn: Rollout, context: SharedContext) -> None:
    if not callable(rollout_fn):
        raise ConfigError(
            f"{rollout_fn!r} is not callable; give an async function.", setting="rollout_fn"
        )
    if inspect.isclass(rollout_fn):
        raise ConfigError(
            f"{rollout_fn.__name__} is a class; give an object of it: {rollout_fn.__name__}(...).",
            setting="rollout_fn",
        )
    _check_call(
        rollout_fn,
        context if isinstance(context, dict) else {},
        complete=isinstance(context, dict | None),
    )


def bind_shared(rollout_fn: Rollout, shared: Shared) -> Rollout:
    """Binds the shared arguments. Calls raise ``NotAwaitable`` if the result cannot be awaited.

    Raises:
        ConfigError: the function cannot be called with these arguments, or a file that it needs is
            missing here.
    """
    _check_call(rollout_fn, shared, complete=True)
    if isinstance(rollout_fn, ReadyMade):
        rollout_fn.prepare()
    call = _RolloutCall(rollout_fn, **shared)
    if any(map(inspect.iscoroutinefunction, (rollout_fn, type(rollout_fn).__call__))):
        return call

    def checked(*arguments: object) -> Awaitable[object]:
        result = call(*arguments)
        if not inspect.isawaitable(result):
            kind = type(result).__name__
            wrong = f"is not async: it returned a {kind}. {_ADVICE}"
            if kind.endswith("generator"):
                wrong = "must not yield; return the result"
            raise NotAwaitable(f"{name_of(rollout_fn)} {wrong}.", setting="rollout_fn")
        return result

    return checked


class _RolloutCall(partial[Any]):
    """A call of the user's function, whose ``repr`` hides the arguments, which may be secrets."""

    def __repr__(self) -> str:
        return name_of(self.func)


def _check_call(rollout_fn: Rollout, shared: Shared, complete: bool) -> None:
    try:
        signature = inspect.signature(rollout_fn)
    except (TypeError, ValueError):
        return  # some callables of other languages have no signature
    if next(iter(signature.parameters), "") == "generate":
        raise ConfigError(
            f"{name_of(rollout_fn)} takes generate first, and gets the document first. {_ADVICE}.",
            setting="rollout_fn",
        )
    bind = signature.bind if complete else signature.bind_partial
    try:
        bind("document", "generate", **shared)
    except TypeError as error:
        call = ", ".join(["document", "generate", *(f"{name}=..." for name in shared)])
        raise ConfigError(
            f"{name_of(rollout_fn)} cannot be called as rollout({call}): {error}. Its parameters "
            "must be document, generate, and the names in shared_context.",
            setting="rollout_fn",
        ) from None


@contextmanager
def shared_arguments(context: SharedContext, preemption: "Preemption") -> Iterator[Shared]:
    """Enters ``shared_context``, in any of its four forms, and yields the arguments.

    Raises:
        ConfigError: it returned something other than a dict.
        UnexpectedExit: it tried to end the process.
    """
    # The object that a @contextmanager function returns is also callable: check for a context
    # manager first.
    with ExitStack() as stack:
        with (
            no_exit("shared_context", preemption.shutdown),
            preemption.interruptible(),
            watched(SETUP),
        ):
            arguments = context
            if not isinstance(arguments, AbstractContextManager) and callable(arguments):
                arguments = arguments()
            if isinstance(arguments, AbstractContextManager):
                arguments = stack.enter_context(arguments)
        if arguments is None:
            arguments = {}
        if not isinstance(arguments, dict):
            raise ConfigError(
                f"shared_context: gave a {type(arguments).__name__} instead of a dict."
            )
        yield arguments
