"""One place knows which names mean a secret, and how its value is hidden."""

from __future__ import annotations

import pytest

from datatrove_ckpt.redaction import (
    HiddenBytes,
    HiddenDict,
    Key,
    Veil,
    holds_credentials,
    may_name_secret,
    names_secret,
    without_secrets,
)


@pytest.mark.parametrize(
    "name",
    ["api_key", "apikey", "key", "token", "config.hf_token", "--auth-token", "aws_secret_access_key", "client_secret",
     "Password", "db passwd", "sas_token", "credentials"],
)  # fmt: skip
def test_a_name_that_ends_like_a_secret_means_one(name: str) -> None:
    assert names_secret(name)


@pytest.mark.parametrize(
    "name", ["max_tokens", "tokenizer", "keyboard", "prompt", "monkey", "secretary", "tokens", "chars_per_token"]
)
def test_a_name_that_only_holds_such_a_word_does_not(name: str) -> None:
    assert not names_secret(name)


def test_no_repr_shows_a_secret() -> None:
    shown = [
        repr(Key("s3cret")),
        repr(Key("s3cret").headers()),
        repr(HiddenDict(a="s3cret")),
        repr(HiddenBytes(b"s3cret")),
    ]
    assert not any("s3cret" in text for text in shown)


@pytest.mark.parametrize(
    ("url", "held"),
    [("s3://bucket/folder", False), ("https://me:pw@host/v1", True), ("sftp://me@host/x", True), ("/a/b@c:d", False)],
)
def test_a_user_or_password_in_a_url_is_found(url: str, held: bool) -> None:
    assert holds_credentials(url) is held


@pytest.mark.parametrize(
    "name",
    ["hftoken", "authToken", "accesskey", "s3-SecretKey", "adminpassword", "passwd", "hf-credentials", "api_keys",
     "password_text", "secret_name"],
)  # fmt: skip
def test_messages_hide_every_name_that_holds_such_a_word(name: str) -> None:
    assert may_name_secret(name)
    assert not may_name_secret("max-num-batched-tokens")


@pytest.mark.parametrize(
    "value",
    [
        {"openai_api_key": "s3cret"},
        {"cfg": [{"nested": {"password": "s3cret"}}]},
        {"extra_headers": {"Authorization": "s3cret", "X-Team": "s3cret"}},
        {"authorization": "s3cret"},
        {"hftoken": "s3cret-s3cret"},
        {"client": "sk-s3crets3cret12"},
        {"client": "hf_s3crets3cret12"},
        {"client": "Authorization: Bearer s3crets3cret"},
        {"proxy": "https://me:s3cret@host/"},
    ],
)
def test_a_secret_among_plain_values_is_replaced_by_its_hash(value: dict[str, object]) -> None:
    hidden = without_secrets("shared_context", value)
    assert "s3cret" not in str(hidden)
    assert "hash " in str(hidden)
    assert without_secrets("shared_context", hidden) == hidden
    assert "s3cret" not in str(Veil("shared_context", value))


def test_plain_values_stay_as_they_are() -> None:
    value = {"temperature": 0.5, "max_tokens": 7, "prompt": "Find the key sk-1.", "keyword": "short", "stop": ["a"]}
    assert without_secrets("shared_context", value) == value
