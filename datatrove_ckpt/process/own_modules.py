"""The user's own modules, which machines that have none of them get: imported, and beside the script or in this folder.

name.py                            itself
a package, one with __init__.py    all its files: also templates and tables
one without (a namespace package)  its .py files: such a folder may hold all that a user has
hidden files, environments         never
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

_ENVIRONMENT = {"pyvenv.cfg", "conda-meta"}
_NO_CODE = {"__pycache__", "site-packages"}


def own_modules() -> dict[str, dict[str, Path]]:
    """Of each its files, by their names from the folder that it lies in."""
    found: dict[str, dict[str, Path]] = {}
    here = {Path(folder).absolute() for folder in [*sys.path[:1], str(Path.cwd())]}
    for name in sorted({name.partition(".")[0] for name in [*sys.modules]} - {"datatrove_ckpt"}):
        for place in places_of(name):
            if place.parent in here and place.name in (name, f"{name}.py") and not is_installed(place):
                files = [place] if place.suffix else _files(place)
                found.setdefault(name, {}).update({file.relative_to(place.parent).as_posix(): file for file in files})
    return found


def places_of(name: str) -> list[Path]:
    """The file of an imported module, or the folders of a package; none of what is built in."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    if not isinstance(spec, ModuleSpec):
        return []
    places = [*(spec.submodule_search_locations or ())] or [spec.origin or ""] * spec.has_location
    return [Path(place).absolute() for place in places]


def is_installed(place: Path) -> bool:
    """Whether it is Python's, or of a package that pip or the system has installed."""
    by_pip = {"site-packages", "dist-packages"} & {*place.parts}
    return bool(by_pip) or place.is_relative_to(sysconfig.get_path("stdlib"))


def _files(package: Path) -> Iterator[Path]:
    regular: set[str] = set()
    for folder, folders, names in os.walk(package):
        if _ENVIRONMENT & {*folders, *names}:
            folders.clear()
            continue
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _NO_CODE)
        if "__init__.py" in names or str(Path(folder).parent) in regular:
            regular.add(folder)
        for name in sorted(names):
            kept = name.endswith(".py") or (folder in regular and not name.endswith(".pyc"))
            if kept and not name.startswith(".") and (file := Path(folder, name)).is_file():
                yield file
