"""Secrets: which names mean one, and values that no log, file, pickle or traceback shows.

loguru's ``diagnose`` (on by default, and datatrove logs every failed task with it) prints the value of each name on
each line of a traceback, so a key in a plain ``str`` or a plain ``dict`` ends in a log file one day. The classes here
print ``***``. Names are judged in one place, ``names_secret``: storage options, YAML keys, flags of servers and
constants of a rollout all use it.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import sys
from dataclasses import fields, is_dataclass
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import orjson
import xxhash

from datatrove_ckpt.errors import ConfigError

HIDDEN = "***"
MIRROR_KEY_VARIABLE = "DATATROVE_CKPT_MIRROR_KEY"
"""The environment variable with the key that seals mirrors. Servers do not get it."""
# Characters of a secret that a Redactor looks for: of one that we send, and of one in the environment.
_MIN_GIVEN, _MIN_FROM_ENV = 4, 8

_SECRET_NAME = re.compile(
    r"(^|[._ ])(\w*_)?(api_?key|key|(?<!per_)token|secret|password|passwd|credentials?)$", re.IGNORECASE
)
_SECRET_WORD = re.compile("key|secret|passw|credential|authorization|cookie|(?<!per_)token$", re.IGNORECASE)
# Keys of OpenAI and those who copied its form, the model hub, AWS, Google, GitHub, Groq and Slack; HTTP's two schemes.
_SECRET_VALUE = re.compile(
    r"\b(sk-[\w-]{12,}|hf_\w{12,}|A[KS]IA[A-Z0-9]{12,}|AIza[\w-]{20,}|gh[a-z]_\w{20,}|github_pat_\w{20,}|gsk_\w{12,}|"
    r"xox[a-z]-[\w-]{10,}|(?i:bearer|basic)\s+[\w.+/=~-]{8,})"
)
_HASH = re.compile("hash [0-9a-f]{32}")
_MIN_GUESSED = 8  # characters of a value that only may be a secret, by its name
# Storage options that hold a secret although their names do not end like one.
_SECRET_OPTIONS = {"aws_access_key_id", "connection_string"}


def names_secret(name: str) -> bool:
    """Whether a value with this name is a secret: "api_key", "config.hf_token", "--auth-token"; not "max_tokens".

    Exact, because what it says is acted on: such a storage option is refused, such a constant of a rollout is hashed.
    """
    return _SECRET_NAME.search(name.replace("-", "_")) is not None


def may_name_secret(name: str) -> bool:
    """Whether a value with this name is not to be shown: as ``names_secret``, and every name that holds such a word.

    For messages only, where hiding too much ("--keyboard") costs less than showing a secret ("--hftoken").
    """
    return names_secret(name) or _SECRET_WORD.search(name) is not None


def without_secrets(name: str, value: Any) -> Any:
    """JSON values with a hash in the place of each secret, so that they can be written to a file, and compared.

    A secret is a value with the name of one, everything inside "headers", and a text that has the form of a key. What
    has been replaced before stays as it is.
    """
    if is_secret(name, value):
        return hashed(value)
    if isinstance(value, dict):
        return {key: without_secrets(f"{name}.{key}", part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(name, part) for part in value]
    return value


def holds_secret(name: str, value: Any) -> bool:
    """Whether plain values are a secret, or hold one. Objects, which nobody can look into, count as holding none."""
    if isinstance(value, dict):
        return is_secret(name, value) or any(holds_secret(f"{name}.{key}", part) for key, part in value.items())
    if isinstance(value, list | tuple):
        return is_secret(name, value) or any(holds_secret(name, part) for part in value)
    return isinstance(value, str | bytes) and is_secret(name, value)


def is_secret(name: str, value: Any) -> bool:
    """Whether a value is a secret, by its dotted name or its form. A dict or list may hold some although it is none."""
    if names_secret(name):
        return True
    if not isinstance(value, str):
        return False
    outer, _, last = name.rpartition(".")
    if outer.lower().endswith("headers") or last.lower() == "authorization":
        return True
    # "keyword": "short" and "key_prompt": "Name the key." are none.
    guessed = may_name_secret(last) and len(value) >= _MIN_GUESSED and value.isprintable() and " " not in value
    named = last.endswith("_env")  # the name of a variable
    return (guessed and not named) or _SECRET_VALUE.search(value) is not None or holds_credentials(value)


def hashed(value: Any) -> str:
    """The hash that stands for a secret."""
    if isinstance(value, str) and _HASH.fullmatch(value):
        return value
    return f"hash {xxhash.xxh3_128_hexdigest(orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS))}"


class Veil:
    """Holds a value of the user's, and shows it without its secrets.

    datatrove writes the attributes of a step to ``executor.json``; of an object that JSON does not know, its ``str``.
    """

    __slots__ = ("name", "value")

    def __init__(self, name: str, value: Any) -> None:
        self.name = name
        self.value = value

    def __repr__(self) -> str:
        value = shown(self.name, self.value)
        return value if isinstance(value, str) else json.dumps(value, skipkeys=True)


class Veiled:
    """An attribute of a class, whose value is kept in a ``Veil``. A pickled object may hold the value itself."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        if instance is None:
            return self
        try:
            value = vars(instance)[self._name]
        except KeyError:
            raise AttributeError(self._name) from None
        return value.value if isinstance(value, Veil) else value

    def __set__(self, instance: object, value: Any) -> None:
        vars(instance)[self._name] = Veil(self._name, value)


def shown(name: str, value: Any) -> Any:
    """A value without its secrets: plain values and settings as they are, of everything else the name of the type."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if is_secret(name, value) or isinstance(value, Key | EnvironmentSecret):
        return HIDDEN
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return {key: shown(f"{name}.{key}", part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [shown(name, part) for part in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: shown(f"{name}.{field.name}", getattr(value, field.name)) for field in fields(value)}
    kind = value if hasattr(value, "__qualname__") else type(value)
    return f"<{kind.__module__}.{kind.__qualname__}>"


class Key:
    """An API key."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    @classmethod
    def wrap(cls, value: Self | str | None) -> Self | None:
        """``value`` as a Key; None stays None."""
        return cls(value) if isinstance(value, str) else value

    def reveal(self) -> str:
        """The key itself. Never bind it to a name: tracebacks show the values of names."""
        return self._value

    def headers(self) -> HiddenDict:
        """The HTTP header that carries the key."""
        return HiddenDict(Authorization=f"Bearer {self._value}")

    def __repr__(self) -> str:
        return HIDDEN

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and self._value == other._value

    def __hash__(self) -> int:
        return hash(self._value)


class HiddenDict(dict[str, str]):
    """A dict whose repr shows its keys only."""

    def __repr__(self) -> str:
        return "{" + ", ".join(f"{name!r}: {HIDDEN}" for name in self) + "}"


class HiddenBytes(bytes):
    """Bytes whose repr shows nothing of them."""

    def __repr__(self) -> str:
        return HIDDEN


class Redactor:
    """Replaces secrets in text that comes from outside: servers quote the key or the URL that they were sent.

    Also replaces the values of environment variables with the name of a secret (HF_TOKEN), which a server's log may
    show. A very short value is left, because it is not secret, and text would become unreadable without it.
    """

    __slots__ = ("_secrets",)

    def __init__(self, *values: str) -> None:
        given = {value.removeprefix("Bearer ") for value in values}
        found = {value for name, value in os.environ.items() if names_secret(name) and len(value) >= _MIN_FROM_ENV}
        # The longest first: one may be a part of another.
        secrets_ = sorted({value for value in given if len(value) >= _MIN_GIVEN} | found, key=len, reverse=True)
        self._secrets = tuple(map(Key, secrets_))

    def __call__(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret.reveal(), HIDDEN)
        return text


class frames_cut:
    """``with frames_cut():`` removes from an exception the frames of the libraries that the block has called.

    aiohttp's frames hold URLs and headers in plain variables. An exception that passes through them, such as the
    CancelledError of a timeout in a rollout, would carry them into a log. Our own frames stay, except this one.
    """

    __slots__ = ("_outer",)

    def __enter__(self) -> None:
        self._outer = sys.exception()  # it belongs to the caller, and keeps its frames

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        seen: set[int] = set()
        todo = [error]
        while todo:
            found = todo.pop()
            if found is None or found is self._outer or id(found) in seen:
                continue
            seen.add(id(found))
            found.__traceback__ = None
            todo += [found.__cause__, found.__context__]


class EnvironmentSecret:
    """A secret that lives in this process's environment.

    What gets copied, pickled, printed or written to ``executor.json`` is the name of the environment variable, which
    child processes and cluster jobs inherit, never the value.
    """

    __slots__ = ("variable",)

    def __init__(self, value: str) -> None:
        self.variable = f"DATATROVE_CKPT_SECRET_{secrets.token_hex(4).upper()}"
        os.environ[self.variable] = value

    def reveal(self) -> str:
        """The value.

        Raises:
            ConfigError: the environment variable did not reach this process.
        """
        value = os.environ.get(self.variable)
        if value is None:
            raise ConfigError(
                "api_key: the key given in Python or YAML did not reach this process (keys are never pickled). "
                "Export it as an environment variable on the worker and name that variable in api_key_env."
            )
        return value

    def __repr__(self) -> str:
        return HIDDEN


def holds_credentials(url: str) -> bool:
    """Whether the URL names a user or a password (``https://user:password@host``)."""
    parts = urlsplit(url) if "://" in url else None
    return parts is not None and bool(parts.username or parts.password)


def check_no_secrets(folder: Any, where: str) -> None:
    """Checks the storage options of a datatrove ``DataFolder``, which is pickled with its executor.

    Raises:
        ConfigError: the storage options hold a secret.
    """
    check_options(getattr(folder.fs, "storage_options", {}), folder.resolve_paths(""), where)


def check_options(options: Any, url: str, where: str) -> None:
    """Checks the storage options of the file system for ``url``.

    Raises:
        ConfigError: they hold a secret.
    """
    if not isinstance(options, dict):
        return
    for name, value in options.items():
        is_path = name == "token" and url.startswith(("gs:", "gcs:"))  # of a file, or "anon"
        if (names_secret(name) or name in _SECRET_OPTIONS) and isinstance(value, str) and not is_path:
            raise ConfigError(
                f"{where}: the storage option {name!r} is a secret, and would be pickled with the executor, into a "
                "file on a cluster. Leave it out: on S3 set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
                "AWS_PROFILE, in the environment."
            )
        check_options(value, url, where)
