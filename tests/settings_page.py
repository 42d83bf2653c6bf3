"""docs/settings.md, made of the signatures and docstrings of the runner, its configs and the
rollouts.

    python -m tests.settings_page

A numeric setting says its unit: in its name (``..._seconds``, ``..._sec``), or in its description,
which begins with it ("tokens of ...") or names it ("..., in tokens").
"""

import dataclasses
import inspect
import json
import re
import types
import typing

from datatrove_ckpt.config import InferenceConfig, MonitoringConfig
from datatrove_ckpt.rollouts import (
    ChunkedRollout,
    ClassifyRollout,
    CompletionRollout,
    EmbedRollout,
    JudgeRollout,
    PromptRollout,
)
from datatrove_ckpt.runner import InferenceRunner
from tests.pages import ROOT

PAGE = ROOT / "docs/settings.md"

_UNITS = (
    "seconds", "tokens", "requests", "documents", "rollouts", "attempts", "servers", "restarts", "GPUs", "copies",
    "stages", "port", "commits", "characters", "parts", "answers", "pixels", "numbers", "texts",
)  # fmt: skip
_PURE_NUMBERS = ("seed", "lowest", "highest", "threshold")
_ENTRY = re.compile(r"^ {8}(\w+(?:, \w+)*)(?: \((\w+)\))?: (.*(?:\n {12}.*)*)", re.MULTILINE)
_BETWEEN_RUNS = {
    "identity": "stays",
    "request": "stays",
    "free": "may change",
    "below": "[see below](#inferenceconfig)",
}
_HEAD = """\
# Settings

<!-- Written by python -m tests.settings_page. Do not edit this page: edit the docstrings. -->

In the [short form](cli.md#the-short-form), settings of the runner, its config and its prompt stand side by side, or
are flags (`--drain-seconds 60`). In the long form, the runner's are keys of its `init_args`, and the others of its
`config`, `monitoring` and `rollout_fn`. Each is shown with its default; one without is None (YAML: `null`). Some may
[change between two runs](recovery.md#one-checkpoint-belongs-to-one-run).
"""
_RUNNER = """
## InferenceRunner

The first eight are datatrove's.
"""
_CONFIG = """
## InferenceConfig

Those up to `server_start_max_retries` are datatrove's.
"""
_ROLLOUT = """
## {name}

{first}{others}
"""
_OF_A_TEXT = " `prompt_column` and how tokens are counted are as for `PromptRollout`."
_ROLLOUTS = {
    PromptRollout: " [Examples of all rollouts](rollouts.md).",
    CompletionRollout: " The others are those of `PromptRollout`, without `system_prompt` and `max_chars`.",
    ChunkedRollout: " `prompt_column`, `tokenizer` and `chars_per_token` are those of `PromptRollout`.",
    JudgeRollout: " The others are those of `PromptRollout`.",
    EmbedRollout: _OF_A_TEXT,
    ClassifyRollout: _OF_A_TEXT,
}
"""Each with what is said of the settings that it has from another one."""
_MONITORING = """
## MonitoringConfig

The keys of `monitoring` ([examples](monitoring.md)).
"""
_COLUMNS = "\n| setting | meaning |\n|---|---|\n"
_COLUMNS_OF_A_RUN = "\n| setting | between two runs | meaning |\n|---|---|---|\n"


def page():
    """The whole page."""
    runner = [
        (one.name, one.annotation, one.default)
        for one in inspect.signature(InferenceRunner, eval_str=True).parameters.values()
    ]
    found = f"{_HEAD}{_RUNNER}{_COLUMNS_OF_A_RUN}{_rows(runner, InferenceRunner)}"
    for head, columns, cls in (
        (_CONFIG, _COLUMNS_OF_A_RUN, InferenceConfig),
        (_MONITORING, _COLUMNS, MonitoringConfig),
    ):
        hints = typing.get_type_hints(cls)
        settings = [
            (one.name, hints[one.name], _field_default(one)) for one in dataclasses.fields(cls)
        ]
        found += f"{head}{columns}{_rows(settings, cls)}"
    return found + "".join(_rollout(cls, others) for cls, others in _ROLLOUTS.items())


def _rollout(cls, others):
    """A rollout's section. What its docstring leaves out is one of PromptRollout's settings."""
    settings = [
        (one.name, one.annotation, one.default)
        for one in inspect.signature(cls, eval_str=True).parameters.values()
    ]
    if cls is not PromptRollout:
        inherited = set(inspect.signature(PromptRollout).parameters) - set(descriptions(cls))
        order = list(descriptions(cls))  # what a base class has comes first in the signature
        settings = sorted(
            (one for one in settings if one[0] not in inherited),
            key=lambda one: order.index(one[0]),
        )
    first = " ".join((cls.__doc__ or "").partition("\n\n")[0].split()).replace("``", "`")
    heading = _ROLLOUT.format(name=cls.__name__, first=first, others=others)
    return f"{heading}{_COLUMNS}{_rows(settings, cls)}"


def _field_default(field):
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default


def _rows(settings, cls):
    texts = descriptions(cls)
    assert list(texts) == [name for name, _, _ in settings], (
        f"{cls.__name__}: settings and docstring differ"
    )
    for name, hint, _ in settings:
        check_unit(name, hint, texts[name])
    effects = effects_of_changes(cls)
    rows = [
        [_shown(name, default), *map(_BETWEEN_RUNS.get, effects.get(name, "").split()), texts[name]]
        for name, _, default in settings
    ]
    return "".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n" for row in rows
    )


def descriptions(cls):
    """What the class's docstring says of each setting, as Markdown."""
    return {
        name: " ".join(text.split()).replace("``", "`")
        for names, _, text in _entries(cls)
        for name in names.split(", ")
    }


def effects_of_changes(cls):
    """What the docstring says in brackets: "identity", "request" or "free", where it says so."""
    return {names: effect for names, effect, _ in _entries(cls) if effect}


def _entries(cls):
    return _ENTRY.findall((cls.__doc__ or "").partition("Raises:")[0])


def check_unit(name, hint, text):
    """A numeric setting says its unit.

    Raises:
        ValueError: it does not.
    """
    if (
        name in _PURE_NUMBERS
        or not {int, float} & set(_alternatives(hint))
        or name.endswith(("_seconds", "_sec"))
    ):
        return
    if text.partition(" ")[0] not in _UNITS and not re.search(
        rf", in ({'|'.join(_UNITS)})\b", text
    ):
        raise ValueError(
            f"{name}: its docstring does not say the unit, one of {', '.join(_UNITS)}."
        )


def _alternatives(hint):
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [kind for part in typing.get_args(hint) for kind in _alternatives(part)]
    return [hint]


def _shown(name, default):
    if default is inspect.Parameter.empty:
        return f"`{name}` (required)"
    return f"`{name}`" if default is None else f"`{name}: {json.dumps(default)}`"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"{PAGE} is written.")
