"""Counts a text's tokens with the model's own tokenizer, from a folder or from the Hugging Face
hub.
"""

from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import xxhash

from datatrove_ckpt.common.formatting import error_text, missing_package
from datatrove_ckpt.config.paths import expand_path
from datatrove_ckpt.errors import ConfigError

_TOKENIZER = "tokenizer.json"
_ADVICE = "Or set chars_per_token, and no tokenizer is needed"
_loading = Lock()


def _find_file(model: str, revision: str | None) -> Path:
    """Returns the model's ``tokenizer.json``.

    Args:
        model: a folder, a file, or a repository of the hub.
        revision: of the repository; None: the default branch.

    Raises:
        ConfigError: there is no such file, or it cannot be downloaded.
    """
    path = Path(model)
    is_local = model.startswith(("/", ".", "~", "$"))
    if is_local:
        path = expand_path("tokenizer", model)
    if path.is_file() and path.suffix == ".json":
        return path
    if path.is_dir() or is_local:
        if not (path / _TOKENIZER).is_file():
            raise ConfigError(
                f"tokenizer: {path / _TOKENIZER} is no file on this machine. Correct the path."
            )
        return path / _TOKENIZER
    try:
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(model, _TOKENIZER, revision=revision))
    except ImportError:
        raise ConfigError(f"tokenizer: {missing_package('huggingface_hub')}") from None
    except Exception as error:  # of the client, the network and the disk
        where = f"{model!r}"
        if revision is not None:
            where += f" at {revision!r}"
        raise ConfigError(
            f"tokenizer: {_TOKENIZER} of {where} is in no folder of that name, and the hub does "
            f"not give it ({error_text(error).splitlines()[0][:200]}). Correct the name, or give "
            "the path of a folder that has it."
        ) from error


class TokenCounter(NamedTuple):
    """A loaded tokenizer.

    Attributes:
        digest: of the file ``tokenizer.json``.
    """

    tokenizer: Any
    digest: str

    def count(self, text: str) -> int:
        """Returns number of tokens, without those that a chat template adds."""
        return len(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def starts(self, text: str) -> list[int]:
        return [start for start, _ in self.tokenizer.encode(text, add_special_tokens=False).offsets]


def load_counter(name: str, revision: str | None, expected: str | None = None) -> TokenCounter:
    """Returns the tokenizer of a model, read once.

    Args:
        expected: the digest that it had when the run was made.

    Raises:
        ConfigError: the tokenizer is missing, unreadable, or not the expected one.
    """
    with _loading:  # threads wait for the first load
        counter = _load(name, revision)
    if expected not in (None, counter.digest):
        raise ConfigError(
            f"tokenizer: {_TOKENIZER} of {name!r} is another one here than where the run was made, "
            "so prompts would be cut elsewhere. Give all machines the same files, or name a "
            "revision of the hub."
        )
    return counter


@lru_cache(maxsize=8)
def _load(name: str, revision: str | None) -> TokenCounter:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ConfigError(f"tokenizer: {missing_package('tokenizers')} {_ADVICE}.") from None
    try:
        data = _find_file(name, revision).read_bytes()
        tokenizer = Tokenizer.from_str(data.decode("utf-8"))
    except ConfigError as error:
        raise ConfigError(f"{error} {_ADVICE}.") from None
    except Exception as error:  # of the disk, and of the library, which raises plain Exceptions
        raise ConfigError(
            f"tokenizer: {_TOKENIZER} of {name!r} is broken: {error_text(error)}. {_ADVICE}."
        ) from None
    tokenizer.no_truncation()  # a model for short texts has one in its file
    tokenizer.no_padding()
    return TokenCounter(tokenizer, xxhash.xxh3_128_hexdigest(data))
