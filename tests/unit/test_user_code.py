"""A rollout that cannot work is refused when the step is made; whatever worked before is still
accepted.
"""

import functools
import types

import pytest

from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.generation.user_rollout import bind_shared, check_rollout
from datatrove_ckpt.rollouts import PromptRollout, chat
from tests.jobs import ask, documents, runner


async def with_lexicon(document, generate, lexicon):
    return await ask(document, generate)


def hands_on(document, generate):
    return ask(document, generate)


def maybe(document, generate):
    result = {"text": document.text}
    result["id"] = document.id
    return result


def logged(function):
    @functools.wraps(function)
    def wrapper(*arguments, **named):
        return function(*arguments, **named)

    return wrapper


@logged
async def decorated(document, generate):
    return await ask(document, generate)


class Callable_:
    async def __call__(self, document, generate, **shared):
        return await ask(document, generate)

    async def method(self, document, generate):
        return await ask(document, generate)


@pytest.mark.parametrize(
    "rollout, context",
    [
        (ask, None),
        (hands_on, None),
        (types.coroutine(lambda document, generate: (yield from ask(document, generate))), None),
        (lambda document, generate: ask(document, generate), None),
        (decorated, None),
        (Callable_(), {"anything": 1}),
        (Callable_().method, {}),
        (functools.partial(with_lexicon, lexicon={}), None),
        (with_lexicon, lambda: {"lexicon": {}}),
        (chat, {"anything": 1}),
        (PromptRollout(), None),
        (print, None),  # its source cannot be seen
    ],
)
def test_what_may_work_is_accepted(rollout, context):
    check_rollout(rollout, context)


async def one_parameter(document): ...


async def three_parameters(document, generate, lexicon): ...


async def yields(document, generate):
    yield await ask(document, generate)


@pytest.mark.parametrize("on_document_error", ["stop", "dead_letter"])
@pytest.mark.parametrize(
    "rollout, says",
    [
        (maybe, "maybe is not async: it returned a dict."),
        (yields, "yields must not yield; return the result."),
    ],
)
def test_a_function_that_only_a_document_unmasks_stops_the_rank_and_blames_no_document(
    tmp_path, server, on_document_error, rollout, says
):
    step = runner(tmp_path, server, rollout, on_document_error=on_document_error)
    with pytest.raises(ConfigError) as stopped:
        step.run(documents(3))
    assert f"rollout_fn: {says}" in str(stopped.value)
    assert not (tmp_path / "checkpoints" / "00000" / "dead_letters.jsonl").exists()


def test_a_call_of_the_rollout_shows_no_shared_argument_in_a_traceback():
    async def rollout(document, generate, password):
        return None

    assert "s3cret" not in repr(bind_shared(rollout, {"password": "s3cret"}))
