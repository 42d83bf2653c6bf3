"""Each name that the tests import from the package or from each other is there, in imports inside functions, too.

Else only the suite that imports it would find out: one of .ci/run, or whoever starts a command of tests/bench.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_IMPORT = re.compile(r"^[ \t]*(from (?:tests|datatrove_ckpt)\b[\w.]* import (?:\([^)]*\)|.*))", re.MULTILINE)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Those of a module, also in its branches, but not in its functions."""
    for node in body:
        yield node
        for part in ("body", "orelse", "handlers") if isinstance(node, ast.If | ast.Try | ast.With) else ():
            yield from _statements(getattr(node, part, []))


def _names(module: str) -> set[str]:
    """What a module binds or holds, from its source: so what it imports itself need not be installed."""
    path = ROOT / module.replace(".", "/")
    found = {each.stem for each in path.iterdir()} if path.is_dir() else set()
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in _statements(ast.parse(source.read_text()).body if source.exists() else []):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):  # keys, too: names that a package imports at first use
            parts = list(ast.walk(node))
            found |= {part.id for part in parts if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
            found |= {part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)}
    return found


@pytest.mark.slow
def test_what_tests_import_is_there() -> None:
    wanted: dict[str, dict[str, str]] = {}
    for path in (ROOT / "tests").rglob("*.py"):
        for text in _IMPORT.findall(path.read_text()):
            (node,) = ast.parse(text.rstrip("\\")).body
            assert isinstance(node, ast.ImportFrom)
            wanted.setdefault(str(node.module), {}).update({alias.name: path.name for alias in node.names})
    known = {module: _names(module) for module in wanted}
    missing = [(m, name, path) for m, names in wanted.items() for name, path in names.items() if name not in known[m]]
    assert len(wanted) > 200
    assert missing == []
