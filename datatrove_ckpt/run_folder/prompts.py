"""Finds what a prefix cache can save of the prompts of a sample, and what keeps it from doing so.

Engines keep prompts from their beginning, until others need the room. So equal text costs once only
where prompts begin with it, and soon after each other.
"""

import os
from collections.abc import Iterator, Sequence

from datatrove_ckpt.common.formatting import percent
from datatrove_ckpt.run_folder.checks import Finding

_LEAST = 64  # characters: a block of 16 tokens
_LEAST_SHARE = 0.05


def check_prompts(prompts: Sequence[str]) -> Iterator[Finding]:
    """Compares the texts of prompts; "" is none."""
    prompts = [text for text in prompts if text]
    number = len(prompts)
    if number < 2:
        return
    size = sum(map(len, prompts)) / number
    least = max(_LEAST, size * _LEAST_SHARE)
    start = _common(prompts)
    rests = [text[start:] for text in prompts]
    end = _common([text[::-1] for text in rests])
    if start >= least:
        text = (
            f"{size:,.0f} characters on average, of which the first {start:,} "
            f"({percent(start / size)}) are the same in all {number:,}: a prefix cache computes "
            "them once."
        )
        yield Finding("note", "prompts", text)
    if end >= least:
        text = (
            f"the last {end:,} characters of all {number:,} prompts are the same. A prefix cache "
            "helps at the beginning only: before the text that differs, they would save "
            f"{percent(end / size)} of each prompt."
        )
        yield Finding("warning", "end of prompts", text)


def _common(texts: Sequence[str]) -> int:
    """Returns how many characters all texts begin with together."""
    return len(os.path.commonprefix(texts))  # noqa: RUF071
