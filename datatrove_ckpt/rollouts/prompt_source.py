"""Reads the source of a rollout's request: the document's text or a column."""

from __future__ import annotations

import orjson
from datatrove.data import Document

from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.config.templates import lacks
from datatrove_ckpt.errors import ConfigError

Messages = list[JsonObject]


class MessagesText(str):
    """A list of messages as JSON, for the output, which keeps the list for further rollouts."""

    messages: Messages

    @classmethod
    def of(cls, messages: Messages) -> MessagesText:
        text = cls(orjson.dumps(messages, option=orjson.OPT_NON_STR_KEYS).decode())
        text.messages = messages
        return text


def prompt_source(document: Document, column: str | None) -> str | Messages:
    """Returns the document's text, or the value of a metadata column: a text or a list of messages.

    A list in ``document.text`` becomes JSON: the text of an output must be a text.

    Raises:
        ConfigError: the column is missing or null, or a list holds other items than messages.
    """
    if column is None:
        text: object = document.text
        if isinstance(text, list):
            document.text = text = MessagesText.of(_checked(document, "text", text))
        if isinstance(text, MessagesText):
            return text.messages
        return str(text)
    if column not in document.metadata:
        raise lacks(document, "prompt_column", column)
    value = document.metadata[column]
    if isinstance(value, list):
        return _checked(document, column, value)
    if value is None or isinstance(value, dict):
        kind = "a mapping"
        if value is None:
            kind = "null"
        raise ConfigError(
            f"prompt_column: {column!r} of document {document.id!r} is {kind}, and neither a text "
            "nor a list of messages. Filter such documents out before the InferenceRunner."
        )
    return str(value)


def chat_in(text: str) -> Messages | None:
    """Parses messages from a JSON text, as in CSV files; returns None if it has none."""
    if not text.lstrip().startswith("["):
        return None
    try:
        messages = orjson.loads(text)
    except ValueError:
        return None
    if messages and all(_is_message(message) for message in messages):
        return list(messages)
    return None


def _checked(document: Document, column: str, value: Messages) -> Messages:
    for number, message in enumerate(value):
        if not _is_message(message):
            raise ConfigError(
                f"{column!r} of document {document.id!r} is a list, but item {number} is no "
                "message: messages have a role and a content."
            )
    if not value:
        raise ConfigError(
            f"{column!r} of document {document.id!r} is an empty list: there is no message to send."
        )
    return value


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str)
