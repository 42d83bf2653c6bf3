"""docs/settings.md, made of the signatures and docstrings of the runner, its configs and the
rollouts.

    python -m tests.settings_page
"""

import inspect
import json

from datatrove_ckpt.common.setting_types import meanings, parameters_of
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
    found = f"{_HEAD}{_RUNNER}{_COLUMNS_OF_A_RUN}{_rows(InferenceRunner)}"
    found += f"{_CONFIG}{_COLUMNS_OF_A_RUN}{_rows(InferenceConfig)}"
    found += f"{_MONITORING}{_COLUMNS}{_rows(MonitoringConfig)}"
    return found + "".join(_rollout(cls, others) for cls, others in _ROLLOUTS.items())


def _rollout(cls, others):
    """A rollout's section. What its docstring leaves out is one of PromptRollout's settings."""
    inherited = set()
    if cls is not PromptRollout:
        inherited = set(parameters_of(PromptRollout)[0]) - set(meanings(cls))
    first = " ".join((cls.__doc__ or "").partition("\n\n")[0].split()).replace("``", "`")
    heading = _ROLLOUT.format(name=cls.__name__, first=first, others=others)
    return f"{heading}{_COLUMNS}{_rows(cls, inherited)}"


def _rows(cls, inherited=()):
    parameters = parameters_of(cls)[0]
    texts = meanings(cls)
    assert set(texts) == set(parameters) - set(inherited), (
        f"{cls.__name__}: settings and docstring differ"
    )
    rows = []
    for name, (effect, text) in texts.items():
        shown = _shown(name, parameters[name].default)
        rows.append([shown, *map(_BETWEEN_RUNS.get, effect.split()), text])
    return "".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n" for row in rows
    )


def _shown(name, default):
    if default is inspect.Parameter.empty:
        return f"`{name}` (required)"
    return (
        f"`{name}`"
        if default is None
        else f"`{name}: {json.dumps(default, default=lambda made: {})}`"
    )


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"{PAGE} is written.")
