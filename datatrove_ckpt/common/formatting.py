"""Writes numbers and errors as text for people, and parses sizes."""

import re
import shlex
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from importlib.util import find_spec


def time_left(
    amount: float, pace: float, quiet: float, parts: Iterable[float] = ()
) -> float | None:
    """Returns the seconds that the rest takes at this pace, at least the slowest part's.

    Args:
        quiet: seconds since something was finished. None is returned if they are longer.
    """
    if pace <= 0:
        return None
    seconds = max([amount / pace, *parts])
    # A longer time is chance.
    if quiet <= seconds < 1e9:
        return seconds
    return None


_EXTRAS = {
    "zstandard": "zstd",
    "pyarrow": "parquet",
    "s3fs": "s3",
    "ray": "ray",
    "datasets": "hub",
    "huggingface_hub": "hub",
    "tokenizers": "rollouts",
    "jsonschema": "rollouts",
    "prometheus_client": "metrics",
    "mlflow": "mlflow",
    "PIL": "media",
}

_MISTAKES = {
    "(?<!already awaited )coroutine": "was `await` forgotten, as in `await generate(...)`?",
    "InferenceResult": "an answer's text is its attribute `text`, as in `answer.text`",
    "AsyncGeneratorContextManager": (
        "was `async with` forgotten, as in `async with generate.url() as base_url`?"
    ),
    "different loop": (
        "from a thread: `asyncio.run_coroutine_threadsafe(generate(...), loop).result()`, with the "
        "rollout's loop"
    ),
    "a running event loop|loop is already running": (
        "a rollout is a coroutine: `await generate({...})` in place of `asyncio.run`"
    ),
    r"BoundGenerate\.__call__": (
        "`generate` takes one payload, a dict: `await generate({'messages': [...]})`"
    ),
}
"""Hints by a pattern of the error."""
_MOST_RUNS = 50
_SIZES = {
    f"{unit}{i}": base**power
    for i, base in (("", 1000), ("I", 1024))
    for power, unit in enumerate(("", *"KMGT"))
}


def plural(number: int, noun: str) -> str:
    if number == 1:
        return f"{number} {noun}"
    return f"{number} {noun}s"


def plural_or_no(number: int, noun: str) -> str:
    if number:
        return plural(number, noun)
    return f"no {noun}"


def plural_is(number: int, noun: str) -> str:
    return f"{plural(number, noun)} {'is' if number == 1 else 'are'}"


def did_you_mean(name: object, allowed: Iterable[str], cutoff: float = 0.65) -> str:
    close = get_close_matches(str(name), list(allowed), 1, cutoff)
    if close:
        return f', did you mean "{close[0]}"?'
    return ""


def number_range(start: int, end: int) -> str:
    if end - start <= 1:
        return f"{start}"
    return f"{start} to {end - 1}"


def ranges(numbers: Iterable[int]) -> str:
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [
        f"{first}" if first == last else f"{first}-{last}" for first, last in runs[:_MOST_RUNS]
    ]
    return ", ".join(texts) + (", ..." if len(runs) > _MOST_RUNS else "")


def percent(share: float) -> str:
    """Returns "12.3 %". Only a complete share is 100 %."""
    if share >= 1.0:
        return "100 %"
    return f"{min(share * 100, 99.9):.1f} %"


def figure(value: float) -> str:
    """Returns three digits, or a whole number in full: "0.123", "12.3", "1,234"."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def short(value: float) -> str:
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= 100 * size or (value >= size and size > 1e3):
            return f"{figure(value / size)} {unit}"
    return figure(value)


def filled_cells(share: float, cells: int, empty: str = " ") -> str:
    full, part = divmod(int(share * cells * 8), 8)
    return f"{'█' * full}{' ▏▎▍▌▋▊▉'[part] if part else ''}".ljust(cells, empty)


_SECONDS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


def seconds_of(text: str) -> float | None:
    match = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)\s*(s|m|min|h|d|)", text)
    if match is None:
        return None
    return float(match[1]) * _SECONDS[match[2]]


def duration(seconds: float) -> str:
    units = (
        ("d", 86400.0, 2 * 86400.0),
        ("h", 3600.0, 3600.0),
        ("min", 60.0, 120.0),
        ("s", 1.0, 0.1),
    )
    for unit, size, least in units:
        if seconds >= least:
            return f"{_digits(seconds / size)} {unit}"
    return f"{_digits(seconds * 1000)} ms"


def byte_size(size: float) -> str:
    """Returns a size in steps of 1024: "64 kB", "1.5 GB"."""
    for unit, factor in (("TB", 2**40), ("GB", 2**30), ("MB", 2**20), ("kB", 2**10)):
        if size >= factor:
            return f"{_digits(size / factor)} {unit}"
    return f"{size:.0f} B"


def parse_bytes(text: str) -> int | None:
    match = re.fullmatch(r"(\d{1,18}(?:\.\d+)?) *([KMGT]I?|)B", text.strip().upper())
    if match:
        return int(float(match[1]) * _SIZES[match[2]])
    return None


def safe_text(value: object) -> str:
    """Returns ``str(value)`` as text for every file and terminal.

    Never raises, whatever a user's ``__str__`` does.
    """
    return _safe(str, value)


def likely_mistake(error: BaseException) -> str:
    text = safe_text(error)
    for pattern, hint in _MISTAKES.items():
        if re.search(pattern, text):
            return f" ({hint})"
    return ""


def safe_repr(value: object) -> str:
    """Returns ``repr(value)``, cut to 200 characters, for error messages. Never raises."""
    return cut(_safe(repr, value), 200)


def _safe(convert: Callable[[object], str], value: object) -> str:
    try:
        text = convert(value)
        if text.isascii():
            return text
        return text.encode("utf-8", "backslashreplace").decode()
    except Exception as error:
        return f"<{type(value).__name__}, whose {convert.__name__}() raises {type(error).__name__}>"


def cut(text: str, max_length: int) -> str:
    if len(text) <= max_length:
        return text
    return f"{text[:max_length]}..."


def as_line(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else " " for character in text)


def error_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(" .:")


def missing_package(text: str) -> str | None:
    named = (name for name in _EXTRAS if re.search(rf"\b{name}\b", text))
    package = next((name for name in named if find_spec(name) is None), None)
    if package is None:
        return None
    return install_extra(package, _EXTRAS[package])


def install_extra(package: str, extra: str) -> str:
    return (
        f"the Python package {package!r} is not installed. Run: pip install "
        f"'datatrove-ckpt[{extra}]'."
    )


def _digits(number: float) -> str:
    if number >= 100:
        return f"{number:.0f}"
    if number >= 10:
        return f"{number:.3g}"
    return f"{number:.2g}"


def no_bars_in_logs() -> None:
    if "huggingface_hub" in sys.modules and not sys.stderr.isatty():
        from huggingface_hub.utils.tqdm import disable_progress_bars

        # HF_HUB_DISABLE_PROGRESS_BARS=0 requests them.
        with warnings.catch_warnings(action="ignore"):
            disable_progress_bars()


def without_flag(argv: Sequence[str], flag: str) -> list[str]:
    """Returns a command without a flag and its value: ``--tasks=2``, ``--tasks 2``."""
    command = []
    remaining = iter(argv)
    for word in remaining:
        name, equals, _ = word.partition("=")
        if name != flag:
            command.append(word)
        elif not equals:
            next(remaining, None)
    return command


def repair_command(
    *arguments: str, logging_dir: str | None = None, output: str | None = None
) -> str:
    command = ["datatrove-ckpt", "repair", *arguments]
    if output is not None:
        command += ["--output", output]
    if logging_dir is not None:
        command += ["--logging-dir", logging_dir]
    return shlex.join(command)
