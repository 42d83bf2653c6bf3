"""README's code, so that tests can run it."""

from __future__ import annotations

import re
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text()


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def commands() -> list[str]:
    """The two lines: the quick start, and the tests. Everything else in bash blocks starts with datatrove-ckpt."""
    lines = [block.strip().replace("\\\n", "") for block in blocks("bash")]
    return [line for line in lines if line.startswith("python3 -m venv")]
