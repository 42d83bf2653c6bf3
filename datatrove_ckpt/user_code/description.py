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
from collections.abc import Iterator, Mapping
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
    """

    label: str
    file: str
    name: str
    thing: object


class CodeInputs(NamedTuple):
    """The values and code that a rollout was given.

    Attributes:
        fields: the values, by the path to them.
        variables: the name of the function that closes over a variable, by the variable's path.
            If it only takes parts of the variable by name, only these parts are compared.
    """

    fields: dict[str, object]
    roots: list[CodeRoot]
    variables: dict[str, str]


def inspect_objects(objects: Mapping[str, object]) -> CodeInputs:
    inputs = CodeInputs({}, [], {})
    waiting: list[tuple[str, object, object]] = [
        (label, thing, None) for label, thing in objects.items()
    ]
    seen: dict[int, object] = {}
    for label, thing, owner in waiting:
        if id(thing) in seen or len(seen) > 5000 or _PACING.match(type(thing).__module__):
            continue
        is_given = "." not in label
        root = _root(label, thing)
        if root is not None:
            inputs.roots.append(root)
        if isinstance(owner, types.FunctionType) and isinstance(thing, dict | argparse.Namespace):
            inputs.variables[label] = owner.__code__.co_name
        elif not is_given or not isinstance(thing, dict):
            with suppress(TypeError, RecursionError):
                inputs.fields[label] = plain(thing)
                continue
        seen[id(thing)] = thing  # keeps the object alive, so that its id stays unique
        parts: Mapping[object, object] = {}
        with suppress(Exception):  # the user's objects may do anything
            parts = _parts(thing, root is not None or is_given)
        is_opened = isinstance(thing, dict | functools.partial | types.MethodType)
        is_whole = root is None and not is_opened and (is_given or not parts)
        if is_whole or isinstance(thing, _BASES):
            inputs.fields[label] = written(thing)
        waiting += [(f"{label}.{name}".rstrip("."), part, thing) for name, part in parts.items()]
    return inputs


@functools.cache
def is_of_user(file: str) -> bool:
    """Whether a file belongs to no installed package, the standard library or datatrove."""
    if CELL.match(file):
        return True
    pipeline = (getattr(sys.modules.get(name), "__file__", None) for name in PIPELINE)
    folders = [os.path.dirname(path) + os.sep for path in pipeline if path]  # noqa: PTH120
    return not (
        file.startswith(("<", _STANDARD_LIBRARY, *folders)) or _PACKAGES.search(file) is not None
    )


def _root(label: str, thing: object) -> CodeRoot | None:
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
    paths = [file for file in files if file is not None]
    if not paths:
        return None
    file = next(filter(is_of_user, paths), paths[0])
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
        RecursionError: the value contains itself.
    """
    kind = type(value)
    if kind is str:
        return value.encode("utf-8", "backslashreplace").decode()  # half of a surrogate pair
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
        items_by_name = {
            name: plain(item) for name, item in zip(names, value.values(), strict=True)
        }
        if names != sorted(names):
            items_by_name["(order)"] = ", ".join(names)
        return items_by_name
    if kind not in _CONTAINERS:
        raise TypeError(kind)
    items = [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        items.sort(key=repr)
    if kind is list:
        return items
    return {f"({kind.__name__})": items}


def written(value: Any) -> object:
    name = type_name(type(value))
    with suppress(TypeError, RecursionError):
        return plain(value)
    if isinstance(value, types.ModuleType):
        return value.__name__
    with suppress(AttributeError):
        return f"{value.__module__}.{value.__qualname__}"
    with suppress(TypeError, ValueError, BufferError):
        view = memoryview(value)
        if "O" not in view.format:
            return f"{name} {view.format} {view.shape} {digest(view.tobytes().hex())}"
    if isinstance(value, _BASES) or name.partition(".")[0] in sys.stdlib_module_names:
        return f"{name} {re.split(' at 0x', repr(value))[0]}"
    return name


def _parts(thing: object, is_users: bool) -> Mapping[Any, object]:
    if isinstance(thing, functools.partial):
        return {"": thing.func, **dict(enumerate(thing.args)), **thing.keywords}
    if isinstance(thing, types.MethodType | types.BuiltinMethodType):
        if isinstance(thing.__self__, types.ModuleType | None):
            return {}
        return {"(method)": thing.__name__, "": thing.__self__}
    if isinstance(thing, types.FunctionType):
        return {**dict(cells(thing)), **vars(thing)}
    parts: dict[object, object] = {}
    if isinstance(thing, type | types.ModuleType):
        return parts
    if isinstance(thing, Mapping):
        parts |= {str(name): part for name, part in thing.items()}
    elif isinstance(thing, _CONTAINERS):
        elements = thing
        if isinstance(thing, set | frozenset):
            elements = sorted(thing, key=repr)
        parts |= dict(enumerate(elements))
    if is_users or isinstance(thing, _NAMESPACES) or hasattr(thing, "__wrapped__"):
        state = object.__getstate__(thing)
        for attributes in state if isinstance(state, tuple) else (state,):
            parts |= attributes or {}
    return parts


def cells(function: types.FunctionType) -> list[tuple[str, object]]:
    values = []
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        with suppress(ValueError):
            values.append((name, cell.cell_contents))
    return values


def type_name(cls: type) -> str:
    """Returns module and name, without private modules such as Python 3.13's ``pathlib._local``."""
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
"""Prefix of the fields about code that a rollout uses."""


class CodeDescription(NamedTuple):
    """Describes the user's code.

    Attributes:
        notes: location of each field's code, and the names that lead to it.
        imported: file (relative to ``sys.path``), name and field of other code.
        triggers: words in the code because of which hints or subclasses are described.
    """

    fields: dict[str, object]
    notes: dict[str, str]
    by_value: dict[str, object]
    imported: list[tuple[str, str, str]]
    triggers: frozenset[str]
    not_compared: list[str]


class NameBinding(NamedTuple):
    """The statements that bind or change a name.

    Attributes:
        route: names that lead from the rollout to this name.
    """

    label: str
    route: tuple[str, ...]
    statements: list[Statement]


class _Walk:
    """Follows names from the roots.

    Args:
        triggers: words because of which hints and docstrings, or subclasses, are described.
    """

    def __init__(self, triggers: frozenset[str], roots: list[CodeRoot]) -> None:
        self._documented = not triggers.isdisjoint(_HINTS)
        self._subclasses = not triggers.isdisjoint(_SUBCLASSES)
        main = str(getattr(sys.modules["__main__"], "__file__", ""))
        self._roots = {home(root.file) for root in roots}
        self.by_value = {main, *(home(root.file) for root in roots if is_detached(root))}
        self._find_module = functools.cache(_find)
        self.words = set[str]()
        self.units: dict[Key, NameBinding] = {}
        self.bytecode: dict[str, object] = {}
        self._queue = collections.deque[tuple[Key, str, tuple[str, ...]]]()
        self.sources: dict[str, CodeSource] = {}
        self._importers: dict[str, set[str]] = {}
        self._changed: dict[str, dict[Key, list[Statement]]] = {}
        if main and is_of_user(main):
            self._load(main)
        for root in roots:
            self._start(root)

    # files -----------------------------------------------------------------------------------

    def _load(self, file: str) -> None:
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
                    imported = self._file(self._find_module(source.folder, level, name))
                    if imported:
                        self._importers.setdefault(imported, set()).add(path)
                        waiting.append(imported)

    def _file(self, module_path: str) -> str:
        for file in (f"{module_path}/__init__.py", f"{module_path}.py"):
            if module_path and (file in self._roots or is_of_user(file)) and os.path.isfile(file):  # noqa: PTH113
                return file
        return ""

    # where a name leads ----------------------------------------------------------------------

    def _keys(self, statement: Statement, chain: Chain) -> list[Key]:
        imports = [imported for imported in statement.imports if imported.bound == chain[0]]
        return [*dict.fromkeys(self._follow(statement.source.path, chain, imports, set()))]

    def _follow(
        self, file: str, chain: Chain, imports: list[Import], seen: set[tuple[str, Chain]]
    ) -> Iterator[Key]:
        seen.add((file, chain))
        source = self.sources[file]
        bound = source.bound(chain[0])
        if bound:
            yield file, chain[0]
        imports = imports + [
            imported
            for statement in bound
            for imported in statement.imports
            if imported.bound == chain[0]
        ]
        if not bound and not imports:
            imports = [
                imported for statement in source.bound("*") for imported in statement.imports
            ]
        for imported in imports:
            names = imported.names + (chain if imported.bound == "*" else chain[1:])
            module_path = self._find_module(source.folder, imported.level, imported.module)
            while module_path:
                inner = self._file(module_path)
                if not names:
                    if inner:
                        yield inner, ""
                    break
                if inner:
                    self._load(inner)
                    yield from ((inner, names[0]), (inner, "__getattr__"))
                    if imported.bound == "*":
                        yield from ((file, "*"), (inner, "__all__"))
                    if (inner, names) not in seen:
                        yield from self._follow(inner, names, [], seen)
                        if self.sources[inner].bound(names[0]):
                            break
                module_path = f"{module_path}/{names[0]}"
                names = names[1:]

    def _changes(self, file: str) -> dict[Key, list[Statement]]:
        if file not in self._changed:
            statements_by_key = self._changed[file] = {}
            for statement in self.sources[file].statements:
                chains = statement.changes | statement.passed
                if self._subclasses:
                    chains |= statement.bases
                for chain in chains:
                    for key in self._keys(statement, chain):
                        bound = self.sources[key[0]].bound(key[1])
                        # A statement that uses a name of a module does not change its import.
                        unchanged = [
                            binding
                            for binding in bound
                            if binding.imports and not binding.is_definition
                        ]
                        if chain in statement.passed:
                            unchanged += [binding for binding in bound if binding.is_definition]
                        if not bound or len(unchanged) < len(bound):
                            statements_by_key.setdefault(key, []).append(statement)
        return self._changed[file]

    # the walk --------------------------------------------------------------------------------

    def _start(self, root: CodeRoot) -> None:
        file = home(root.file)
        self._load(file)
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
        enclosing = [
            statement
            for statement in source.statements
            if statement.file == root.file and line in statement.lines
        ]
        if "<" in root.name and code is not None:
            numbers = [str(statement.number_of(code)) for statement in enclosing]
            self.bytecode[f"{root.label} function"] = " ".join([root.name, *numbers])
        if enclosing and (top == "<lambda>" or not source.bound(top)):
            top = enclosing[-1].alias
        self._go((file, top), root.label, (root.label,))

    def _go(self, key: Key, label: str, route: tuple[str, ...]) -> None:
        self._queue.append((key, label, route))

    def run(self) -> None:
        while self._queue:
            key, label, route = self._queue.popleft()
            if key not in self.units:
                self._visit(key, label, route)

    def _visit(self, key: Key, label: str, route: tuple[str, ...]) -> None:
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
                        self._go((path, statement.alias), label, (*route, name))
        compared = [
            candidate
            for candidate in dict.fromkeys(statements)
            if candidate.is_definition or not candidate.is_pacing
        ]
        self.units[key] = NameBinding(label, route, compared)
        for statement in compared:
            self.words |= statement.words
            if statement.is_import and name:
                continue  # ``_follow`` has resolved imports
            for mentioned in self._mentioned(statement):
                last_name = mentioned[1] or Path(mentioned[0]).stem
                self._go(mentioned, USED + last_name, (*route, last_name))

    def _mentioned(self, statement: Statement) -> list[Key]:
        chains = [*statement.chains, *((name,) for name in sorted(statement.binds))]
        keys = [key for chain in chains for key in self._keys(statement, chain)]
        if not statement.is_import and not statement.words.isdisjoint(_WHOLE):
            # Names do not show what such a statement reaches.
            texts = sorted(filter(_MODULE.fullmatch, statement.texts))
            files = [
                self._file(self._find_module(statement.source.folder, 0, text)) for text in texts
            ]
            keys += [(file, "") for file in (statement.source.path, *files) if file]
        return [*dict.fromkeys(keys)]

    def resume(self, before: CodeDescription) -> None:
        for relative_path, name, label in before.imported:
            self._load(_on_path(relative_path))
            self._go((_on_path(relative_path), name), label, (label,))

    # fields ----------------------------------------------------------------------------------

    @functools.cached_property
    def statements(self) -> list[Statement]:
        return [statement for unit in self.units.values() for statement in unit.statements]

    def mutated(self) -> set[str]:
        return {name for statement in self.statements for name in statement.mutated}

    def fields(self, by_value: bool, used_labels: Mapping[str, object]) -> dict[str, object]:
        texts: dict[str, set[tuple[str, ...]]] = {}
        fields: dict[str, object] = {}
        for (path, name), unit in self.units.items():
            if (path in self.by_value) is not by_value:
                continue
            if not name and "getsource" in self.words:
                described_text = "".join(self.sources[path].texts.values())
                texts.setdefault(f"{USED}source of {Path(path).name}", set()).add((described_text,))
            for statement in unit.statements:
                fields |= self._from_outside(statement)
                source_path = Path(statement.source.path)
                order = source_path.name, source_path.parent.name, f"{statement.index:9}"
                if text := self._text(statement):
                    texts.setdefault(f"{unit.label} code", set()).add((*order, text))
                for file in self._text_files(statement):
                    described_text = file.read_bytes().hex()
                    texts.setdefault(f"{USED}file {file.name}", set()).add((described_text,))
        for label, parts in texts.items():
            name = f"{label} (2)" if label in used_labels else label
            fields[name] = f"source {digest(*(part[-1] for part in sorted(parts)))}"
        return fields

    def notes(self) -> dict[str, str]:
        notes: dict[str, str] = {}
        imports: dict[str, str] = {}
        for unit in self.units.values():
            for first in unit.statements[:1]:
                route = " -> ".join(dict.fromkeys(unit.route))
                note = f"{unit.route[-1]} in {first.file}, line {first.line}: {route}"
                found = imports if first.is_import else notes
                found.setdefault(f"{unit.label} code", note)
        return imports | notes

    def _text(self, statement: Statement) -> str:
        if statement.is_import:
            first = statement.imports[0]
            module_path = self._find_module(statement.source.folder, first.level, first.module)
            if module_path and is_of_user(module_path):
                return "" if first.names in ((), (first.bound,)) else f"{first.bound}={first.names}"
        return statement.text

    def _from_outside(self, statement: Statement) -> dict[str, object]:
        fields: dict[str, object] = {}
        if not self.words.isdisjoint({"environ", "getenv"}):
            for text in statement.texts_at_import & os.environ.keys():
                if not _MACHINE.match(text):
                    fields[f"{USED}environment {text}"] = f"hash {digest(os.environ[text])}"
        if isinstance(statement.node, ast.Assign) and not statement.words.isdisjoint(_OUTSIDE):
            variables = {
                getattr(module, "__file__", None): vars(module)
                for module in [*sys.modules.values()]
            }
            for name in statement.binds:
                value = variables.get(statement.file, {}).get(name)
                for part, inner in getattr(value, "__dict__", {"": value}).items():
                    if not self.words.isdisjoint({part, "vars", "__dict__"}) or part == "":
                        fields[f"{USED}{name}.{part}".rstrip(".")] = written(inner)
        return fields

    @functools.cached_property
    def _written(self) -> set[str]:
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
                    except OSError:  # removed, as in /proc
                        continue
                    if file.is_file() and 0 < size < 2**20:
                        yield file  # files of /proc have no size

    @functools.cached_property
    def _folders(self) -> list[Path]:
        texts = set[str]().union(*(statement.texts for statement in self.statements))
        names = [*filter(_PATH.fullmatch, texts)]
        folders = {Path(statement.file).parent for statement in self.statements} | {Path.cwd()}
        for _ in range(3):
            paths = (folder / name for folder in folders for name in names)
            folders |= {*filter(Path.is_dir, paths)}
        return sorted(folders)

    def unstable(self) -> set[str]:
        unstable_names = set[str]()
        parsed = [source for source in self.sources.values() if "statements" in vars(source)]
        values = [
            value
            for source in parsed
            for statement in source.statements
            for value in statement.assigned
        ]
        for names, called, words in values:
            if not (called.isdisjoint(_UNSTABLE) and words.isdisjoint(unstable_names)):
                unstable_names |= names
        return unstable_names


def home(file: str) -> str:
    """All cells of a notebook count as one file."""
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
    """Whether a pickle brought the code by value into a program without its file."""
    space = getattr(root.thing, "__globals__", vars(root.thing))
    module = sys.modules.get(str(space.get("__name__", space.get("__module__"))))
    return getattr(module, "__file__", None) != root.file


def _off_path(file: str) -> str:
    bases = [base for base in map(os.path.abspath, sys.path) if file.startswith(base + os.sep)]
    return os.path.relpath(file, max(bases, key=len)) if bases else file


def _on_path(relative_path: str) -> str:
    files = (os.path.abspath(os.path.join(base, relative_path)) for base in sys.path)  # noqa: PTH100, PTH118
    return next(filter(os.path.isfile, files), relative_path)


_first: dict[tuple[int, ...], tuple[object, CodeInputs]] = {}
"""The first values that this process found in the described things, which a rollout may change."""


def describe(
    objects: Mapping[str, object], before: CodeDescription | None = None
) -> CodeDescription:
    """Describes functions and objects.

    Args:
        before: the description of the code that a pickle holds by value.
    """
    objects = {label: thing for label, thing in objects.items() if thing is not None}
    with _one_at_a_time, _deep():
        inputs = inspect_objects(objects)
        first = _first.setdefault(tuple(map(id, objects.values())), (objects, inputs))[1]
        roots = inputs.roots
        triggers: frozenset[str] = frozenset()
        if before is not None:
            roots = []
            triggers = before.triggers
        while True:
            walk = _Walk(triggers, roots)
            if before is not None:
                walk.resume(before)
            walk.run()
            all_triggers = triggers | (walk.words & (_HINTS | _SUBCLASSES))
            mutated = walk.mutated()
            described_roots = roots
            if before is None:
                described_roots = _as_first(inputs.roots, first.roots, mutated)
            if all_triggers == triggers and [*map(id, described_roots)] == [*map(id, roots)]:
                break
            triggers = all_triggers
            roots = described_roots
        if before is not None:
            fields = before.by_value | walk.fields(False, before.by_value)
            return before._replace(fields=fields, notes=before.notes | walk.notes())
        fields = dict(_as_first([*inputs.fields.items()], [*first.fields.items()], mutated))
        return _description(walk, inputs._replace(fields=fields), triggers)


def _as_first(parts: list[Any], first_parts: list[Any], mutated: set[str]) -> list[Any]:
    """Replaces parts that the code changes while it runs with the parts of the first description.

    Each part begins with its label.
    """

    def is_mutated(part: Any) -> bool:
        return not mutated.isdisjoint(part[0].split(".")[1:])

    return [*filterfalse(is_mutated, parts), *filter(is_mutated, first_parts)]


def _description(walk: _Walk, inputs: CodeInputs, triggers: frozenset[str]) -> CodeDescription:
    statements = walk.statements
    unstable = walk.unstable()
    names = walk.words.union(*(statement.texts for statement in statements))
    partly = set()
    for label, function in inputs.variables.items():
        variable = label.rpartition(".")[2]
        if not any(statement.takes_all(function, variable) for statement in statements):
            partly.add(label)
    by_value = {**walk.fields(True, {}), **walk.bytecode}
    not_compared = []
    for label, value in inputs.fields.items():
        if not unstable.isdisjoint(label.split(".")[1:]):
            not_compared.append(label)
        elif label.rpartition(".")[0] not in partly or label.rpartition(".")[2] in names:
            by_value[label] = value
    imported = [
        (_off_path(file), name, unit.label)
        for (file, name), unit in walk.units.items()
        if file not in walk.by_value
    ]
    fields = by_value | walk.fields(False, by_value)
    for root in inputs.roots:
        if "." not in root.label and not any(label.startswith(root.label) for label in fields):
            raise ValueError(f"the source of {root.name} is not in {root.file}")
    return CodeDescription(fields, walk.notes(), by_value, imported, triggers, not_compared)


@contextmanager
def _deep() -> Iterator[None]:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, 20_000))  # hundreds of elifs make a tree of this depth
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)
