"""Finds secrets by names and values, and hides them in logs, files, pickles and tracebacks.

loguru's ``diagnose`` (on by default) prints the values of names in tracebacks. The classes here
print ``***``.

There are two thresholds. Hiding a value costs little, so ``is_secret`` hides possible secrets;
refusing a job costs more, so ``is_surely_secret`` is exact, and finds no more. ``is_secret`` must
never find less, because ``run.json`` holds hashes of what it finds.
"""

import functools
import hashlib
import hmac
import json
import os
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import orjson
import xxhash

from datatrove_ckpt.errors import ConfigError, printable

HIDDEN = "***"
MIRROR_KEY_VARIABLE = "DATATROVE_CKPT_MIRROR_KEY"
"""The environment variable with the key that signs mirrors. Servers do not get it."""
VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
"""An environment variable in a path."""
_OUR_VARIABLES = "DATATROVE_CKPT_SECRET_"
# Minimum lengths of what is hidden: secrets that we send, and found secrets.
_MIN_GIVEN = 4
_MIN_FOUND = 8

_SURE_NAME = re.compile(
    r"(^|[._ ])(api_?key|session_token|"
    r"(secret|private|access|account|auth|signing|encryption|client)_?(key|token)|"
    r"(hf|hub|github|gitlab|slack|openai|bearer|refresh)_?token|secret|passw|password|passwd|pwd|passphrase|"
    r"authorization|credentials?)s?$",
    re.IGNORECASE,
)
_SECRET_NAME = re.compile(r"(^|[._ ])(key|(?<!per_)token)$", re.IGNORECASE)
_MAYBE_NAME = re.compile(r"secret|passw|credential|cookie|keys?$|tokens?$", re.IGNORECASE)
_SECRET_WORD = re.compile(
    "key|secret|passw|credential|authorization|cookie|(?<!per_)token$", re.IGNORECASE
)
# OpenAI and imitators, hubs, clouds and services; JSON web tokens; HTTP's two schemes.
_SECRET_VALUE = re.compile(
    r"\b(sk-[\w-]{12,}|hf_\w{12,}|A[KS]IA[A-Z0-9]{12,}|AIza[\w-]{20,}|gh[a-z]_\w{20,}|github_pat_\w{20,}|gsk_\w{12,}|"
    r"(glpat|nvapi|pplx)-[\w-]{16,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,}|xox[a-z]-[\w-]{10,}|(?i:bearer|basic)\s+[\w.+/=~-]{8,})"
)
# A digit distinguishes a key from a function (hf_hub_download) or a sentence ("basic
# understanding"). The first letters save a search for it in each word.
_SURE_VALUE = re.compile(
    r"\b(?=[shAgnpx])(?=[\w-]*\d)(sk-[\w-]{16,}|hf_[A-Za-z0-9]{16,}|A[KS]IA[A-Z0-9]{12,}|AIza[\w-]{20,}|gh[a-z]_\w{20,}|"
    r"(glpat|nvapi|pplx)-[\w-]{16,}|github_pat_\w{20,}|gsk_\w{12,}|xox[a-z]-[\w-]{10,})|\b(?i:bearer|basic)\s+(?=\S*\d)[\w.+/=~-]{16,}"
)
# A lone user is a token with http (https://TOKEN@host), and a name elsewhere (sftp://me@host).
_SURE_URL = re.compile(
    r"\b[a-z][\w+.-]*://[^\s/@:{}$<]*:[^\s/@{}$<]+@|\b([\w.-]+\+)?https?://[^\s/?#@{}$<]+@",
    re.IGNORECASE,
)
_URL = re.compile(r"^\s*([a-z][\w+.-]*:)?//[^/?#]+@|://[^\s/?#]+@|://\[[^]]*$", re.IGNORECASE)
_URL_SECRET = re.compile(
    r"([?&](?:X-(?:Amz|Goog)-(?:Signature|Security-Token)|sig|signature|(?:access_)?token|api_?key|key)=)[^&#\s\"'<>]+",
    re.IGNORECASE,
)
_HASH = re.compile("hash (scrypt|keyed-[0-9a-f]{8})-([0-9a-f]{32})")
_PLACEHOLDER = re.compile(
    rf"[A-Z][A-Z_]*|\$\{{?\w+\}}?|\*+|none|null|dummy|fake|test|not[-_ ]needed|{_HASH.pattern}"
)
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
_RUN = re.compile(r"[A-Za-z0-9+=]+")
_MIN_GUESSED = 8  # characters of a value that only its name makes a secret
_MIN_SURE = 4
_MIN_RUN = 12
# Storage options with a secret and another kind of name.
_SECRET_OPTIONS = {"aws_access_key_id", "connection_string"}


@functools.lru_cache(1024)
def names_secret(name: str) -> bool:
    """Whether a value with this name is a secret: "api_key", "config.hf_token", "--auth-token"; not
    "max_tokens".

    Exact, because such storage options are refused.
    """
    name = name.replace("-", "_")
    return _SECRET_NAME.search(name) is not None or _SURE_NAME.search(name) is not None


@functools.lru_cache(1024)
def may_name_secret(name: str) -> bool:
    """Whether to hide a value with this name: better "--keyboard" hidden than "--hftoken" shown."""
    return names_secret(name) or _SECRET_WORD.search(name) is not None


def is_surely_secret(name: str, value: object) -> bool:
    """Whether a text is a secret that no pickle takes along, by its dotted name or its form.

    Not "text_key", "eos_token", the name of a variable.
    """
    if isinstance(value, bytes | bytearray):
        value = bytes(value).decode("latin-1")
    if not isinstance(value, str):
        return False
    if _SURE_VALUE.search(value) or ("://" in value and _SURE_URL.search(value)):
        return True
    last = name.replace("-", "_").rpartition(".")[2]
    if _PLACEHOLDER.fullmatch(value) or not value.isprintable():
        return False
    if _SURE_NAME.search(last):
        return len(value) >= _MIN_SURE and not value.startswith(("<", "[", "{", "/"))
    return _MAYBE_NAME.search(last) is not None and " " not in value and _is_by_chance(value)


def _is_by_chance(value: str) -> bool:
    if _UUID.search(value):
        return True
    runs = [run for run in _RUN.findall(value) if len(run) >= _MIN_RUN]
    return (
        any(re.search("[0-9]", run) and re.search("[A-Za-z]", run) for run in runs)
        and value[0] not in "<[{/"
    )


def is_secret(name: str, value: object) -> bool:
    """Whether to hide a value. A dict or list may hold a secret although it is none."""
    if names_secret(name) or is_surely_secret(name, value):
        return True
    if not isinstance(value, str):
        return False
    outer, _, last = name.rpartition(".")
    if outer.lower().endswith(("headers", "extra_query")) or _HASH.fullmatch(value):
        return True
    # Not "keyword": "short" and "key_prompt": "Name the key.".
    guessed = (
        may_name_secret(last)
        and len(value) >= _MIN_GUESSED
        and value.isprintable()
        and " " not in value
    )
    named = last.endswith("_env")  # a variable's name
    return (
        (guessed and not named)
        or _SECRET_VALUE.search(value) is not None
        or holds_credentials(value)
    )


def holds_credentials(url: str) -> bool:
    """Whether a text holds a URL with a user or a password, or half a URL."""
    return "//" in url and _URL.search(url) is not None


def secrets_among(name: str, value: object) -> Iterator[object]:
    """Searches only the start of long texts."""
    # A failed request must not cost more with a long prompt.
    if is_secret(name, value[:300] if isinstance(value, str) else value):
        yield value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from secrets_among(f"{name}.{key}", part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from secrets_among(name, part)


def environment_secrets(is_one: Callable[[str, str], bool]) -> dict[str, str]:
    return {
        name: value for name, value in os.environ.items() if _is_in_environment(is_one, name, value)
    }


@functools.lru_cache(1024)
def _is_in_environment(is_one: Callable[[str, str], bool], name: str, value: str) -> bool:
    if len(value) < _MIN_FOUND or value.startswith(("/", "<")) or _PLACEHOLDER.fullmatch(value):
        return False
    return name.startswith(_OUR_VARIABLES) or is_one(name, value)


def without_secrets(
    name: str, value: object, more_secrets: Collection[str] = (), is_hashed: bool = True
) -> Any:
    """Returns JSON values with a hash, or ``HIDDEN``, in the place of each secret, and of each text
    that holds a ``more_secrets`` secret. A hash stays.
    """
    holds_one = isinstance(value, str) and any(secret in value for secret in more_secrets)
    if holds_one or is_secret(name, value):
        return hashed(name, value) if is_hashed else HIDDEN
    if isinstance(value, dict):
        return {
            key: without_secrets(f"{name}.{key}", part, more_secrets, is_hashed)
            for key, part in value.items()
        }
    if isinstance(value, list | tuple):
        return [without_secrets(name, part, more_secrets, is_hashed) for part in value]
    return value


def hashed(name: str, value: object) -> str:
    """Returns the hash that stands for a secret: slow and different for each field, against word
    lists.

    With a mirror's key the keyed hash, which names its key, is made from the slow hash, so that
    hashes from before there was a key can be compared.
    """
    field = name.rpartition(".")[2]
    stored = _HASH.fullmatch(value) if isinstance(value, str) else None
    if stored is None:
        text = orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)
        kind = "scrypt"
        digest = _slow_hash(field, xxhash.xxh3_128_hexdigest(text))
    else:
        kind, digest = stored.groups()
    if kind == "scrypt" and (key := os.environ.get(MIRROR_KEY_VARIABLE)):
        key_digest, digest = (
            hmac.digest(key.encode(), text.encode(), "sha256").hex()
            for text in ("", f"{field} {digest}")
        )
        kind = f"keyed-{key_digest[:8]}"
        digest = digest[:32]
    return f"hash {kind}-{digest}"


@functools.cache
def _slow_hash(name: str, digest: str) -> str:
    """Returns a hash that takes 50 ms and 16 MB, once per password and process; 6 ms for keys."""
    cost = 2**14 if _SURE_NAME.search(name.replace("-", "_")) else 2**11
    return hashlib.scrypt(digest.encode(), salt=name.encode(), n=cost, r=8, p=1, dklen=16).hex()


class Veil:
    """Hides secrets: datatrove writes a step's attributes to ``executor.json``."""

    __slots__ = ("name", "value")

    def __init__(self, name: str, value: object) -> None:
        self.name = name
        self.value = value

    def __repr__(self) -> str:
        value = masked(self.name, self.value)
        if isinstance(value, str):
            return value
        return json.dumps(value)


class Veiled:
    """Keeps an attribute's value in a ``Veil``. Pickled objects may hold the value."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        if instance is None:
            return self
        try:
            value = vars(instance)[self._name]
        except KeyError:
            raise AttributeError(self._name) from None
        if isinstance(value, Veil):
            return value.value
        return value

    def __set__(self, instance: object, value: object) -> None:
        vars(instance)[self._name] = Veil(self._name, value)


def masked(name: str, value: object) -> Any:
    return without_secrets(name, json.loads(shown_json(value)), is_hashed=False)


def shown_json(value: object) -> str:
    return json.dumps(value, skipkeys=True, default=_shown_object)


def _shown_object(value: object) -> object:
    if isinstance(value, Secret):
        return HIDDEN
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    kind: Any = value
    if not hasattr(value, "__qualname__"):
        kind = type(value)
    return f"<{kind.__module__}.{kind.__qualname__}>"


class Secret:
    """A text that is never printed or pickled: ``redact`` hides it everywhere once it was revealed.

    Attributes:
        variable: the environment variable that holds it in this process and its children, and whose
            name copies and pickles keep; "": none.
    """

    __slots__ = ("_value", "variable")

    def __init__(self, value: str, variable: str = "") -> None:
        self._value = value
        self.variable = variable

    @classmethod
    def in_environment(cls, value: str) -> "Secret":
        variable = f"{_OUR_VARIABLES}{secrets.token_hex(4).upper()}"
        os.environ[variable] = value
        return cls(value, variable)

    def reveal(self) -> str:
        """Returns the text. Raises ConfigError in a process that the variable did not reach."""
        value = getattr(self, "_value", None)
        if value is None:
            value = os.environ.get(self.variable)
        if value is None:
            raise ConfigError(
                "api_key: this process has no key, as keys are never pickled. Export it on the "
                "worker, and name its variable in api_key_env."
            )
        remember(value)
        return value

    def headers(self, path: str = "") -> dict[str, str]:
        key = self.reveal()
        # Anthropic's own paths. Its other paths, and other servers, take the usual header.
        if "messages" in path.split("/") and key.startswith("sk-ant-"):
            return {"x-api-key": key, "anthropic-version": "2023-06-01"}
        return {"Authorization": f"Bearer {key}"}

    def __getstate__(self) -> tuple[None, dict[str, str]]:
        return None, {"variable": self.variable}

    def __repr__(self) -> str:
        return HIDDEN


EnvironmentSecret = Secret
"""Its name in pickles of 0.2.0."""

_revealed: dict[str, None] = {}


def remember(*texts: str) -> None:
    """Makes ``redact`` hide these secrets from now on, but for very short ones and placeholders."""
    for text in texts:
        if len(text) >= _MIN_FOUND or (
            len(text) >= _MIN_GIVEN and not _PLACEHOLDER.fullmatch(text)
        ):
            _revealed[text] = None


def redact(text: str) -> str:
    """Returns foreign text without secrets and control characters, for every way out: a log, a
    terminal, a file, an error.
    """
    return printable(hide(text))


def excerpt(text: str, max_length: int) -> str:
    """Returns the start of foreign text without secrets. Only the start of a long text is searched,
    and no part of a secret at its end is shown.
    """
    longest = _MOST_ESCAPED * max(map(len, _to_hide(_revealed)), default=1)
    searched = text[: 8 * max_length + longest]
    visible = hide(searched)
    if len(searched) < len(text):
        visible = visible[:-longest] or HIDDEN
    return visible[:max_length]


def hide(text: str, revealed: Iterable[str] = _revealed) -> str:
    """Returns foreign text without revealed secrets, secrets of the environment (HF_TOKEN) and of
    ``remember_sent``, and signatures in URLs.
    """
    for secret in sorted(_to_hide(revealed), key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
        if _ESCAPE.search(text):
            text = _escaped(secret).sub(HIDDEN, text)
    return _URL_SECRET.sub(rf"\1{HIDDEN}", text)


def _to_hide(revealed: Iterable[str]) -> list[str]:
    return [*revealed, *environment_secrets(is_secret).values(), *_sent]


_ESCAPE = re.compile(r"\\|%[0-9A-Fa-f]|&#[0-9x]")
_MOST_ESCAPED = 24  # characters that ``_escaped`` matches for one character


@functools.lru_cache(maxsize=1000)
def _escaped(secret: str) -> re.Pattern[str]:
    """Matches the secret, each character as it is or as JSON, Python, URLs and HTML escape it, also
    several times.

    Atomic groups and limited repeats keep this fast for any foreign text.
    """
    groups = []
    for character in secret:
        code = f"(?i:0{{0,6}}{ord(character):x})"
        ways = (
            rf"\\{{1,8}}[xu]{code}",
            rf"\\{{1,8}}u\{{{code}\}}",
            f"%(?:25){{0,3}}{code}",
            f"&#x{code};",
            f"&#0{{0,6}}{ord(character)};",
            rf"\\{{0,8}}{re.escape(character)}",
        )
        groups.append(f"(?>{'|'.join(ways)})")
    return re.compile("".join(groups))


def may_hold_secret(text: str) -> bool:
    """Whether a text is kept out of the files of a job.

    Revealed texts do not count: a value of a URL's query may be an ordinary word.
    """
    return hide(text, ()) != text or is_surely_secret("", text)


def log_text(text: str) -> str:
    return redact(text).replace("\n", "\n  ")


_sent: dict[str, None] = {}  # the newest last


def remember_sent(payload: object) -> None:
    """Remembers the latest 200 secrets of payloads: errors may quote them."""
    for secret in secrets_among("payload", payload):
        # After "Bearer ".
        for text in (secret, secret.partition(" ")[2]) if isinstance(secret, str) else ():
            if len(text) >= _MIN_FOUND and not _PLACEHOLDER.fullmatch(text):
                _sent[text] = _sent.pop(text, None)
    while len(_sent) > 200:
        del _sent[next(iter(_sent))]


def check_no_secrets(folder: Any, setting: str) -> None:
    """Checks the storage options of a datatrove ``DataFolder``, which is pickled with its executor.

    Raises:
        ConfigError: the storage options hold a secret.
    """
    check_options(getattr(folder.fs, "storage_options", {}), folder.resolve_paths(""), setting)


def check_options(options: object, url: str, setting: str) -> None:
    if not isinstance(options, dict):
        return
    for name, value in options.items():
        is_path = name == "token" and url.startswith(("gs:", "gcs:"))  # of a file, or "anon"
        if (
            (names_secret(name) or name in _SECRET_OPTIONS)
            and isinstance(value, str)
            and not is_path
        ):
            raise ConfigError(
                f"{setting}: the storage option {name!r} is a secret, and would be pickled with "
                "the executor. On S3, export AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
                "AWS_PROFILE."
            )
        check_options(value, url, setting)


def refuse_variables(setting: str, path: str) -> None:
    """Refuses variables in a folder that datatrove opens, which expands only a leading ``~``."""
    if match := VARIABLE.search(path):
        raise ConfigError(
            f"{path!r} contains {match[0]}, which is not expanded here. Write the path out.",
            setting=setting,
        )
    if not path.startswith("~"):
        refuse_tilde(setting, path, Path(path))


def refuse_tilde(setting: str, path: str, parsed: Path) -> None:
    if "~" in parsed.parts:
        raise ConfigError(
            f"{path!r}: only a ~ at the beginning means a home folder.", setting=setting
        )
