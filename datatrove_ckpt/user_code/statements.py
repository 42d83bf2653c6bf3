"""Parses the user's files into top-level statements: the names that each binds, changes, mentions.

Files are found and parsed, never imported, and nothing is run. The cells of a notebook are one
file. Texts of statements are equal on all Python versions.

``ast`` in CPython 3.11 counts its recursion in a variable of the whole interpreter, so two threads
that parse at the same time fail with ``SystemError``. So all parsing happens here, behind one lock,
and is retried, because other code (loguru) may also parse.

This module and ``description`` import only the standard library: a test runs them on every Python.
"""

from __future__ import annotations

import ast
import builtins
import dis
import functools
import hashlib
import linecache
import os
import re
import sys
import threading
import time
import types
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

Chain = tuple[str, ...]
"""A name and the attributes that follow it: ``("words", "TABLE")``."""
_IMPORT = ast.Import | ast.ImportFrom
_DEFINITION = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_ASSIGNMENT = ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
NOTEBOOK = "<notebook>"
CELL = re.compile(r"<(i?python-input)-.*>|.*[\\/]ipykernel_\d+[\\/].*")
_CHANGING = frozenset(
    """
    add append appendleft clear delattr discard exec extend insert pop popleft register remove
    setattr setdefault shuffle update
    """.split()  # noqa: SIM905
)
_PACING = frozenset(
    """
    ArgumentParser BoundedSemaphore Lock ProcessPoolExecutor RLock Semaphore ThreadPoolExecutor
    add_argument getLogger setLevel
    """.split()  # noqa: SIM905
)
"""Calls that change no answer, and that people adapt to a machine."""
_WRITING = frozenset(
    "FileHandler dump makedirs mkdir touch write write_bytes write_text writelines".split()  # noqa: SIM905
)
READING = frozenset(
    """
    FileSystemLoader files genfromtxt get_data glob loadtxt open read_bytes read_csv read_json
    read_table read_text
    """.split()  # noqa: SIM905
)
_TEXT_FILE = re.compile(r".*\.(txt|md|json|ya?ml|toml|j2|jinja2?|prompt|tmpl)")
_PART = ast.Attribute | ast.Subscript
_MAPPING = frozenset("__dict__ copy get items keys pop update values".split())  # noqa: SIM905
_BUILDERS = frozenset("__init__ __new__ __post_init__ __setstate__".split())  # noqa: SIM905
_MODES = frozenset("a ab w wb x xb".split())  # noqa: SIM905
_LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
# The context follows from the parent node; the kind tells u"" from "".
_IGNORED_FIELDS = {"ctx", "kind", "simple", "type_comment", "type_params"}
_IMPORT_LINE = re.compile(
    r"^[ \t]*(?:from[ \t]+(\.*)([.\w]*)[ \t]+import\b[ \t]*(\([^)]*\)|.*)|import[ \t]+(.*))", re.M
)
_STARTED = time.time()
_lock = threading.RLock()


def parse(source: str) -> ast.Module:
    """Parses a module, like ``ast.parse``, but for several threads."""
    tree: ast.Module = _compile(source, ast.PyCF_ONLY_AST)
    return tree


def _compile(source: object, flags: int) -> Any:
    with _lock, warnings.catch_warnings():
        # As an error, a warning about an escape would hide the source.
        warnings.simplefilter("ignore")
        compiled = functools.partial(compile, source, "", "exec", flags, dont_inherit=True)
        for _ in range(19):
            with suppress(SystemError):  # a thread that does not take the lock
                return compiled()
        return compiled()


def compile_tree(body: list[ast.stmt]) -> types.CodeType:
    tree = ast.fix_missing_locations(ast.Module(body, []))
    code: types.CodeType = _compile(tree, ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    return code


def nested_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from nested_codes(constant)


def loaded_names(code: types.CodeType) -> set[str]:
    steps = [step for inner in nested_codes(code) for step in dis.get_instructions(inner)]
    return {step.argval for step in steps if step.opname.startswith(_LOADS)}


def digest(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode("utf-8", "backslashreplace")).hexdigest()[:32]


# text that is equal on all Pythons ---------------------------------------------------------------


def write_tree(node: object) -> str:
    if isinstance(node, list):
        # {**x} has a key that is absent, {None: x} has the constant None.
        parts = [element for element in node if not isinstance(element, ast.Pass)]
        return f"[{','.join('_' if element is None else write_tree(element) for element in parts)}]"
    if isinstance(node, ast.Constant):
        return write_constant(node.value)
    if not isinstance(node, ast.AST):
        return write_constant(node)
    name = type(node).__name__
    if name in ("JoinedStr", "TemplateStr"):  # the second is new in Python 3.14
        return _write_parts(name, getattr(node, "values", []))
    # Empty fields are omitted: newer Python versions have more of them.
    written = {
        field: write_tree(part)
        for field, part in ast.iter_fields(node)
        if field not in _IGNORED_FIELDS and part is not None and part != []
    }
    if written.get("format_spec") == "''":
        del written["format_spec"]  # f"{x:}" is f"{x}"
    return f"({name}{''.join(f' {field}={text}' for field, text in written.items())})"


def _write_parts(name: str, parts: list[Any]) -> str:
    if name == "JoinedStr" and all(isinstance(part, ast.Constant) for part in parts):
        return write_constant("".join(str(part.value) for part in parts))  # f"text" is "text"
    written = [
        str(part.value).encode("utf-8", "surrogatepass").hex()
        if isinstance(part, ast.Constant)
        else write_tree(part)
        for part in parts
    ]
    return f"({name} {''.join(written)})"


def write_constant(value: object) -> str:
    """Writes a constant: ``repr`` of a set depends on chance, and of a string on the version."""
    if isinstance(value, int) and not isinstance(value, bool):
        return hex(value)  # str() refuses more than 4300 digits
    if isinstance(value, tuple):
        return f"tuple({','.join(map(write_constant, value))})"
    if isinstance(value, frozenset):
        return f"set({','.join(sorted(map(write_constant, value)))})"
    if isinstance(value, types.CodeType):
        names = (value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars)
        fields = (value.co_code, value.co_exceptiontable, *names, value.co_consts)
        return f"code{write_constant(fields)}"
    return ascii(value)


class _Undocumented(ast.NodeTransformer):
    """Removes docstrings and hints, except hints of the fields of classes."""

    def __init__(self) -> None:
        self._fields = set[int]()

    def visit(self, node: Any) -> object:
        if isinstance(node, _DEFINITION) and ast.get_docstring(node, clean=False) is not None:
            node.body[0] = ast.Pass()
        if isinstance(node, ast.ClassDef):
            self._fields.update(map(id, node.body))
        elif hasattr(node, "annotation") and id(node) not in self._fields:
            node.annotation = None
        if hasattr(node, "returns"):
            node.returns = None
        self.generic_visit(node)
        if isinstance(node, ast.AnnAssign) and node.annotation is None:
            bare = ast.Assign([node.target], node.value) if node.value else ast.Pass()
            return ast.copy_location(bare, node)
        return node


# statements --------------------------------------------------------------------------------------


class Import(NamedTuple):
    """An import of one name.

    Attributes:
        bound: name in the importing file; ``*`` for all names.
        names: imported name of the module; empty for the module itself, or for all its names.
    """

    bound: str
    level: int
    module: str
    names: Chain


class Statement:
    """A top-level statement.

    Attributes:
        source: file of the statement, or the notebook of its cell.
        changes: chains that it changes: ``D[k] = v``, ``D.update()``, ``@render.register``.
        passed: chains that it passes to a call, which may change them.
        texts: its strings; ``*`` stands for the values in an f-string.
        texts_at_import: its strings outside of functions' bodies.
    """

    def __init__(self, source: CodeSource, file: str, node: Any, documented: bool) -> None:
        self.source = source
        self.file = file
        self.index = 0
        self.line = node.lineno
        decorators = getattr(node, "decorator_list", [])
        self.lines = range(min(part.lineno for part in [node, *decorators]), node.end_lineno + 1)
        if not documented:
            node = _Undocumented().visit(node)
        self.node = node
        self.is_definition = isinstance(node, _DEFINITION)
        self.is_import = isinstance(node, _IMPORT)
        self._nodes = [*ast.walk(node)]
        self._calls = self._of(ast.Call)
        self.words = {*map(name_of, self._nodes)} - {""}
        self.texts = {*map(_pattern, self._nodes)} - {""}
        functions = self._of(ast.FunctionDef | ast.AsyncFunctionDef)
        bodies = [line for function in functions for line in function.body]
        inside = {part for line in bodies for part in ast.walk(line)}
        self.texts_at_import = {*map(_pattern, {*self._nodes} - inside)}
        self.imports = [imported for line in self._of(_IMPORT) for imported in _imports(line)]
        self.binds = self._binds()
        keywords = [keyword.value for keyword in getattr(node, "keywords", ())]
        self.bases = _chains_of([*getattr(node, "bases", ()), *keywords])
        self._changed = self._changed_parts()
        calls = self._calls_for_effect()
        called = [call.func for call in calls]
        self.changes = _chains_of([*decorators, *called, *self._changed])
        passing = [call for call in calls if isinstance(call.func, ast.Name)]
        passed = [part for call in passing for part in ast.walk(call)]
        self.passed = _chains_of(passed) - self.changes

    def _changed_parts(self) -> list[object]:
        changed = [part for part in self._of(_PART) if not isinstance(part.ctx, ast.Load)]
        for call in self._calls:
            if name_of(call) in _CHANGING:
                changed.append(call.func)
                if isinstance(call.func, ast.Name):
                    changed += ast.walk(call)
        return changed

    def _calls_for_effect(self) -> list[ast.Call]:
        """Returns the calls whose result is not used: they may change their arguments.

        Omits calls of builtins, and calls in a definition, which does not run yet.
        """
        if self.is_definition:
            return []
        values = [line.value for line in self._of(ast.Expr)]
        calls = [value for value in values if isinstance(value, ast.Call)]
        return [call for call in calls if not hasattr(builtins, name_of(call))]

    def number_of(self, code: types.CodeType) -> int:
        codes = nested_codes(compile_tree([self.node]))
        positions = [[*other.co_positions()] for other in codes if other.co_name == code.co_name]
        position = [*code.co_positions()]
        return positions.index(position) if position in positions else -1

    def _of(self, kind: Any) -> list[Any]:
        return [node for node in self._nodes if isinstance(node, kind)]

    @property
    def alias(self) -> str:
        return f"<{self.index}>"

    @functools.cached_property
    def text(self) -> str:
        return write_tree(self.node)

    @property
    def is_pacing(self) -> bool:
        value = getattr(self.node, "value", None)
        return isinstance(value, ast.Call) and name_of(value) in _PACING

    def _binds(self) -> set[str]:
        names = {name for line in self._of(ast.Global) for name in line.names}
        if self.is_definition:
            return {self.node.name, *names}
        names |= {*map(name_of, self._of(_DEFINITION))}
        names |= {imported.bound for imported in self.imports}
        stored = [node for node in self._nodes if isinstance(getattr(node, "ctx", None), ast.Store)]
        names |= {*map(name_of, stored)}
        if "globals" in self.words:
            names |= self.texts
        if isinstance(getattr(self.node, "value", None), ast.Constant):
            names.add("__doc__")
        return names - {""}

    @property
    def rebound(self) -> set[str]:
        if self.changes or not (self.is_import or isinstance(self.node, ast.Assign)):
            return set()
        return self.binds - {chain[0] for chain in self.chains}

    @functools.cached_property
    def chains(self) -> list[Chain]:
        if self.is_import:
            return []
        file_names = loaded_names(compile_tree([self.node]))
        file_names |= {imported.bound for imported in self.imports}
        inside = {id(attribute.value) for attribute in self._of(ast.Attribute)}
        chains = [chain_of(node) for node in self._of(ast.expr) if id(node) not in inside]
        return [*dict.fromkeys(chain for chain in chains if chain and chain[0] in file_names)]

    @property
    def mutated(self) -> set[str]:
        functions = self._of(ast.FunctionDef)
        builders = [function for function in functions if function.name in _BUILDERS]
        building = {part for function in builders for part in ast.walk(function)}
        running = [chain_of(part) for part in self._changed if part not in building]
        scopes = [line.names for line in self._of(ast.Nonlocal)]
        return {name for names in [*running, *scopes] for name in names}

    @property
    def written(self) -> set[str]:
        names = set()
        for call in self._calls:
            opens = name_of(call) == "open" and not _MODES.isdisjoint(map(_pattern, call.args))
            if opens or name_of(call) in _WRITING:
                names |= identifiers_of(call)
        return names

    @property
    def files(self) -> set[str]:
        if self.written:
            return set()
        reading = [call for call in self._calls if name_of(call) in READING]
        named = {_pattern(part) for call in reading for part in ast.walk(call)}
        return named | {text for text in self.texts if _TEXT_FILE.fullmatch(text)}

    @functools.cached_property
    def assigned(self) -> list[tuple[set[str], set[str], set[str]]]:
        values = []
        for node in self._of(_ASSIGNMENT | ast.keyword | _DEFINITION):
            targets = [*getattr(node, "targets", ()), getattr(node, "target", None)]
            names = {name_of(node)}.union(*map(identifiers_of, filter(None, targets)))
            calls = {name_of(part) for part in ast.walk(node) if isinstance(part, ast.Call)}
            values.append((names - {""}, calls, identifiers_of(node)))
        return values

    def takes_all(self, function: str, variable: str) -> bool:
        for node in self._of(_FUNCTIONS):
            if getattr(node, "name", "<lambda>") != function:
                continue
            inside = [*ast.walk(node)]
            names = [name for name in inside if getattr(name, "id", "") == variable]
            parts = [part for part in inside if isinstance(part, _PART)]
            partly_used = {
                part.value
                for part in parts
                if isinstance(getattr(part, "slice", part), ast.Constant | ast.Attribute)
                and name_of(part) not in _MAPPING
            }
            if not partly_used.issuperset(names):
                return True
        return False


def name_of(node: object) -> str:
    if isinstance(node, ast.Call):
        return name_of(node.func)
    fields = [getattr(node, field, None) for field in ("id", "attr", "name", "arg")]
    return next((name for name in fields if isinstance(name, str)), "")


def _pattern(node: object) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(_pattern(part) or "*" for part in node.values)
    value = getattr(node, "value", None)
    return value if isinstance(node, ast.Constant) and isinstance(value, str) else ""


def identifiers_of(node: ast.AST) -> set[str]:
    return {name_of(part) for part in ast.walk(node)} - {""}


def chain_of(node: object) -> Chain:
    """Returns the chain of a node: ``("a", "b")`` for ``a.b``, ``a.b[0]`` and ``a.b().c``."""
    attributes: Chain = ()
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Attribute):
            attributes = (node.attr, *attributes)
            node = node.value
        elif isinstance(node, ast.Subscript):
            attributes = ()
            node = node.value
        elif isinstance(node, ast.Call):
            attributes = ()
            node = node.func
        else:
            return ()
    return (node.id, *attributes)


def _chains_of(nodes: Iterable[object]) -> set[Chain]:
    return {*map(chain_of, nodes)} - {()}


def _imports(node: ast.Import | ast.ImportFrom) -> Iterator[Import]:
    for alias in node.names:
        if isinstance(node, ast.ImportFrom):
            names = () if alias.name == "*" else (alias.name,)
            yield Import(alias.asname or alias.name, node.level, node.module or "", names)
        elif alias.asname:
            yield Import(alias.asname, 0, alias.name, ())
        else:
            top = alias.name.partition(".")[0]
            yield Import(top, 0, top, ())


# files -------------------------------------------------------------------------------------------


class CodeSource:
    """A file of the user, or the cells of a notebook. It is parsed on first use."""

    def __init__(self, path: str, documented: bool) -> None:
        self.path = path
        self.folder = os.path.dirname(path)  # noqa: PTH120
        self._documented = documented
        linecache.checkcache(path)
        files = [path]
        if path == NOTEBOOK:
            files = [*filter(CELL.match, linecache.cache)]
        self.texts = {file: "".join(linecache.getlines(file)) for file in files}
        if path == NOTEBOOK:  # a cell counts where it was run last
            inputs = vars(sys.modules["__main__"]).get("In", ())  # of IPython
            runs = {text.rstrip("\n"): number for number, text in enumerate(inputs)}
            by_run = sorted(self.texts.items(), key=lambda cell: runs.get(cell[1].rstrip("\n"), -1))
            self.texts = dict(by_run)

    def holds(self, name: str) -> bool:
        word = re.compile(rf"\b{re.escape(name)}\b")
        return any(name in text and word.search(text) for text in self.texts.values())

    def imports(self) -> Iterator[tuple[int, str, list[str]]]:
        for text in self.texts.values():
            for dots, module, names, modules in _IMPORT_LINE.findall(text):
                for name in [module, *re.findall(r"\w[\w.]*", modules)]:
                    if name or dots:
                        yield len(dots), name, re.findall(r"\w+", names)

    def is_of(self, code: types.CodeType) -> bool:
        """Whether this is the source of a function: it may have been edited or removed."""
        text = self.texts.get(code.co_filename)
        changed_at = 0.0
        with suppress(OSError):  # an archive, or a cell of a notebook
            changed_at = os.stat(code.co_filename).st_mtime  # noqa: PTH116 (co_filename is text)
        if text and changed_at <= _STARTED:
            return True
        codes = nested_codes(compile_tree(parse(text or "").body))
        return write_constant(code) in map(write_constant, codes)

    @functools.cached_property
    def statements(self) -> list[Statement]:
        cells: dict[object, list[Statement]] = {}
        for file, text in self.texts.items():
            # A file that cannot be parsed cannot be imported.
            with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
                body = parse(text).body
                cell = [Statement(self, file, node, self._documented) for node in _apart(body)]
                key = file
                if self.path == NOTEBOOK:  # a cell with another comment is the same cell
                    key = "\n".join(statement.text for statement in cell)
                cells.pop(key, None)
                cells[key] = cell
        statements = [statement for cell in cells.values() for statement in cell]
        used_by = {
            statement.node.name: statement.words
            for statement in statements
            if statement.is_definition
        }
        made = set[str]().union(*(part.binds for part in statements if not part.is_import))
        # A statement whose names are bound anew before their use does not count. In a file, only
        # definitions are such statements; in a notebook, people edit and run all of them again.
        replaced = set[str]()
        counted: list[Statement] = []
        for index, statement in reversed([*enumerate(statements)]):
            statement.index = index
            changed = {chain[0] for chain in statement.changes}
            affected = set[str]()
            rebound = set[str]()
            if self.path == NOTEBOOK:
                changed &= made  # an imported decorator changes nothing here
                affected = (statement.binds | changed) - {"__doc__"}
                called = statement.words & used_by.keys()
                rebound = statement.rebound.difference(*map(used_by.__getitem__, called))
            if statement.is_definition:
                rebound = {statement.node.name}
                if not changed:
                    affected = rebound
            if affected and affected <= replaced:
                continue
            if changed or not statement.is_definition:
                replaced -= statement.words
            counted.insert(0, statement)
            replaced |= rebound
        return counted

    @functools.cached_property
    def _named(self) -> dict[str, list[Statement]]:
        statements_by_name: dict[str, list[Statement]] = {}
        for statement in self.statements:
            for name in (statement.alias, *statement.binds):
                statements_by_name.setdefault(name, []).append(statement)
        return statements_by_name

    def bound(self, name: str) -> list[Statement]:
        if name == "":
            return self.statements
        if name.isidentifier() and not self.holds(name):
            return []
        return self._named.get(name, [])


def _apart(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        if isinstance(node, _IMPORT):
            for alias in node.names:
                if getattr(node, "module", "") != "__future__":
                    yield ast.copy_location(type(node)(**{**vars(node), "names": [alias]}), node)
        elif isinstance(node, ast.If) and "__name__" in identifiers_of(node.test):
            yield from _apart(node.body)
        elif "overload" not in map(name_of, getattr(node, "decorator_list", ())):
            yield node
