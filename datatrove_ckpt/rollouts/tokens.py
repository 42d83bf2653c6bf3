"""Counts a text's tokens with the model's own tokenizer (package ``tokenizers``, an extra)."""

from __future__ import annotations

from functools import lru_cache
from threading import Lock
from typing import Any, NamedTuple

import xxhash

from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.formatting import error_text, missing_package
from datatrove_ckpt.rollouts.model_files import find_file

_FILE = "tokenizer.json"
_ADVICE = "Or set chars_per_token, and no tokenizer is needed"
_loading = Lock()


class TokenCounter(NamedTuple):
    """A loaded tokenizer.

    Attributes:
        digest: of the file ``tokenizer.json``.
    """

    tokenizer: Any
    digest: str

    def count(self, text: str) -> int:
        """Number of tokens, without those that a chat template adds."""
        return len(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def starts(self, text: str) -> list[int]:
        """Where each token begins in the text, in characters."""
        return [start for start, _ in self.tokenizer.encode(text, add_special_tokens=False).offsets]


def load_counter(name: str, revision: str | None, expected: str | None = None) -> TokenCounter:
    """The tokenizer of a model. Each process reads it once.

    Args:
        name: see ``find_file``.
        expected: the digest that it had when the run was made.

    Raises:
        ConfigError: it is not there, cannot be read, or is another one than expected.
    """
    with _loading:  # threads that need it at once wait for the first of them
        counter = _load(name, revision)
    if expected not in (None, counter.digest):
        raise ConfigError(
            f"tokenizer: {_FILE} of {name!r} is another one here than where the run was made, so prompts would be cut "
            "elsewhere. Give all machines the same files, or name a revision of the hub."
        )
    return counter


@lru_cache(maxsize=8)
def _load(name: str, revision: str | None) -> TokenCounter:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ConfigError(f"tokenizer: {missing_package('tokenizers')} {_ADVICE}.") from None
    try:
        data = find_file("tokenizer", name, _FILE, revision).read_bytes()
    except ConfigError as error:
        raise ConfigError(f"{error} {_ADVICE}.") from None
    except OSError as error:
        raise ConfigError(f"tokenizer: {_FILE} of {name!r} cannot be read: {error_text(error)}. {_ADVICE}.") from None
    try:
        tokenizer = Tokenizer.from_str(data.decode("utf-8"))
    except Exception as error:  # the library raises plain Exceptions
        raise ConfigError(f"tokenizer: {_FILE} of {name!r} is broken: {error_text(error)}.") from None
    tokenizer.no_truncation()  # a model for short texts has one in its file
    tokenizer.no_padding()
    return TokenCounter(tokenizer, xxhash.xxh3_128_hexdigest(data))
