"""Describes the user's code that a rollout reaches by name.

The description contains every top-level statement of the user's own files that binds or changes a
name which the rollout mentions, directly or through other such statements. It ignores comments,
docstrings and hints of functions. Some inputs are compared by value: the values in ``partial``,
closures and attributes, the command line and the environment, and text files that a statement of
the description names. If names do not suffice (``globals()``, ``eval``, a module passed as a
value), the whole file is part of the description.

Variables of modules are never compared by value: the statements that bind them represent them.
Installed packages are ignored. A file is parsed only if its text holds a name that is reached. The
names of fields have no modules, so that a helper may move.

``inspect_objects`` finds the values of partials, closures and attributes, and the user's functions
and classes in them. ``_Walk`` follows the names in those.
"""

import argparse
import ast
import collections
import functools
import glob
import linecache
import math
import os
import re
import sys
import threading
import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import filterfalse, islice
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from datatrove_ckpt.user_code.statements import (
    CELL,
    NOTEBOOK,
    READING,
    Chain,
    CodeSource,
    Import,
    Statement,
    digest,
    loaded_names,
    write_constant,
)

PIPELINE = ("datatrove", "datatrove_ckpt")  # which may run from a checkout
MAIN = ("__main__", "__mp_main__")
_STANDARD_LIBRARY = os.path.join(os.path.dirname(linecache.__file__), "")  # noqa: PTH118, PTH120 (co_filename is text)
_PACKAGES = re.compile(r"[\\/](site|dist)-packages[\\/]")
_PACING = re.compile(r"(_?asyncio|concurrent|logging|loguru|_?queue|_?threading|_thread|weakref)\b")
_CONTAINERS = (list, tuple, set, frozenset, collections.deque)
_BASES = (str, bytes, int, float)
_NAMESPACES = (argparse.Namespace, types.SimpleNamespace)


class CodeRoot(NamedTuple):
    """A function, class or module of the user that the rollout was given.

    Attributes:
        label: its field, and the beginning of the fields of its variables.
        name: the qualified name; empty for a module.
    """

    label: str
    file: str
    name: str
    thing: Any


class CodeInputs(NamedTuple):
    """The values and code that a rollout was given.

    Attributes:
        fields: the values, by the path to them.
        roots: the user's code in them.
        variables: the name of the function that closes over a variable, by the variable's path.
            If it only takes parts of the variable by name, only these parts are compared.
    """

    fields: dict[str, object]
    roots: list[CodeRoot]
    variables: dict[str, str]


def inspect_objects(things: Mapping[str, object]) -> CodeInputs:
    given = CodeInputs({}, [], {})
    waiting: list[tuple[str, Any, Any]] = [(label, thing, None) for label, thing in things.items()]
    seen: dict[int, object] = {}
    for label, thing, owner in waiting:
        if id(thing) in seen or len(seen) > 5000 or _PACING.match(type(thing).__module__):
            continue
        is_given = "." not in label
        root = _root(label, thing)
        if root is not None:
            given.roots.append(root)
        if isinstance(owner, types.FunctionType) and isinstance(thing, dict | argparse.Namespace):
            given.variables[label] = owner.__code__.co_name
        elif not is_given or not isinstance(thing, dict):
            with suppress(TypeError, RecursionError):
                given.fields[label] = plain(thing)
                continue
        seen[id(thing)] = thing  # keeps the object alive, so that its id stays unique
        parts: Mapping[Any, object] = {}
        with suppress(Exception):  # the user's objects may do anything
            parts = _parts(thing, root is not None or is_given)
        is_opened = isinstance(thing, dict | functools.partial | types.MethodType)
        is_whole = root is None and not is_opened and (is_given or not parts)
        if is_whole or isinstance(thing, _BASES):
            given.fields[label] = written(thing)
        waiting += [(f"{label}.{name}".rstrip("."), part, thing) for name, part in parts.items()]
    return given


@functools.cache
def is_of_user(file: str) -> bool:
    """Returns whether a file is not of an installed package, the standard library or datatrove."""
    if CELL.match(file):
        return True
    pipeline = (getattr(sys.modules.get(name), "__file__", None) for name in PIPELINE)
    folders = [os.path.dirname(path) + os.sep for path in pipeline if path]  # noqa: PTH120
    return not (
        file.startswith(("<", _STANDARD_LIBRARY, *folders)) or _PACKAGES.search(file) is not None
    )


def _root(label: str, thing: Any) -> CodeRoot | None:
    name = ""
    if isinstance(thing, types.ModuleType):
        files = [getattr(thing, "__file__", None)]
    elif isinstance(thing, types.FunctionType):
        name = thing.__code__.co_qualname
        files = [thing.__code__.co_filename]
    else:
        if not isinstance(thing, type):
            thing = type(thing)
        name = thing.__qualname__
        # The module of a class of a notebook, or of a pickle, has no file.
        codes = [getattr(member, "__code__", None) for member in vars(thing).values()]
        files = [getattr(sys.modules.get(thing.__module__), "__file__", None)]
        files += [code.co_filename for code in codes if code is not None]
    known = [file for file in files if file is not None]
    if not known:
        return None
    file = next(filter(is_of_user, known), known[0])
    if not file.startswith("<"):
        file = os.path.abspath(file)  # noqa: PTH100
    # The package of a rollout is the user's even if it is installed.
    is_rollout = "." not in label and not hasattr(thing, "__wrapped__")
    is_installed = is_rollout and _PACKAGES.search(file) is not None
    if is_of_user(file) or is_installed or file == "<string>":
        return CodeRoot(label, file, name, thing)
    return None


# values ------------------------------------------------------------------------------------------


def plain(value: Any) -> object:
    """Returns a value of plain types as JSON that is equal in every process.

    Raises:
        TypeError: the value is not of plain types.
        RecursionError: it holds itself.
    """
    kind = type(value)
    if kind is str:
        return value.encode("utf-8", "backslashreplace").decode()  # of half of a pair
    if isinstance(value, PurePath):
        return f"path {value}"
    if value is None or kind is bool or (kind is int and abs(value) < 2**53):
        return value
    if kind is float and math.isfinite(value) and not value.is_integer():
        return value
    if kind in (int, float, complex, range, slice, type(...)):
        return f"{kind.__name__} {value!r}"
    if kind is dict:
        names = [name if type(name) is str else f"{type(name).__name__} {name}" for name in value]
        content = {name: plain(item) for name, item in zip(names, value.values(), strict=True)}
        if names != sorted(names):
            content["(order)"] = ", ".join(names)
        return content
    if kind not in _CONTAINERS:
        raise TypeError(kind)
    items = [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        items.sort(key=repr)
    if kind is list:
        return items
    return {f"({kind.__name__})": items}


def written(value: Any) -> object:
    """Returns the content of a value as JSON, or its type if the content cannot be read."""
    name = type_name(type(value))
    with suppress(TypeError, RecursionError):
        return plain(value)
    if isinstance(value, types.ModuleType):
        return value.__name__
    with suppress(AttributeError):
        return f"{value.__module__}.{value.__qualname__}"
    with suppress(TypeError, ValueError, BufferError):
        view = memoryview(value)  # an array, for example
        if "O" not in view.format:
            return f"{name} {view.format} {view.shape} {digest(view.tobytes().hex())}"
    if isinstance(value, _BASES) or name.partition(".")[0] in sys.stdlib_module_names:
        return f"{name} {re.split(' at 0x', repr(value))[0]}"
    return name


def _parts(thing: Any, is_users: bool) -> Mapping[Any, object]:
    """Returns the parts of an object by name."""
    if isinstance(thing, functools.partial):
        return {"": thing.func, **dict(enumerate(thing.args)), **thing.keywords}
    if isinstance(thing, types.MethodType | types.BuiltinMethodType):
        if isinstance(thing.__self__, types.ModuleType | None):
            return {}
        return {"(method)": thing.__name__, "": thing.__self__}
    if isinstance(thing, types.FunctionType):
        return {**dict(cells(thing)), **vars(thing)}
    parts: dict[Any, object] = {}
    if isinstance(thing, type | types.ModuleType):
        return parts
    if isinstance(thing, Mapping):
        parts |= {str(name): part for name, part in thing.items()}
    elif isinstance(thing, _CONTAINERS):
        content: Iterable[object] = thing
        if isinstance(thing, set | frozenset):
            content = sorted(thing, key=repr)
        parts |= dict(enumerate(content))
    if is_users or isinstance(thing, _NAMESPACES) or hasattr(thing, "__wrapped__"):
        state = object.__getstate__(thing)
        for attributes in state if isinstance(state, tuple) else (state,):
            parts |= attributes or {}
    return parts


def cells(function: types.FunctionType) -> list[tuple[str, object]]:
    found = []
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        with suppress(ValueError):
            found.append((name, cell.cell_contents))
    return found


def type_name(cls: type) -> str:
    """Module and name, without private modules such as ``pathlib._local`` of Python 3.13."""
    module = str(cls.__module__)
    if module.partition(".")[0] in sys.stdlib_module_names:
        module = re.sub(r"\._.*", "", module)
    return f"{module}.{cls.__qualname__}"


# names -------------------------------------------------------------------------------------------

Key = tuple[str, str]
"""A file, and a name that it binds. An empty name means the whole file."""
_HINTS = frozenset(
    """
    TypeAdapter __annotations__ __doc__ create_model function_tool get_annotations get_type_hints
    getdoc getfullargspec getsource model_json_schema signature tool tools validate_call
    """.split()  # noqa: SIM905
)
_WHOLE = frozenset(
    """
    __import__ eval exec get_objects getmembers getsource globals import_module modules run_path
    spec_from_file_location
    """.split()  # noqa: SIM905
)
_SUBCLASSES = frozenset("ABCMeta EnumMeta __init_subclass__ __subclasses__ type".split())  # noqa: SIM905
_OUTSIDE = frozenset("CLI argv cli parse_args parse_known_args stdin".split())  # noqa: SIM905
_UNSTABLE = frozenset(
    """
    TemporaryDirectory check_output choice ctime cwd getcwd gethostname getoutput getpid
    gettempdir hash id mkdtemp monotonic node now object perf_counter popen randint random run
    sample shuffle strftime time time_ns today token_hex urandom utcnow uuid1 uuid4
    """.split()  # noqa: SIM905
)
"""Calls whose results differ at each start. Variables with such results are not compared."""
_MACHINE = re.compile(
    "SLURM_|CUDA_|HOST|JOB_ID|.*(KEY|TOKEN|SECRET|PASSWORD|LOGNAME)|.*(RANK|PID|TMPDIR|HOME|PATH|PWD|USER|WORLD_SIZE)$"
)
_PATH = re.compile(r"(?!.*\*\*)(?:[\w ./*-]{0,199}\w|[\w ./-]{0,199}\w/\*)")
_MODULE = re.compile(r"[^\W\d]\w*(\.\w+)*")
_one_at_a_time = threading.RLock()
USED = "uses."
"""The beginning of the fields about code that a rollout uses."""


class CodeDescription(NamedTuple):
    """Describes the user's code.

    Attributes:
        notes: the place of each field's code, and the names that lead to it.
        own: the fields of the code that a pickle holds by value.
        imported: file (relative to ``sys.path``), name and field of other code.
        known: the words because of which hints or subclasses are described.
        left: the fields that are not compared.
    """

    fields: dict[str, object]
    notes: dict[str, str]
    own: dict[str, object]
    imported: list[tuple[str, str, str]]
    known: frozenset[str]
    left: list[str]


class NameBinding(NamedTuple):
    """The statements that bind or change a name.

    Attributes:
        label: the name of its field.
        way: the names that lead from the rollout to it.
    """

    label: str
    way: tuple[str, ...]
    statements: list[Statement]


class _Walk:
    """Follows names through the user's code, from its roots.

    Args:
        known: words that make it describe hints and docstrings, or subclasses of a class.
        roots: the functions, classes and modules from which it starts.
    """

    def __init__(self, known: frozenset[str], roots: list[CodeRoot]) -> None:
        self._documented = not known.isdisjoint(_HINTS)
        self._subclasses = not known.isdisjoint(_SUBCLASSES)
        self._main = str(getattr(sys.modules["__main__"], "__file__", ""))
        self._roots = {home(root.file) for root in roots}
        self.by_value = {self._main, *(home(root.file) for root in roots if is_detached(root))}
        self._place = functools.cache(_find)
        self.words: set[str] = set()
        self.units: dict[Key, NameBinding] = {}
        self.bytecode: dict[str, object] = {}
        self._queue: collections.deque[tuple[Key, str, tuple[str, ...]]] = collections.deque()
        self.sources: dict[str, CodeSource] = {}
        self._importers: dict[str, set[str]] = {}
        self._changed: dict[str, dict[Key, list[Statement]]] = {}
        if self._main and is_of_user(self._main):
            self._load(self._main)
        for root in roots:
            self._load(home(root.file))
        for root in roots:
            self._start(root)

    # files -----------------------------------------------------------------------------------

    def _load(self, file: str) -> None:
        """Finds all files that a file imports, directly or indirectly, without parsing them."""
        waiting = [file]
        for path in waiting:
            if path in self.sources:
                continue
            source = self.sources[path] = CodeSource(path, self._documented)
            for level, module, names in source.imports():
                parts = module.split(".")
                modules = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
                modules += [f"{module}.{name}" for name in names]
                for name in modules:
                    imported = self._file(self._place(source.folder, level, name))
                    if imported:
                        self._importers.setdefault(imported, set()).add(path)
                        waiting.append(imported)

    def _file(self, place: str) -> str:
        """Returns the user's file of a module; empty if there is none."""
        for file in (f"{place}/__init__.py", f"{place}.py"):
            if place and (file in self._roots or is_of_user(file)) and os.path.isfile(file):  # noqa: PTH113
                return file
        return ""

    # where a name leads ----------------------------------------------------------------------

    def _keys(self, statement: Statement, chain: Chain) -> list[Key]:
        """Returns the files and names that a name may refer to, through all imports."""
        imports = [found for found in statement.imports if found.bound == chain[0]]
        return [*dict.fromkeys(self._follow(statement.source.path, chain, imports, set()))]

    def _follow(
        self, file: str, chain: Chain, imports: list[Import], seen: set[tuple[str, Chain]]
    ) -> Iterator[Key]:
        seen.add((file, chain))
        source = self.sources[file]
        bound = source.bound(chain[0])
        if bound:
            yield file, chain[0]
        imports = imports + [one for each in bound for one in each.imports if one.bound == chain[0]]
        if not bound and not imports:
            imports = [one for each in source.bound("*") for one in each.imports]
        for one in imports:
            names = one.names + (chain if one.bound == "*" else chain[1:])
            place = self._place(source.folder, one.level, one.module)
            while place:
                inner = self._file(place)
                if not names:
                    if inner:
                        yield inner, ""
                    break
                if inner:
                    self._load(inner)
                    yield from ((inner, names[0]), (inner, "__getattr__"))
                    if one.bound == "*":
                        yield from ((file, "*"), (inner, "__all__"))
                    if (inner, names) not in seen:
                        yield from self._follow(inner, names, [], seen)
                        if self.sources[inner].bound(names[0]):
                            break
                place = f"{place}/{names[0]}"
                names = names[1:]

    def _changes(self, file: str) -> dict[Key, list[Statement]]:
        """Returns the names, in all files, that the statements of a file change."""
        if file not in self._changed:
            found = self._changed[file] = {}
            for statement in self.sources[file].statements:
                chains = statement.changes | statement.passed
                if self._subclasses:
                    chains |= statement.bases
                for chain in chains:
                    for key in self._keys(statement, chain):
                        bound = self.sources[key[0]].bound(key[1])
                        # A statement that uses a name of a module does not change its import.
                        unchanged = [one for one in bound if one.imports and not one.is_definition]
                        if chain in statement.passed:
                            unchanged += [one for one in bound if one.is_definition]
                        if not bound or len(unchanged) < len(bound):
                            found.setdefault(key, []).append(statement)
        return self._changed[file]

    # the walk --------------------------------------------------------------------------------

    def _start(self, root: CodeRoot) -> None:
        file = home(root.file)
        source = self.sources[file]
        functions = [root.thing]
        if isinstance(root.thing, type):
            functions = [*vars(root.thing).values()]
        codes = [member.__code__ for member in functions if isinstance(member, types.FunctionType)]
        codes = [code for code in codes if code.co_filename == root.file and not source.is_of(code)]
        if codes:
            texts = sorted(map(write_constant, codes))
            self.bytecode[f"{root.label} code"] = (
                f"bytecode {sys.implementation.cache_tag} {digest(*texts)}"
            )
            for name in sorted(set[str]().union(*map(loaded_names, codes))):
                self._go((file, name), USED + name, (root.label, name))
            return
        top = root.name.partition(".")[0]
        code = getattr(root.thing, "__code__", None)
        line = getattr(code, "co_firstlineno", 0)
        around = [one for one in source.statements if one.file == root.file and line in one.lines]
        if "<" in root.name and code is not None:  # one of the functions in a statement
            numbers = [str(statement.number_of(code)) for statement in around]
            self.bytecode[f"{root.label} function"] = " ".join([root.name, *numbers])
        if around and (top == "<lambda>" or not source.bound(top)):
            top = around[-1].alias
        self._go((file, top), root.label, (root.label,))

    def _go(self, key: Key, label: str, way: tuple[str, ...]) -> None:
        self._queue.append((key, label, way))

    def run(self) -> None:
        while self._queue:
            key, label, way = self._queue.popleft()
            if key not in self.units:
                self._visit(key, label, way)

    def _visit(self, key: Key, label: str, way: tuple[str, ...]) -> None:
        file, name = key
        self._load(file)
        statements = [*self.sources[file].bound(name)]
        around = [file]
        for path in around:
            around += sorted(self._importers.get(path, set()) - {*around})
            if self.sources[path].holds(name or Path(file).stem):
                changing = self._changes(path).get(key, [])
                if path == file:
                    statements += changing
                else:
                    for statement in changing:
                        self._go((path, statement.alias), label, (*way, name))
        kept = [one for one in dict.fromkeys(statements) if one.is_definition or not one.is_pacing]
        self.units[key] = NameBinding(label, way, kept)
        for statement in kept:
            self.words |= statement.words
            if statement.is_import and name:
                continue  # ``_follow`` has resolved the names that are imported
            for found in self._mentioned(statement):
                shown = found[1] or Path(found[0]).stem
                self._go(found, USED + shown, (*way, shown))

    def _mentioned(self, statement: Statement) -> list[Key]:
        chains = [*statement.chains, *((name,) for name in sorted(statement.binds))]
        found = [key for chain in chains for key in self._keys(statement, chain)]
        if not statement.is_import and not statement.words.isdisjoint(_WHOLE):
            # Names do not show what such a statement reaches.
            texts = sorted(filter(_MODULE.fullmatch, statement.texts))
            files = [self._file(self._place(statement.source.folder, 0, text)) for text in texts]
            found += [(file, "") for file in (statement.source.path, *files) if file]
        return [*dict.fromkeys(found)]

    def resume(self, before: CodeDescription) -> None:
        """Continues from the names of modules that code in a pickle uses."""
        for place, name, label in before.imported:
            self._load(_on_path(place))
            self._go((_on_path(place), name), label, (label,))

    # fields ----------------------------------------------------------------------------------

    @functools.cached_property
    def statements(self) -> list[Statement]:
        return [statement for unit in self.units.values() for statement in unit.statements]

    def mutated(self) -> set[str]:
        """Returns the names and attributes that the code changes while it runs."""
        return {name for statement in self.statements for name in statement.mutated}

    def fields(self, own: bool, taken: Mapping[str, object]) -> dict[str, object]:
        """Returns the fields of code that a pickle holds by value (``own``), or of other code."""
        texts: dict[str, set[tuple[str, ...]]] = {}
        fields: dict[str, object] = {}
        for (path, name), unit in self.units.items():
            if (path in self.by_value) is not own:
                continue
            if not name and "getsource" in self.words:
                content = "".join(self.sources[path].texts.values())
                texts.setdefault(f"{USED}source of {Path(path).name}", set()).add((content,))
            for statement in unit.statements:
                fields |= self._from_outside(statement)
                place = Path(statement.source.path)
                order = place.name, place.parent.name, f"{statement.index:9}"
                if text := self._text(statement):
                    texts.setdefault(f"{unit.label} code", set()).add((*order, text))
                for file in self._text_files(statement):
                    content = file.read_bytes().hex()
                    texts.setdefault(f"{USED}file {file.name}", set()).add((content,))
        for label, parts in texts.items():
            name = f"{label} (2)" if label in taken else label
            fields[name] = f"source {digest(*(part[-1] for part in sorted(parts)))}"
        return fields

    def notes(self) -> dict[str, str]:
        notes: dict[str, str] = {}
        for unit in self.units.values():
            for first in unit.statements[:1]:
                way = " -> ".join(dict.fromkeys(unit.way))
                note = f"{unit.way[-1]} in {first.file}, line {first.line}: {way}"
                notes.setdefault(f"{unit.label} code", note)
        return notes

    def _text(self, statement: Statement) -> str:
        """Returns the text to compare, without the user's module that a name is imported from."""
        if statement.is_import:
            first = statement.imports[0]
            place = self._place(statement.source.folder, first.level, first.module)
            if place and is_of_user(place):
                return "" if first.names in ((), (first.bound,)) else f"{first.bound}={first.names}"
        return statement.text

    def _from_outside(self, statement: Statement) -> dict[str, object]:
        """Returns values of the environment and of the command line."""
        found: dict[str, object] = {}
        if not self.words.isdisjoint({"environ", "getenv"}):
            for text in statement.texts_at_import & os.environ.keys():
                if not _MACHINE.match(text):
                    found[f"{USED}environment {text}"] = f"hash {digest(os.environ[text])}"
        if isinstance(statement.node, ast.Assign) and not statement.words.isdisjoint(_OUTSIDE):
            variables = {
                getattr(module, "__file__", None): vars(module)
                for module in [*sys.modules.values()]
            }
            for name in statement.binds:
                value = variables.get(statement.file, {}).get(name)
                for part, inner in getattr(value, "__dict__", {"": value}).items():
                    if not self.words.isdisjoint({part, "vars", "__dict__"}) or part == "":
                        found[f"{USED}{name}.{part}".rstrip(".")] = written(inner)
        return found

    @functools.cached_property
    def _written(self) -> set[str]:
        """Returns the names of files that the code writes."""
        return set[str]().union(*(statement.written for statement in self.statements))

    def _text_files(self, statement: Statement) -> Iterator[Path]:
        # A variable may name a log.
        is_read = statement.is_definition or not statement.words.isdisjoint(READING)
        if not is_read and not statement.binds.isdisjoint(self._written):
            return
        for folder in self._folders:
            for text in sorted(filter(_PATH.fullmatch, statement.files)):
                pattern = os.path.join(glob.escape(str(folder)), text)  # noqa: PTH118
                for file in map(Path, islice(glob.iglob(pattern), 1000)):  # noqa: PTH207
                    try:
                        size = file.stat().st_size
                    except OSError:  # the file is gone, as those of an ended process in /proc
                        continue
                    if file.is_file() and 0 < size < 2**20:
                        yield file  # files of /proc have no size

    @functools.cached_property
    def _folders(self) -> list[Path]:
        """Returns the folders of all statements, and the folders below that their texts name."""
        named = {text for one in self.statements for text in one.texts if _PATH.fullmatch(text)}
        found = {Path(one.file).parent for one in self.statements} | {Path.cwd()}
        for _ in range(3):
            found |= {*filter(Path.is_dir, (one / text for one in found for text in named))}
        return sorted(found)

    def unstable(self) -> set[str]:
        """Returns the names of variables whose values differ at each start."""
        found: set[str] = set()
        parsed = [source for source in self.sources.values() if "statements" in vars(source)]
        values = [
            value
            for source in parsed
            for statement in source.statements
            for value in statement.assigned
        ]
        for names, called, words in values:
            if not (called.isdisjoint(_UNSTABLE) and words.isdisjoint(found)):
                found |= names
        return found


def home(file: str) -> str:
    """Returns the file of a statement. All cells of a notebook are one file."""
    return NOTEBOOK if CELL.match(file) else file


def _find(folder: str, level: int, module: str) -> str:
    parts = [*filter(None, module.split("."))]
    if level:
        return os.path.normpath(os.path.join(folder, *[os.pardir] * (level - 1), *parts))  # noqa: PTH118
    if parts[0] in sys.stdlib_module_names:
        return ""
    file = getattr(sys.modules.get(parts[0]), "__file__", None)
    if file:
        top = file.removesuffix(".py").removesuffix(f"{os.sep}__init__")
        return os.path.join(os.path.abspath(top), *parts[1:])  # noqa: PTH100, PTH118
    for base in (folder, *sys.path):
        top = os.path.join(os.path.abspath(base), parts[0])  # noqa: PTH100, PTH118
        if os.path.isdir(top) or os.path.isfile(f"{top}.py"):  # noqa: PTH112, PTH113
            return os.path.join(top, *parts[1:])  # noqa: PTH118
    return ""


def is_detached(root: CodeRoot) -> bool:
    """Returns whether a pickle brought the code by value into a program without its file."""
    space = getattr(root.thing, "__globals__", vars(root.thing))
    module = sys.modules.get(str(space.get("__name__", space.get("__module__"))))
    return getattr(module, "__file__", None) != root.file


def _off_path(file: str) -> str:
    bases = [base for base in map(os.path.abspath, sys.path) if file.startswith(base + os.sep)]
    return os.path.relpath(file, max(bases, key=len)) if bases else file


def _on_path(place: str) -> str:
    files = (os.path.abspath(os.path.join(base, place)) for base in sys.path)  # noqa: PTH100, PTH118
    return next(filter(os.path.isfile, files), place)


_first: dict[tuple[int, ...], tuple[object, CodeInputs]] = {}
"""The first values that this process found in the described things, which a rollout may change."""


def describe(
    things: Mapping[str, object], before: CodeDescription | None = None
) -> CodeDescription:
    """Describes functions and objects.

    Args:
        things: the functions and objects, by the name of their field.
        before: the description of the code that a pickle holds by value.
    """
    things = {label: thing for label, thing in things.items() if thing is not None}
    with _one_at_a_time, _deep():
        given = inspect_objects(things)
        first = _first.setdefault(tuple(map(id, things.values())), (things, given))[1]
        roots = given.roots
        known: frozenset[str] = frozenset()
        if before is not None:
            roots = []
            known = before.known
        while True:
            walk = _Walk(known, roots)
            if before is not None:
                walk.resume(before)
            walk.run()
            now = known | (walk.words & (_HINTS | _SUBCLASSES))
            mutated = walk.mutated()
            kept = roots
            if before is None:
                kept = _as_first(given.roots, first.roots, mutated)
            if now == known and [*map(id, kept)] == [*map(id, roots)]:
                break
            known = now
            roots = kept
        if before is not None:
            fields = before.own | walk.fields(False, before.own)
            return before._replace(fields=fields, notes=before.notes | walk.notes())
        fields = dict(_as_first([*given.fields.items()], [*first.fields.items()], mutated))
        return _description(walk, given._replace(fields=fields), known)


def _as_first(given: list[Any], first: list[Any], mutated: set[str]) -> list[Any]:
    """Replaces the given parts that the code changes while it runs by those that were seen first.

    Each part begins with its label.
    """

    def is_mutated(part: Any) -> bool:
        return not mutated.isdisjoint(part[0].split(".")[1:])

    return [*filterfalse(is_mutated, given), *filter(is_mutated, first)]


def _description(walk: _Walk, given: CodeInputs, known: frozenset[str]) -> CodeDescription:
    statements = walk.statements
    unstable = walk.unstable()
    names = walk.words.union(*(one.texts for one in statements))
    partly = set()
    for label, function in given.variables.items():
        variable = label.rpartition(".")[2]
        if not any(one.takes_all(function, variable) for one in statements):
            partly.add(label)
    own = {**walk.fields(True, {}), **walk.bytecode}
    left = []
    for label, value in given.fields.items():
        if not unstable.isdisjoint(label.split(".")[1:]):
            left.append(label)
        elif label.rpartition(".")[0] not in partly or label.rpartition(".")[2] in names:
            own[label] = value
    imported = [
        (_off_path(file), name, unit.label)
        for (file, name), unit in walk.units.items()
        if file not in walk.by_value
    ]
    fields = own | walk.fields(False, own)
    for root in given.roots:
        if "." not in root.label and not any(label.startswith(root.label) for label in fields):
            raise ValueError(f"the source of {root.name} is not in {root.file}")
    return CodeDescription(fields, walk.notes(), own, imported, known, left)


@contextmanager
def _deep() -> Iterator[None]:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, 20_000))  # hundreds of elifs are a tree as deep
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)
