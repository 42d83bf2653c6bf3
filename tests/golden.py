"""Texts that commands print, in the files of tests/data/texts: a section for each case of a test.

Who means to change a text writes the file anew, and reads the difference:

    DATATROVE_CKPT_WRITE_GOLDEN=1 python -m pytest -n 0 -m "" tests/unit/test_kubernetes.py
"""

import os
from pathlib import Path

from datatrove_ckpt import __version__

DATA = Path(__file__).parent / "data"
FOLDER = DATA / "texts"
IS_WRITTEN = "DATATROVE_CKPT_WRITE_GOLDEN" in os.environ


def hold(file, section, text, **names):
    """Holds a text against its section. ``names``: what stands there for what differs."""
    for name, value in {**names, "HERE": Path.cwd(), "VERSION": __version__}.items():
        text = text.replace(str(value), name)
    path = FOLDER / f"{file}.txt"
    sections = {}
    if path.exists():
        for part in path.read_text().split("=== ")[1:]:
            name, _, content = part.partition("\n")
            sections[name] = content.rstrip("\n")
    if not IS_WRITTEN:
        assert text.rstrip("\n") == sections.get(section), section
        return
    sections[section] = text.rstrip("\n")
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(f"=== {name}\n{sections[name]}\n" for name in sections))
