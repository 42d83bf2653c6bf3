"""Edits of a project, as `data/code_edits_*.txt` writes them."""

import re
import sys
from pathlib import Path
from typing import NamedTuple

DATA = Path(__file__).parent / "data"


_EDIT = re.compile("«([^«»→]*)→([^«»]*)»")


_FLAGS = re.compile(r" \[([^]]+)\]")


class Row(NamedTuple):
    """An edit: the project's files before and after it, by name."""

    name: str
    flags: set[str]
    before: dict[str, str]
    after: dict[str, str]


def rows(kind):
    for part in re.split(r"^## ", (DATA / f"code_edits_{kind}.txt").read_text(), flags=re.M)[1:]:
        name, _, text = re.sub(r"^# .*\n", "", part, flags=re.M).partition("\n")
        flags = set(_FLAGS.findall(name))
        if any(
            re.fullmatch(r"3\.\d+", flag) and tuple(map(int, flag.split("."))) > sys.version_info
            for flag in flags
        ):
            continue
        name = _FLAGS.sub("", name)
        before, edits = files(text, None), [(found[1], found[2]) for found in _EDIT.finditer(text)]
        if not name.startswith("each: "):
            yield Row(name, flags, before, files(text, set(range(len(edits)))))
            continue
        for index, (old, new) in enumerate(edits):
            change = " ".join(f"{old} -> {new}".split()) if old else f"with {' '.join(new.split())}"
            yield Row(f"{name[6:]}: {change}", flags, before, files(text, {index}))


def files(text, edited):
    """The files with some of the edits."""
    numbers = iter(range(text.count("→")))
    text = _EDIT.sub(
        lambda found: found[2 if edited is not None and next(numbers) in edited else 1], text
    )
    parts = re.split(r"^--- ?(.*)\n", f"--- script.py\n{text}", flags=re.M)[1:]
    found = {name: content for name, content in zip(parts[::2], parts[1::2], strict=True) if name}
    found["script.py"] = re.sub(
        r"^rollout: (.*)$",
        r'async def rollout(document, generate):\n    return await generate({"prompt": \1})',
        found["script.py"],
        flags=re.M,
    )
    if "rename" in found:
        found[f"{found.pop('rename').strip()}.py"] = found.pop("script.py")
    return found
