"""Finds what a prefix cache can save of the prompts of a sample, and what keeps it from doing so.

Engines keep prompts from their beginning, until others need the room. So equal text costs once only
where prompts begin with it, and soon after each other.
"""

import os
from collections.abc import Iterator, Sequence

from datatrove_ckpt.common.formatting import percent
from datatrove_ckpt.run_folder.finding import Finding

_LEAST = 64  # characters: a block of 16 tokens
_LEAST_SHARE = 0.05
# Small GPUs keep nothing that lies 100,000 tokens back.
_KEPT_CHARACTERS = 400_000


def check_prompts(prompts: Sequence[str], servers: int) -> Iterator[Finding]:
    """Compares the texts of prompts, which are in the order of the input; "" is none."""
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
    # Texts that begin alike, with more between them than the servers keep.
    compared = max(_LEAST, sum(map(len, rests)) // number // 4)
    starts = [text[:compared] for text in rests]
    last: dict[str, int] = {}
    apart = rows = shared = 0
    for row, text in enumerate(rests):
        earlier = last.get(starts[row], row)
        between = slice(earlier + 1, row)
        # Texts that come several times count once.
        sizes = dict(zip(starts[between], map(len, rests[between]), strict=True))
        if sum(sizes.values()) > _KEPT_CHARACTERS * servers:
            apart += 1
            rows += row - earlier
            shared += _common([rests[earlier], text])
        last[starts[row]] = row
    # Few pairs in a sample are many in the input: if each row of a million has seven relatives
    # anywhere, a thousand rows have three or four pairs. But single rows may be duplicates.
    if apart > number / 100:
        text = (
            f"{apart:,} of the first {number:,} prompts share {shared // apart:,} characters with "
            f"an earlier prompt, {rows // apart:,} rows before (averages), which a prefix cache "
            "may have lost by then. Sort the input, so that rows with the same text are neighbours."
        )
        yield Finding("warning", "order", text)


def _common(texts: Sequence[str]) -> int:
    """Returns how many characters all texts begin with together."""
    return len(os.path.commonprefix(texts))  # noqa: RUF071
