"""The tables of numbers and metrics in docs/status.md, made of their declarations.

python -m tests.status_page
"""

from datatrove_ckpt.common.counts import (
    METRICS,
    DocumentCounts,
    Processed,
    RunNumbers,
    SkippedLines,
    WorkCounts,
)
from datatrove_ckpt.common.setting_types import meanings
from tests.pages import ROOT

PAGE = ROOT / "docs/status.md"
MARK = "<!-- Written by python -m tests.status_page. Do not edit what follows: edit the docstrings of the numbers. -->\n"
_NUMBERS = "\n| key | meaning | Prometheus |\n|---|---|---|\n"
_METRICS = "\n## The metrics\n\n| metric | labels | meaning |\n|---|---|---|\n"
_GROUPS = {
    "": RunNumbers,
    "counts.": DocumentCounts,
    "work.": WorkCounts,
    "skipped.": SkippedLines,
    "rates.": Processed,
}


def page():
    """The whole page."""
    head, _, _ = PAGE.read_text().partition(MARK)
    return f"{head}{MARK}{_NUMBERS}{''.join(numbers())}{_METRICS}{''.join(metrics())}"


def metrics():
    for heading, text in METRICS.items():
        name, *labels = heading.split()
        yield f"| `{name}` | {', '.join(f'`{label}`' for label in labels)} | {text} |\n"


def numbers():
    for group, counts in _GROUPS.items():
        texts = meanings(counts)
        shown = counts.displays()
        assert list(texts) == list(shown), f"{counts.__name__}: numbers and docstring differ"
        for name, (_, text) in texts.items():
            metric, _, label = shown[name].prometheus.partition(".")
            if label:
                label = f" ({label})"
            yield f"| `{group}{name}` | {text} | {metric and f'`{metric}`{label}'} |\n"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"{PAGE} is written.")
