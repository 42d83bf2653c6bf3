"""Counts a text's tokens with the model's own tokenizer, from a folder or from the Hugging Face
hub, and cuts a text after a line, so that the message it is filled into fits.
"""

from collections.abc import Callable
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
    except Exception as error:
        repository = f"{model!r}"
        if revision is not None:
            repository += f" at {revision!r}"
        raise ConfigError(
            f"tokenizer: {_TOKENIZER} of {repository} is neither in a folder nor on the hub "
            f"({error_text(error).splitlines()[0][:200]}). Correct the name, or give a folder's "
            "path."
        ) from error


class TokenCounter(NamedTuple):
    tokenizer: Any
    digest: str

    def count(self, text: str) -> int:
        """Returns the number of tokens, without tokens that a chat template adds."""
        return len(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def starts(self, text: str) -> list[int]:
        return [start for start, _ in self.tokenizer.encode(text, add_special_tokens=False).offsets]


def load_counter(name: str, revision: str | None, expected: str | None = None) -> TokenCounter:
    """Returns the tokenizer of a model, read once.

    Args:
        expected: digest of the tokenizer when the run was made.

    Raises:
        ConfigError: the tokenizer is missing or unreadable, or has another digest.
    """
    with _loading:
        counter = _load(name, revision)
    if expected not in (None, counter.digest):
        raise ConfigError(
            f"tokenizer: {_TOKENIZER} of {name!r} differs here from the run's first start. Give "
            "all machines the same files, or name a revision of the hub."
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
    except Exception as error:
        raise ConfigError(
            f"tokenizer: {_TOKENIZER} of {name!r} is broken: {error_text(error)}. {_ADVICE}."
        ) from None
    tokenizer.no_truncation()  # a model for short texts sets a truncation in its file
    tokenizer.no_padding()
    return TokenCounter(tokenizer, xxhash.xxh3_128_hexdigest(data))


def cut_to_chars(fill: Callable[[str], str], text: str, times: int, limit: int) -> str:
    """Returns the text, cut so that ``fill(text)`` has at most ``limit`` characters."""
    if len(fill(text)) <= limit:
        return text
    return _whole_lines(text, max(0, limit - len(fill(""))) // max(times, 1))


def fits_for_sure(text: str, limit: int) -> bool:
    """Returns whether the content needs no count: a token has at least one byte."""
    return len(text) <= limit and (text.isascii() or len(text.encode("utf-8", "replace")) <= limit)


def cut_to_tokens(
    fill: Callable[[str], str], text: str, times: int, limit: int, counter: TokenCounter
) -> str:
    """Returns the text, cut so that ``fill(text)`` has at most ``limit`` tokens."""
    if not times or fits_for_sure(fill(text), limit):
        return text
    room = max(0, limit - counter.count(fill(""))) // times
    end = _end_of(text, room, counter)
    cut = text
    if end < len(text):
        cut = _whole_lines(text, end)
    # Tokens of template and text do not add up exactly.
    while cut:
        excess = counter.count(fill(cut)) - limit
        if excess <= 0:
            return cut
        starts = counter.starts(cut)
        if not starts:
            return ""
        cut = _whole_lines(cut, starts[max(0, len(starts) - -(-excess // times))])
    return cut


def _end_of(text: str, room: int, counter: TokenCounter) -> int:
    size = 8 * (room + 8)  # 8 characters: few tokens are longer
    while True:
        starts = counter.starts(text[:size])
        if len(starts) > room:
            return starts[room]
        if size >= len(text):
            return len(text)
        size *= 4


def _whole_lines(text: str, end: int) -> str:
    line = text.rfind("\n", 0, end + 1)
    if line > 0:
        return text[:line]
    return text[:end]
