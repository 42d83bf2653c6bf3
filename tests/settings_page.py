"""docs/settings.md, made of the signatures and docstrings of the runner, its configs and the rollouts.

    python -m tests.settings_page

A numeric setting's unit comes from its name (``..._seconds``, ``..._sec``), or from its description, which begins with
the unit ("tokens of ...") or says it ("..., in tokens"). A numeric setting without a unit is an error.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal

from datatrove_ckpt.config import InferenceConfig, MonitoringConfig
from datatrove_ckpt.rollouts import BestOfRollout, ChunkedRollout, CompletionRollout, PromptRollout
from datatrove_ckpt.runner import InferenceRunner
from tests.pages import ROOT

PAGE = ROOT / "docs/settings.md"

_UNITS = (
    "seconds", "tokens", "requests", "documents", "rollouts", "attempts", "servers", "restarts", "GPUs", "copies",
    "stages", "port", "commits", "characters", "parts", "answers",
)  # fmt: skip
_PURE_NUMBERS = ("seed",)
_ENTRY = re.compile(r"^ {8}(\w+(?:, \w+)*): (.*(?:\n {12}.*)*)", re.MULTILINE)
_HEAD = """\
# Settings

Generated from the docstrings of `InferenceRunner`, `InferenceConfig`, `MonitoringConfig` and the rollouts by
`python -m tests.settings_page`. Do not edit this page: edit the docstrings.

In YAML, the settings of the runner are keys of its `init_args`, and those of the others are keys of `config` and
`monitoring` below them. In Python, they are keyword arguments. On the
[command line](cli.md#change-settings-on-the-command-line), `--pipeline.1.drain_seconds=60` and
`--pipeline.1.config.tp=2` override them. [recovery.md](recovery.md#one-checkpoint-belongs-to-one-run) tells which
settings may change between two runs.
"""
_RUNNER = """
## InferenceRunner

The first eight are those of datatrove's `InferenceRunner`, with its defaults.
"""
_CONFIG = """
## InferenceConfig

The settings up to `server_start_max_retries` are those of datatrove's `InferenceConfig`, with its defaults.
"""
_ROLLOUT = """
## {name}

{first} [rollouts.md](rollouts.md) has examples.{others}
"""
_ROLLOUTS: dict[type, str] = {
    PromptRollout: "",
    CompletionRollout: ""
    " All other settings of `PromptRollout` besides `system_prompt` and `max_chars` are settings here, too.",
    ChunkedRollout: ""
    " `prompt_column`, `tokenizer`, `tokenizer_revision`, `chars_per_token` and `generation_config` are those of "
    "`PromptRollout`.",
    BestOfRollout: " All settings of `PromptRollout` are settings here, too.",
}
"""Each with what is said of the settings that it has from another one."""
_MONITORING = """
## MonitoringConfig

The keys of `monitoring`; [monitoring.md](monitoring.md) has examples.
"""
_COLUMNS = "\n| setting | type | default | unit | meaning |\n|---|---|---|---|---|\n"


def page() -> str:
    """The whole page."""
    runner = [
        (one.name, one.annotation, one.default)
        for one in inspect.signature(InferenceRunner, eval_str=True).parameters.values()
    ]
    found = f"{_HEAD}{_RUNNER}{_COLUMNS}{_rows(runner, InferenceRunner)}"
    for head, cls in ((_CONFIG, InferenceConfig), (_MONITORING, MonitoringConfig)):
        hints = typing.get_type_hints(cls)
        settings = [(one.name, hints[one.name], _field_default(one)) for one in dataclasses.fields(cls)]
        found += f"{head}{_COLUMNS}{_rows(settings, cls)}"
    return found + "".join(_rollout(cls, others) for cls, others in _ROLLOUTS.items())


def _rollout(cls: type, others: str) -> str:
    """A rollout's section. What its docstring leaves out is one of PromptRollout's settings."""
    settings = [
        (one.name, one.annotation, one.default) for one in inspect.signature(cls, eval_str=True).parameters.values()
    ]
    if cls is not PromptRollout:
        inherited = set(inspect.signature(PromptRollout).parameters) - set(descriptions(cls))
        settings = [one for one in settings if one[0] not in inherited]
    first = " ".join((cls.__doc__ or "").partition("\n\n")[0].split()).replace("``", "`")
    heading = _ROLLOUT.format(name=cls.__name__, first=first, others=others)
    return f"{heading}{_COLUMNS}{_rows(settings, cls)}"


def _field_default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default


def _rows(settings: list[tuple[str, Any, Any]], cls: type) -> str:
    texts = descriptions(cls)
    assert list(texts) == [name for name, _, _ in settings], f"{cls.__name__}: settings and docstring differ"
    rows = [
        [f"`{name}`", shown_type(hint), _shown_default(default), unit(name, hint, texts[name]), texts[name]]
        for name, hint, default in settings
    ]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n" for row in rows)


def descriptions(cls: type) -> dict[str, str]:
    """What the class's docstring says of each setting, as Markdown."""
    documentation = (cls.__doc__ or "").partition("Raises:")[0]
    found: dict[str, str] = {}
    for names, text in _ENTRY.findall(documentation):
        for name in names.split(", "):
            found[name] = " ".join(text.split()).replace("``", "`")
    return found


def unit(name: str, hint: Any, text: str) -> str:
    """The unit of a numeric setting, "" for any other.

    Raises:
        ValueError: the docstring does not say it.
    """
    if name in _PURE_NUMBERS or not {int, float} & set(_alternatives(hint)):
        return ""
    if name.endswith(("_seconds", "_sec")):
        return "seconds"
    first = text.partition(" ")[0]
    said = re.search(rf", in ({'|'.join(_UNITS)})\b", text)
    if first not in _UNITS and said is None:
        raise ValueError(f"{name}: its docstring does not say the unit, one of {', '.join(_UNITS)}.")
    return first if first in _UNITS else str(said and said[1])


def shown_type(hint: Any) -> str:
    """The alternatives, without the form in which a config keeps its key."""
    words = [_word(kind) for kind in _alternatives(hint) if getattr(kind, "__name__", "") != "EnvironmentSecret"]
    return " or ".join(dict.fromkeys(words))


def _alternatives(hint: Any) -> list[Any]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [kind for part in typing.get_args(hint) for kind in _alternatives(part)]
    return [hint]


def _word(kind: Any) -> str:
    origin = typing.get_origin(kind) or kind
    if origin is Literal:
        return " or ".join(f'`"{choice}"`' for choice in typing.get_args(kind))
    if origin is types.NoneType:
        return "`None`"
    if origin is Callable:
        return "function"
    if origin is AbstractContextManager:
        return "context manager"
    inner = [_word(one).strip("`") for one in typing.get_args(kind)]
    return f"`{origin.__name__}[{', '.join(inner)}]`" if inner else f"`{origin.__name__}`"


def _shown_default(default: Any) -> str:
    if default is inspect.Parameter.empty:
        return "required"
    if isinstance(default, tuple):
        default = list(default)
    return f"`{default!r}`".replace("'", '"')


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"{PAGE} is written.")
