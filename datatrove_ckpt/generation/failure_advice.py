"""Advises what to do about a failed document or request: a sentence, and settings.

The text of a server's error chooses only the advice.
"""

import re
from collections.abc import Mapping

from datatrove_ckpt.common.formatting import plural, safe_repr
from datatrove_ckpt.common.retrying import OF_ONE_TEXT
from datatrove_ckpt.config.generation_params import max_tokens_of
from datatrove_ckpt.errors import (
    CkptError,
    RequestFailed,
    RequestRejected,
    ServerRefused,
    ServerUnavailable,
    causes,
)
from datatrove_ckpt.generation.datatrove_errors import DocumentFailed
from datatrove_ckpt.generation.runner_settings import RunnerSettings
from datatrove_ckpt.generation.user_rollout import name_of
from datatrove_ckpt.rollouts import InvalidAnswer

_ACCEPTED = {"accept_changes": True}
_AS_DEAD_LETTERS = {"on_document_error": "dead_letter"}
_RUN_AGAIN = "Fix the cause and run the same command again."
_WITHOUT_SUCH = (
    "To continue without such documents, as dead letters, set on_document_error to dead_letter."
)

# The words of vLLM, SGLang, llama.cpp and OpenAI.
_TOO_LONG = re.compile(
    r"(?:context.(?:length|size|window)|max(?:imum)?.(?:model|context|sequence|input).len"
    r"|exceed_context_size|longer than the (?:model|maximum))(?:\D{0,20}(\d+))?",
    re.IGNORECASE,
)
_PROMPT_TOKENS = re.compile(
    r"(\d+) (?:(?:tokens )?(?:in|from) (?:the|your) (?:input|messages|prompt)"
    r"|(?:input|prompt) tokens)"
)


def describe_document(doc_id: str, ordinal: int) -> str:
    return f"document {safe_repr(doc_id)} (number {ordinal} of this task)"


def advice_for(
    error: BaseException, step: RunnerSettings
) -> tuple[str, list[Mapping[str, object]]]:
    """Returns the advice for a failed document, and the settings that it names."""
    advice, changes = _advice(error)
    if step.checkpoints_local_dir is None:
        return advice, changes
    is_ready_made = type(step.rollout_fn).__module__ == InvalidAnswer.__module__
    if not step.accept_changes and not is_ready_made:
        advice += (
            f" If you change the code of the rollout {name_of(step.rollout_fn)} for that, set "
            "accept_changes: what is done and paid is kept, and the new code works on the "
            "documents that are not done."
        )
        return advice, [_ACCEPTED, *changes]
    if any(isinstance(cause, InvalidAnswer) for cause in causes(error)):
        advice = (
            "These answers are also saved, so the same command fails again. "
            f"{_WITHOUT_SUCH} A new run drops them with invalid_answer: drop."
        )
        return advice, [_AS_DEAD_LETTERS]
    return advice, changes


def _advice(error: BaseException) -> tuple[str, list[Mapping[str, object]]]:
    rejected = next((cause for cause in causes(error) if isinstance(cause, RequestRejected)), None)
    if rejected is None:
        if any(isinstance(cause, RequestFailed) for cause in causes(error)):
            return f"{_RUN_AGAIN} {_WITHOUT_SUCH}", [_AS_DEAD_LETTERS]
        return _RUN_AGAIN, []
    advice = ""
    payload = getattr(error, "payload", None) or {}
    if too_long := _TOO_LONG.search(rejected.body):
        context = int(too_long[1] or 0)
        max_tokens = max_tokens_of(payload)
        prompt = 1
        if prompt_match := _PROMPT_TOKENS.search(rejected.body):
            prompt = int(prompt_match[1])
        if max_tokens + prompt > context > prompt:
            lower = min(context // 2, context - prompt)
            advice = (
                f"max_tokens is {max_tokens}, and the model's context, which also holds the "
                f"prompt, is {context}. To continue, lower it, to {lower} for example, and set "
                "accept_changes."
            )
            return advice, [{"max_tokens": lower, **_ACCEPTED}]
        advice = (
            "The prompt is longer than the model's context. ChunkedRollout splits long documents. "
        )
    if "schema" in rejected.body.lower() and "response_format" in payload:
        advice = (
            "Correct the schema, and set accept_changes. A strict schema, as of OpenAI's API, "
            "requires each of its properties, with the type null if it may be missing, and has "
            "additionalProperties: false."
        )
        return advice, [_ACCEPTED]
    fault = "If the server was at fault, correct it"
    if rejected.remembered:
        fault = "The request was not sent this time"
    advice += f"{fault}; to send the request again, set retry_errors."
    return advice, [{"retry_errors": True}]


def offer_skipping(error: BaseException) -> None:
    """Adds advice to the error: how to continue without documents whose requests are rejected.

    Only for a rank that has answers: otherwise all its requests may be rejected.
    """
    rejected = any(isinstance(cause, RequestRejected) for cause in causes(error))
    if isinstance(error, DocumentFailed) and rejected:
        error.args += (
            " To continue without each document whose request is rejected, as a dead letter, set "
            "skip_bad_requests.",
        )
        error.changes = [{"skip_bad_requests": True}, *error.changes]


def unanswered(doc_id: str, ordinal: int, error: CkptError, answered_requests: int) -> CkptError:
    """Returns the error that stops the rank after a server failed for a request of this
    document.

    Args:
        answered_requests: number of answered requests, once no further request can be answered.
    """
    document = describe_document(doc_id, ordinal)
    is_away = isinstance(error, ServerUnavailable)
    facts = str(error)
    if answered_requests and (
        is_away or (isinstance(error, ServerRefused) and error.status in OF_ONE_TEXT)
    ):
        facts = f"{error.args[0]} {plural(answered_requests, 'other request')} had answers."
    elif is_away:
        return ServerUnavailable(f"{error} A request of {document} is waiting.")
    elif not isinstance(error, RequestFailed):
        return error
    message = (
        f"A request of {document} has no answer. {facts} This does not show that the document is "
        "at fault, so there is no dead letter. If the server is at fault, correct it, and run the "
        "same command again. To continue without this document, let the rollout return None for it "
        "before any request, and set accept_changes."
    )
    if isinstance(error, RequestFailed):
        return DocumentFailed(message, error=error, changes=[_ACCEPTED])
    error.args = (message,)
    error.changes = [_ACCEPTED]
    return error
