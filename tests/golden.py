"""Texts that commands print, in the files of tests/data/texts: a section for each case of a test.
Or tables: the title of a section is an expression, a row, and its text what that gives; rows that
only go in have no text.

Who means to change a text writes the file anew, and reads the difference:

    DATATROVE_CKPT_WRITE_GOLDEN=1 python -m pytest -n 0 -m "" tests/unit/test_kubernetes.py
"""

import os
from decimal import Decimal
from pathlib import Path
from uuid import UUID

import pytest
from datatrove.data import Media

from datatrove_ckpt import __version__
from datatrove_ckpt.errors import CkptError

DATA = Path(__file__).parent / "data"
FOLDER = DATA / "texts"
_USUAL = {"Decimal": Decimal, "Media": Media, "Path": Path, "UUID": UUID}
IS_WRITTEN = "DATATROVE_CKPT_WRITE_GOLDEN" in os.environ


def sections(file):
    """Their texts by title."""
    path = FOLDER / f"{file}.txt"
    found = {}
    if path.exists():
        for part in path.read_text().split("=== ")[1:]:
            title, _, text = part.partition("\n")
            found[title] = text.rstrip("\n")
    assert found or IS_WRITTEN, f"{path} has no section, so a test of its rows would test nothing"
    return found


def hold(file, section, text, **names):
    """Holds a text against its section. ``names``: what stands there for what differs."""
    for name, value in {**names, "HERE": Path.cwd(), "VERSION": __version__}.items():
        text = text.replace(str(value), name)
    held = sections(file)
    if not IS_WRITTEN:
        assert text.rstrip("\n") == held.get(section), section
        return
    held[section] = text.rstrip("\n")
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{file}.txt").write_text("\n".join(f"=== {name}\n{held[name]}\n" for name in held))


def show(file, code, names):
    """Holds what an expression, the title of a section, gives."""
    hold(file, code, repr(eval(code, {**_USUAL, **names})))


def refuse(file, code, names, **more):
    """Holds what an expression, the title of a section, is refused with. A new mistake is a title
    without a text. Returns the error.
    """
    with pytest.raises((CkptError, ImportError, TypeError, ValueError)) as refused:
        eval(code, {**names})
    text = str(refused.value)
    assert "hunter2" not in text
    hold(file, code, text, **more)
    return refused.value


def rows(file):
    """Runs a test for each title of a file, its argument ``code``."""
    return pytest.mark.parametrize("code", sections(file))


def shows(file, *names):
    """A test that holds what each title of a file gives, by the names of these dicts."""

    @rows(file)
    def test(code):
        show(file, code, {name: each[name] for each in names for name in each})

    return test


def values(file, names):
    """Those of the expressions that are the titles of a file."""
    return [eval(code, {**_USUAL, **names}) for code in sections(file)]


def named(file, names):
    """The same, by the words after ``  # ``."""
    words = [code.partition("  # ")[2] for code in sections(file)]
    return dict(zip(words, values(file, names), strict=True))
