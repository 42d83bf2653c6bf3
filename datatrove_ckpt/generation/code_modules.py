"""The user's modules: where they are, what binds their names and uses them, and what differs at each start.

Modules are found and parsed, never imported, and nothing is run. ``Uses`` respects scopes: arguments, local variables
and those of comprehensions are not globals of the same name. Only an import inside a function is taken as if it stood
at the top, marked as late: the module may not be loaded yet.

This module imports only the standard library: a test runs it alone on every Python that it finds.
"""

from __future__ import annotations

import ast
import functools
import itertools
import linecache
import os
import re
import sys
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from typing import Any, NamedTuple

from datatrove_ckpt.generation.code_values import (
    Path,
    cells,
    compile_tree,
    digest,
    folder_of,
    is_of_machine,
    is_unstable,
    key,
    nested_codes,
    parse,
    wrapped,
    write_code,
    write_tree,
)

_STARTED = time.time()
PIPELINE = {"datatrove", "datatrove_ckpt"}  # which may run from a checkout
MAIN = ("__main__", "__mp_main__")
_STANDARD_LIBRARY = os.path.join(os.path.dirname(linecache.__file__), "")  # noqa: PTH118, PTH120 (co_filename is text)
_PACKAGES = re.compile(r"[\\/](site|dist)-packages[\\/]")
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_BLOCKS = (ast.If, ast.Try, ast.TryStar, ast.With, ast.Match)
_BUILDERS = {"__init__", "__new__", "__post_init__", "__setstate__", "__init_subclass__"}
_CHANGING = {
    *("append", "add", "update", "extend", "insert", "setdefault", "pop", "popitem", "popleft", "remove", "discard"),
    *("clear", "appendleft", "extendleft", "sort", "reverse", "move_to_end", "__setitem__", "subtract"),
}
TEXT_FILES = (".txt", ".md", ".json", ".yaml", ".yml", ".toml", ".j2", ".jinja", ".jinja2", ".prompt", ".tmpl")
_SHORT = 200
_WRITES = {"write_text", "write_bytes", "write", "writelines", "dump"}
_NO_OWNER = ("", "", "")


class Import(NamedTuple):
    """What an import binds: a module, or a name of one. ``late``: inside a function."""

    module: str
    name: str | None
    level: int
    late: bool


class Chain(NamedTuple):
    """``root.a["b"]``: a name that is no local variable, and what is taken of it.

    Attributes:
        called: the last step is a method.
        imported: what an import inside the function says of the name.
    """

    root: str
    path: tuple[str, ...]
    called: bool
    imported: Import | None


class _Scope(NamedTuple):
    """Names that a function or class binds. ``owner``: of a method: the class, its own name, and that of ``self``."""

    is_class: bool
    names: set[str]
    imports: dict[str, Import]
    owner: tuple[str, str, str]


class Uses:
    """What a part of a file uses.

    Attributes:
        chains: names that are not local, in the order of the source.
        changed: those that it changes: with True if only in place.
        rebound: names that it declares as those of another scope.
        arguments: local names of which it changes what they stand for, each with the paths of what it changes.
        attributes: that it changes: the class whose method does so, that method, the name, and such a path.
        words: all names, attributes and texts; the short texts; those that name a text file.
        writes: it may write files. computes_import: it imports a module whose name it computes.
        shows_set: it makes a set.
    """

    def __init__(self, node: ast.AST) -> None:
        self.chains: dict[Chain, None] = {}
        self.changed: dict[Chain, bool] = {}
        self.rebound: set[str] = set()
        self.arguments: dict[str, set[Path]] = {}
        self.attributes: set[tuple[str, str, str, Path]] = set()
        self.words: set[str] = set()
        self.texts: set[str] = set()
        self.files: dict[str, None] = {}
        self.writes = self.computes_import = self.shows_set = False
        self._waiting: list[tuple[ast.AST, tuple[_Scope, ...]]] = [(node, ())]
        while self._waiting:
            self._visit(*self._waiting.pop())

    def _push(self, nodes: Any, scopes: tuple[_Scope, ...]) -> None:
        self._waiting += [(node, scopes) for node in reversed([one for one in nodes if one is not None])]

    def _visit(self, node: ast.AST, scopes: tuple[_Scope, ...]) -> None:
        if isinstance(node, Function):
            args = node.args
            owner = scopes[-1].owner if scopes else _NO_OWNER
            if scopes and scopes[-1].is_class:
                first = [*args.posonlyargs, *args.args][:1]
                owner = (owner[0], getattr(node, "name", ""), first[0].arg if first else "")
            inner = (*[one for one in scopes if not one.is_class], _Scope(False, *bound_names(node), owner))
            self._push(node.body if isinstance(node.body, list) else [node.body], inner)
            decorators = getattr(node, "decorator_list", [])
            # Its hints choose when it is called, as with functools.singledispatch.
            is_registered = any(dotted(one)[-1:] == ["register"] for one in decorators)
            hints = [one.annotation for one in ast.walk(args) if isinstance(one, ast.arg)] if is_registered else []
            self._push([*args.defaults, *args.kw_defaults, *decorators, *hints], scopes)
        elif isinstance(node, ast.ClassDef):
            self._push(node.body, (*scopes, _Scope(True, *bound_names(node), (node.name, "", ""))))
            self._push([*node.decorator_list, *node.bases, *node.keywords], scopes)
        elif isinstance(node, _COMPREHENSIONS):
            self.shows_set |= isinstance(node, ast.SetComp)
            names = {name for part in node.generators for name in _stored(part.target)}
            begin, *rest = node.generators
            elements = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
            inner = (*scopes, _Scope(False, names, {}, scopes[-1].owner if scopes else _NO_OWNER))
            self._push([begin.target, *begin.ifs, *rest, *elements], inner)
            self._push([begin.iter], scopes)
        elif isinstance(node, ast.Name | ast.Attribute | ast.Subscript):
            self._chain(node, scopes)
        elif isinstance(node, ast.Call):
            given = [*node.args, *node.keywords]
            texts = [getattr(getattr(one, "value", one), "value", getattr(one, "value", one)) for one in given]
            name = dotted(node.func)[-1:]
            self.writes |= name == ["open"] and any(re.fullmatch("[wax][bt+]*", str(one)) for one in texts)
            if name in (["import_module"], ["__import__"]):
                text = str(texts[0]) if texts and isinstance(texts[0], str) else ""
                self.computes_import |= not text
                bound = Import(text.lstrip("."), None, len(text) - len(text.lstrip(".")), True)
                self.chains |= {Chain(name[0], (), False, bound): None} if text else {}
            self._push(given, scopes)
            self._chain(node.func, scopes, node)
        elif isinstance(node, ast.AnnAssign):  # hints of fields are values
            is_field = bool(scopes) and scopes[-1].is_class
            self._push([node.target, node.value, node.annotation if is_field else None], scopes)
        elif not isinstance(node, ast.Import | ast.ImportFrom):
            self.shows_set |= isinstance(node, ast.Set)
            self._text(node)
            if isinstance(node, ast.Global) or (isinstance(node, ast.Nonlocal) and len(scopes) == 1):
                self.rebound |= set(node.names)
            self._push(ast.iter_child_nodes(node), scopes)

    def _text(self, node: ast.AST) -> None:
        is_path = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)
        parts = [getattr(one, "value", None) for one in (_operands(node) if is_path else [node])]
        texts = [part for part in parts if isinstance(part, str) and len(part) < _SHORT and "\n" not in part]
        if isinstance(node, ast.BinOp | ast.Constant) and texts:
            self.words |= set(texts)
            self.texts |= set(texts)
            self.files |= {"/".join(texts): None} if texts[-1].endswith(TEXT_FILES) else {}

    def _chain(self, node: ast.AST, scopes: tuple[_Scope, ...], call: ast.Call | None = None) -> None:
        steps: list[ast.Attribute | ast.Subscript] = []
        inner = node
        while isinstance(inner, ast.Attribute | ast.Subscript):
            steps.insert(0, inner)
            inner = inner.value
        names = [step.attr for step in steps if isinstance(step, ast.Attribute)]
        self.words |= set(names)
        self.writes |= not _WRITES.isdisjoint(names)
        self._push([step.slice for step in steps if isinstance(step, ast.Subscript)], scopes)
        stores = any(not isinstance(getattr(one, "ctx", ast.Load()), ast.Load) for one in [inner, *steps])
        last = steps[-1].attr if steps and isinstance(steps[-1], ast.Attribute) else ""
        changes = (stores and bool(steps)) or (call is not None and last in _CHANGING)
        changed = steps[:-1] if call is not None or not last else steps
        index = max((number for number, one in enumerate(changed) if isinstance(one, ast.Attribute)), default=-1)
        owner = scopes[-1].owner if scopes else _NO_OWNER
        if changes and index >= 0 and owner[1] not in _BUILDERS:
            is_own = isinstance(inner, ast.Name) and inner.id == owner[2]
            name = changed[index].attr  # type: ignore[union-attr]
            self.attributes.add((owner[0] if is_own else "", owner[1], name, _keys(steps[index + 1 :])))
        if not isinstance(inner, ast.Name):
            self._push([inner], scopes)
            return
        scope = next((one for one in reversed(scopes) if inner.id in one.names or inner.id in one.imports), None)
        bound = scope.imports.get(inner.id) if scope is not None else None
        if bound is None and (scope is not None or (stores and not steps)):
            if scope is not None and changes:
                self.arguments.setdefault(inner.id, set()).add(_keys(steps))
            return
        self.words.add(inner.id)
        constant = [not isinstance(step, ast.Subscript) or isinstance(step.slice, ast.Constant) for step in steps]
        whole = all(constant)
        known = steps if whole else steps[: constant.index(False)]
        path = [one.attr if isinstance(one, ast.Attribute) else key(one.slice.value) for one in known]  # type: ignore[attr-defined]
        called = call is not None and whole and bool(path)
        if called and call is not None and last == "get" and call.args and isinstance(call.args[0], ast.Constant):
            path[-1], called = key(call.args[0].value), False
        chain = Chain(inner.id, tuple(path), called, bound)
        self.chains[chain] = None
        if changes:
            self.changed[chain] = not (stores and last and whole)


def _keys(steps: Sequence[ast.AST]) -> Path:
    """The constant keys with which steps begin."""
    parts = [one.slice if isinstance(one, ast.Subscript) else one for one in steps]
    return tuple(key(one.value) for one in itertools.takewhile(lambda one: isinstance(one, ast.Constant), parts))  # type: ignore[attr-defined]


def _operands(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.BinOp):
        yield from _operands(node.left)
        yield node.right
    else:
        yield node


def _stored(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and not isinstance(one.ctx, ast.Load)}


def bound_names(scope: ast.AST) -> tuple[set[str], dict[str, Import]]:
    """The names that a function or class binds in its own scope, and those that imports in it bind."""
    names: set[str] = set()
    imports: dict[str, Import] = {}
    outer: set[str] = set()
    waiting: list[ast.AST] = [*ast.iter_child_nodes(scope)]
    if isinstance(scope, Function):
        names = {one.arg for one in ast.walk(scope.args) if isinstance(one, ast.arg)}
        waiting = [*scope.body] if isinstance(scope.body, list) else [scope.body]
    names |= {one.name for one in getattr(scope, "type_params", [])}
    while waiting:
        node = waiting.pop()
        if isinstance(node, Definition):
            names.add(node.name)
            waiting += node.decorator_list
        elif isinstance(node, _COMPREHENSIONS):  # of which only := binds here
            names |= {one.target.id for one in ast.walk(node) if isinstance(one, ast.NamedExpr)}
        elif isinstance(node, ast.Import | ast.ImportFrom):
            imports |= dict(imported(node, late=isinstance(scope, Function)))
        elif isinstance(node, ast.Global):
            outer |= set(node.names)
        elif not isinstance(node, ast.Lambda):
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                names.add(node.id)
            elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar | ast.MatchMapping):
                names |= {getattr(node, "name", None) or getattr(node, "rest", None) or ""}
            waiting += ast.iter_child_nodes(node)
    return names - outer, imports


def imported(node: ast.Import | ast.ImportFrom, late: bool) -> Iterator[tuple[str, Import]]:
    """The names that an import binds."""
    for alias in node.names:
        if isinstance(node, ast.ImportFrom):
            yield alias.asname or alias.name, Import(node.module or "", alias.name, node.level, late)
        else:
            full = alias.name if alias.asname else alias.name.partition(".")[0]
            yield alias.asname or full, Import(full, None, 0, late)


def dotted(node: ast.AST) -> list[str]:
    """``["a", "b"]`` for ``a.b`` and for ``a.b(...)``."""
    names: list[str] = []
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        names += [node.attr] if isinstance(node, ast.Attribute) else []
        node = node.func if isinstance(node, ast.Call) else node.value
    return [*([node.id] if isinstance(node, ast.Name) else []), *reversed(names)]


class Binding(NamedTuple):
    """What binds a name of a module. ``tests``: the conditions around it. ``optional``: it may not be run."""

    statement: ast.stmt
    tests: tuple[ast.expr, ...] = ()
    imported: Import | None = None
    optional: bool = False


class Source:
    """A parsed file. Empty if it is none of this Python.

    Attributes:
        bindings: of its names, in order.
        changes: statements that change what a name stands for: ``D[k] = v``, ``D.update()``, ``@render.register``.
        stars: modules of which it imports all names.
        given: statements that call something with what a name stands for: ``random.shuffle(NAMES)``.
    """

    def __init__(self, text: str) -> None:
        try:
            self.tree = parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            self.tree = ast.Module([], [])
        self.bindings: dict[str, list[Binding]] = {}
        self.changes: dict[str, list[Binding]] = {}
        self.stars: list[Import] = []
        self.given: dict[str, list[Binding]] = {}
        self._uses: dict[int, Uses] = {}
        self._classes: dict[str, list[tuple[ast.ClassDef, list[tuple[ast.stmt, set[str]]]]]] = {}
        self._texts: dict[tuple[int, bool], str] = {}
        self._collect(self.tree.body, ())
        for name, bound in [*self.bindings.items()]:  # functions that fill a table of the module, used as decorators
            for statement in (one.statement for one in bound if isinstance(one.statement, Definition)):
                for decorator in statement.decorator_list:
                    self._note_filled(dotted(decorator)[:1], Binding(statement), name)

    def _collect(self, body: list[Any], tests: tuple[ast.expr, ...], optional: bool = False) -> None:
        for node in body:
            bound = Binding(node, tests, None, optional)
            if isinstance(node, _BLOCKS):
                parts = [
                    one for one in ast.iter_child_nodes(node) if isinstance(one, ast.ExceptHandler | ast.match_case)
                ]
                inner = [getattr(one, name, []) for one in (node, *parts) for name in ("body", "orelse", "finalbody")]
                outer = [one for one in ast.iter_child_nodes(node) if isinstance(one, ast.expr)]
                for part in inner:
                    self._collect(part, (*tests, *outer), optional or not isinstance(node, ast.With))
                items = [one.optional_vars for one in getattr(node, "items", []) if one.optional_vars is not None]
                for name in set().union(*map(_stored, items)):
                    self.bindings.setdefault(name, []).append(bound)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                for name, found in imported(node, late=False):
                    if name == "*":
                        self.stars.append(found)
                    else:
                        self.bindings.setdefault(name, []).append(Binding(node, tests, found, optional))
            elif isinstance(node, Definition):
                self.bindings.setdefault(node.name, []).append(bound)
                for root, *rest in map(dotted, node.decorator_list):
                    if rest:
                        self.changes.setdefault(root, []).append(bound)
            else:
                for name in bound_names(ast.Module([node], []))[0]:
                    self.bindings.setdefault(name, []).append(bound)
                changed = {chain.root for chain in self.uses(node).changed}
                if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                    called = dotted(node.value.func)
                    given = {one.id for one in node.value.args if isinstance(one, ast.Name)}
                    for name in given:
                        self.given.setdefault(name, []).append(bound)
                    changed |= (
                        given if called[-1:] in (["setattr"], ["delattr"]) else {*called[:1]} & self.bindings.keys()
                    )
                    self._note_filled(called[:1], bound, "")
                for name in changed:
                    self.changes.setdefault(name, []).append(bound)

    def _note_filled(self, called: list[str], bound: Binding, own: str) -> None:
        """A call at the top of a function that changes a variable of the module."""
        for name in called:
            for definition in self.bindings.get(name, []):
                if isinstance(definition.statement, ast.FunctionDef) and name != own:
                    uses = self.uses(definition.statement)
                    for changed in {chain.root for chain in uses.changed} | uses.rebound:
                        self.changes.setdefault(changed, []).append(bound)

    def uses(self, node: ast.AST) -> Uses:
        found = self._uses.get(id(node))
        if found is None:
            found = self._uses[id(node)] = Uses(node)
        return found

    def text(self, node: ast.AST, documented: bool) -> str:
        place = (id(node), documented)
        if place not in self._texts:
            self._texts[place] = write_tree(node, documented)
        return self._texts[place]

    @functools.cached_property
    def definitions(self) -> dict[tuple[str, int], list[tuple[ast.AST, ast.AST]]]:
        """Functions and classes by name and first line, each with the statement around it."""
        found: dict[tuple[str, int], list[tuple[ast.AST, ast.AST]]] = {}
        waiting: list[tuple[ast.AST, ast.AST]] = [(self.tree, self.tree)]
        while waiting:
            node, statement = waiting.pop()
            if isinstance(node, Function | ast.ClassDef):
                first = (getattr(node, "decorator_list", None) or [node])[0]
                found.setdefault((getattr(node, "name", "<lambda>"), first.lineno), []).append((node, statement))
            inner = node if isinstance(node, ast.stmt) else statement
            waiting += [(child, inner) for child in ast.iter_child_nodes(node)]
        return found

    def classes(self, name: str) -> list[tuple[ast.ClassDef, list[tuple[ast.stmt, set[str]]]]]:
        """Classes of this name, each with what is assigned in it: to its attributes, and to those of objects."""
        if name not in self._classes:
            found = [one for place, pairs in self.definitions.items() if place[0] == name for one, _ in pairs]
            self._classes[name] = [(one, [*_assigned(one)]) for one in found if isinstance(one, ast.ClassDef)]
        return self._classes[name]

    @functools.cached_property
    def codes(self) -> dict[tuple[str, str], list[int]]:
        """The lines of functions, by their name and by what this Python compiles from them."""
        found: dict[tuple[str, str], list[int]] = {}
        for code in nested_codes(compile_tree(self.tree)):
            found.setdefault((code.co_name, write_code(code)), []).append(code.co_firstlineno)
        return found

    def find(self, code: types.CodeType, edited: bool) -> ast.AST | None:
        """The function of which this is the code: by its line, or, if the file was edited, by its bytecode."""
        line = code.co_firstlineno
        if edited:
            lines = self.codes.get((code.co_name, write_code(code)), [])
            line = min(lines, key=lambda one: abs(one - line), default=-1)
        found = self.definitions.get((code.co_name, line), [])
        counts = [code.co_posonlyargcount, code.co_argcount, code.co_kwonlyargcount]
        found = [pair for pair in found if isinstance(pair[0], Function) and counts == _counts(pair[0].args)]
        # Lambdas that begin in one line cannot be told apart. The statement around them says what each of them is for.
        return None if not found else found[0][0] if len(found) == 1 else found[0][1]


def _assigned(node: ast.ClassDef) -> Iterator[tuple[ast.stmt, set[str]]]:
    for part in ast.walk(node):
        if isinstance(part, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = part.targets if isinstance(part, ast.Assign) else [part.target]
            names = [one for target in targets for one in ast.walk(target)]
            attributes = {one.attr for one in names if isinstance(one, ast.Attribute)}
            own = {one.id for one in names if isinstance(one, ast.Name)} if part in node.body else set()
            if attributes | own:
                yield part, attributes | own


def _counts(args: ast.arguments) -> list[int]:
    return [len(args.posonlyargs), len(args.posonlyargs + args.args), len(args.kwonlyargs)]


source_of = functools.lru_cache(maxsize=512)(Source)
"""The parsed file with this text."""


# modules --------------------------------------------------------------------------------------------------------------


def _is_of_user(file: str | None, module: str | None) -> bool:
    """Whether a file is the user's own, and none of an installed package, of the standard library or of this package.

    Text that is compiled without a file ("<string>": methods that ``dataclass`` makes) is nobody's.
    """
    if file is None or file.startswith("<") or str(module).partition(".")[0] in PIPELINE:
        return False
    return not file.startswith(_STANDARD_LIBRARY) and not _PACKAGES.search(file)


class Module:
    """A file of the user, and what this process has of it.

    Args:
        namespace: its globals; None: they are not looked at, because other processes may not have loaded it.
    """

    def __init__(self, name: str, file: str, namespace: Mapping[str, Any] | None) -> None:
        self.name, self.file, self.live = name, file, namespace is not None
        self.folder, self.folders = folder_of(file), list[str]()
        self.values = {} if namespace is None else namespace
        linecache.checkcache(file)
        loader = {"__loader__": self.values.get("__loader__"), "__name__": name}
        self.source: Source = source_of("".join(linecache.getlines(file, loader)))
        loaded = vars(sys.modules.get(name, types.ModuleType(name)))
        self.travels = name in MAIN or (namespace is not None and loaded is not namespace)
        self.package = self.values.get("__package__") or (
            name if os.path.basename(file) == "__init__.py" else name.rpartition(".")[0]  # noqa: PTH119
        )

    @functools.cached_property
    def was_edited(self) -> bool:
        """Since this process started."""
        try:
            return os.stat(self.file).st_mtime > _STARTED  # noqa: PTH116 (co_filename is text)
        except OSError:  # an archive, or a cell of a notebook
            return False


class Project:
    """What is the user's. Filled on the way.

    Attributes:
        packages: that are the user's although they are installed.
        left: what is not compared, and why.
    """

    def __init__(self) -> None:
        self.packages: set[str] = set()
        self.left: dict[str, None] = {}
        self._modules: dict[tuple[str, bool], Module | None] = {}
        self._spaces: dict[tuple[int, str], Module] = {}
        self._causes: dict[Any, str] = {}
        self._unstable: dict[type, set[str]] = {}
        self._inside: set[tuple[str, str]] = set()

    def _is_users_file(self, file: str | None, module: str | None) -> bool:
        is_cell = str(file).startswith("<ipython-input")
        return is_cell or _is_of_user(file, module) or (str(module).partition(".")[0] in self.packages and bool(file))

    def owns(self, thing: Any) -> bool:
        """Whether a function, class or module is of the user."""
        if isinstance(thing, types.FunctionType):
            is_made = thing.__module__ in (None, "builtins", *MAIN)  # by exec
            file = thing.__code__.co_filename
            return (is_made and file == "<string>") or self._is_users_file(file, thing.__module__)
        name = str(thing.__name__ if isinstance(thing, types.ModuleType) else getattr(thing, "__module__", ""))
        if not isinstance(thing, type | types.ModuleType) or name.partition(".")[0] in PIPELINE:
            return False
        module = thing if isinstance(thing, types.ModuleType) else sys.modules.get(name)
        if module is None:  # of a pickle
            return any(self.owns(one) for one in vars(thing).values() if isinstance(one, types.FunctionType))
        place = getattr(module, "__file__", None)
        return self._is_users_file(place, name) or (place is None and name in MAIN)

    def module(self, name: str, late: bool) -> Module | None:
        """A module of the user; None: it is another one, or is missing."""
        if (name, late) not in self._modules:
            loaded = sys.modules.get(name)
            file, folders = _file_of(loaded), [*getattr(loaded, "__path__", [])]
            if loaded is None:
                parent = self.module(name.rpartition(".")[0], late) if "." in name else None
                spec = None
                if "." not in name or parent is not None:
                    spec = PathFinder.find_spec(name, parent.folders if parent is not None else None)
                file = getattr(spec, "origin", None)
                folders = [*(getattr(spec, "submodule_search_locations", None) or [])]
            place = file or (os.path.join(folders[0], "") if folders else None)  # noqa: PTH118
            found = Module(name, place, None if late or loaded is None else vars(loaded)) if place else None
            is_ours = self._is_users_file(place, name) and not str(place).endswith((".so", ".pyd"))
            self._modules[name, late] = found if is_ours else None
            if found is not None:
                found.folders = folders
        return self._modules[name, late]

    def space(self, function: types.FunctionType) -> Module:
        """Where a function looks its names up."""
        space, file = function.__globals__, function.__code__.co_filename
        name = str(space.get("__name__", function.__module__))
        found = self.module(name, late=False) if getattr(sys.modules.get(name), "__dict__", None) is space else None
        if found is not None and os.path.abspath(found.file) == os.path.abspath(file):  # noqa: PTH100
            return found
        if (id(space), file) not in self._spaces:
            self._spaces[id(space), file] = Module(name, file, space)
        return self._spaces[id(space), file]

    def bindings(self, module: Module, name: str) -> list[Binding]:
        """What binds a name, without what is replaced for sure."""
        kept: list[Binding] = []
        for bound in reversed(module.source.bindings.get(name, [])):
            kept.insert(0, bound)
            is_new = bound.imported is not None or isinstance(bound.statement, Definition)
            again = [dotted(one)[:1] for one in getattr(bound.statement, "decorator_list", [])]
            if is_new and not bound.optional and [name] not in again:
                break
        return kept

    def binds(self, module: Module, name: str, late: bool) -> bool:
        value = module.values.get(name)
        is_live = name in module.values and not isinstance(value, types.ModuleType)
        return name in module.source.bindings or is_live or self.star(module, name, late) is not None

    def star(self, module: Module, name: str, late: bool) -> Module | None:
        """The module from which ``from module import *`` takes a name."""
        place = (module.file, f"*{name}")
        if name.startswith("__") or place in self._inside:
            return None
        self._inside.add(place)
        found = [self.module(absolute(module, star), late) for star in reversed(module.source.stars)]
        listed = [one for one in found if one is not None and name in one.values.get("__all__", [name])]
        giving = next((one for one in listed if self.binds(one, name, late)), None)
        self._inside.discard(place)
        return giving

    def unstable_attributes(self, cls: type) -> set[str]:
        """The attributes that a class computes anew at each start."""
        known = self._unstable
        if cls not in known:
            known[cls] = set()
            module = self.module(cls.__module__, late=False) if self.owns(cls) else None
            for _, assigned in module.source.classes(cls.__name__) if module is not None else ():
                for statement, names in assigned:
                    if cause := self.cause_in(module, statement, frozenset()):  # type: ignore[arg-type]
                        known[cls] |= names
                        self.left |= {f"{cls.__qualname__}.{one} ({cause})": None for one in sorted(names)}
        return known[cls]

    def cause_of(self, module: Module, name: str, seen: frozenset[Any]) -> str:
        place = (module.file, name, module.live)
        if place in self._causes or place in seen:
            return self._causes.get(place, "")
        source = module.source
        statements = [*self.bindings(module, name), *source.changes.get(name, []), *source.given.get(name, [])]
        found = (self.cause_in(module, one.statement, seen | {place}) for one in statements if one.imported is None)
        self._causes[place] = next(filter(None, found), "")
        return self._causes[place]

    def cause_in(self, module: Module, node: ast.AST, seen: frozenset[Any]) -> str:
        uses = module.source.uses(node)
        if not uses.words.isdisjoint({"environ", "getenv"}):
            for word in sorted(uses.texts):
                if is_of_machine(word):
                    return word
            ends = [(chain.root, *chain.path)[-2:] for chain in uses.chains]
            if any(end[-1] == "environ" or end == ("environ", "copy") for end in ends):
                return "the environment"
        for chain in uses.chains:
            bound = chain.imported
            if bound is None:
                bindings = self.bindings(module, chain.root)
                imports = [one.imported for one in bindings if one.imported is not None]
                if not imports:
                    cause = self.cause_of(module, chain.root, seen) if bindings else ""
                    if cause or (not bindings and is_unstable(chain.root) and chain.root not in module.values):
                        return cause or f"{chain.root}()"
                    continue
                bound = imports[-1]
            base, steps = absolute(module, bound), [*([bound.name] if bound.name else []), *chain.path]
            found = self.module(base, bound.late or not module.live)
            while found is not None and steps and not self.binds(found, steps[0], not found.live):
                found, steps = self.module(f"{found.name}.{steps[0]}", not found.live), steps[1:]
            if found is not None:
                if steps and (cause := self.cause_of(found, steps[0], seen)):
                    return cause
            elif any(is_unstable(".".join([base, *steps[:size]])) for size in range(len(steps) + 1)):
                return f"{'.'.join([base, *steps])}()"
        return ""


def absolute(module: Module, bound: Import) -> str:
    """The module that an import names."""
    if not bound.level:
        return bound.module
    package = module.package.split(".")
    return ".".join([*package[: len(package) - bound.level + 1], *([bound.module] if bound.module else [])])


def _file_of(module: types.ModuleType | None) -> str | None:
    """Where its functions come from: dill may have put another file's name there."""
    file: str | None = getattr(module, "__file__", None)
    parts = [*vars(module).values()] if module is not None else []
    parts += [part for one in parts if isinstance(one, type) for part in vars(one).values()]
    codes = [one.__code__ for one in parts if isinstance(one, types.FunctionType)]
    name = os.path.basename(str(file))  # noqa: PTH119
    return next((code.co_filename for code in codes if os.path.basename(code.co_filename) == name), file)  # noqa: PTH119


def fingerprint(thing: Any) -> str:
    """Tells whether a pickle holds the function or object that was described: by code that it holds, and constants."""
    if isinstance(thing, functools.partial):
        return digest(
            "partial", *map(fingerprint, [thing.func, *thing.args, *thing.keywords, *thing.keywords.values()])
        )
    if isinstance(thing, types.MethodType):
        return digest(fingerprint(thing.__self__), thing.__name__)
    if isinstance(thing, types.FunctionType):
        if is_importable(thing):
            return f"{thing.__module__}.{thing.__qualname__}"
        around = (getattr(one, "__code__", one) for _, one in cells(thing))  # which may hold the function itself
        return digest(write_code(thing.__code__), *map(fingerprint, around))
    if isinstance(thing, types.CodeType):
        return write_code(thing)
    if isinstance(thing, str | int | float | bytes | None):
        return repr(thing)
    return type(thing).__qualname__


def is_importable(function: types.FunctionType) -> bool:
    """Whether an import gives the function. Then a pickle holds its name alone, and it is what is imported now."""
    found: Any = None if function.__module__ in MAIN else sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    while found is not None and found is not function:
        found = wrapped(found)
    return found is function
