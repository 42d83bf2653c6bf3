"""Describes the user's code that a rollout reaches by name.

    Part of a run is every top-level statement of the user's own files that binds or changes a name
    which the rollout mentions, directly or through other such statements. Comments, docstrings and
    hints of functions do not count. What comes from outside counts by value: what ``partial``,
    closures and attributes give, the command line and the environment, and text files that a
    counted statement names. Where names cannot tell (``globals()``, ``eval``, a module passed as a
    value), the whole file counts.

Variables of modules are never compared by value: the statements that bind them stand for them.
Installed packages do not count. A file is parsed only if its text holds a name that is reached.
Fields are named without modules, so that a helper may move.
"""

from __future__ import annotations

import ast
import functools
import glob
import os
import re
import sys
import threading
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import PathFinder
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from datatrove_ckpt.generation.code_given import MAIN, Given, Root, is_of_user, look_at, written
from datatrove_ckpt.generation.code_statements import (
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

Key = tuple[str, str]
"""A file, and a name that it binds; an empty name is all of the file."""
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
    TemporaryDirectory check_output choice ctime cwd frozenset getcwd gethostname getoutput getpid
    gettempdir hash id mkdtemp monotonic node now object perf_counter popen randint random run
    sample set shuffle strftime time time_ns today token_hex urandom utcnow uuid1 uuid4
    """.split()  # noqa: SIM905
)
"""Calls whose results differ at each start: what is named after them is not compared by value."""
_SPREADS = 4
_MACHINE = re.compile(
    "SLURM_|CUDA_|HOST|.*(KEY|TOKEN|SECRET|PASSWORD|LOGNAME)|.*(RANK|PID|TMPDIR|HOME|PATH|PWD|USER|WORLD_SIZE)$"
)
_PATH = re.compile(r"(?!.*\*\*)(?:[\w ./*-]{0,199}\w|[\w ./-]{0,199}\w/\*)")
_MODULE = re.compile(r"[^\W\d]\w*(\.\w+)*")
_MAX_FILE = 2**20
_MAX_FILES = 1000
_DEEPEST_FOLDER = 3
_DEEPEST = 20_000
_one_at_a_time = threading.RLock()
USED = "uses."
"""Beginning of the fields about what a rollout uses."""


class CodeDescription(NamedTuple):
    """Describes the user's code.

    Attributes:
        notes: what each field is about, and how the rollout reaches it.
        own: the fields that describe what a pickle holds by value.
        imported: files of modules, by their place on the path, their names that count, and fields.
        known: words because of which hints or subclasses count.
        left: what is not compared.
    """

    fields: dict[str, object]
    notes: dict[str, str]
    own: dict[str, object]
    imported: list[tuple[str, str, str]]
    known: frozenset[str]
    left: list[str]


class Unit(NamedTuple):
    """The statements that bind or change a name.

    Attributes:
        label: of the field.
        way: the names that lead to it, from the rollout.
        own: a pickle holds it by value.
    """

    label: str
    way: tuple[str, ...]
    statements: list[Statement]
    own: bool


class _Walk:
    """One walk through the code. See the module.

    Args:
        known: hints and docstrings count, or subclasses of a class, because of these words.
        roots: where it begins.
        files: to look through besides: what imports name by a text.
    """

    def __init__(self, known: frozenset[str], roots: list[Root], files: Iterable[str]) -> None:
        self._documented = not known.isdisjoint(_HINTS)
        self._subclasses = not known.isdisjoint(_SUBCLASSES)
        self._roots = {home(root.file): root for root in roots}
        self.files = set(files)
        self.words: set[str] = set()
        self.units: dict[Key, Unit] = {}
        self.bytecode: dict[str, object] = {}
        self._queue: deque[tuple[Key, str, tuple[str, ...]]] = deque()
        self.sources: dict[str, CodeSource] = {}
        self._importers: dict[str, set[str]] = {}
        self._changed: dict[str, dict[Key, list[Statement]]] = {}
        self._places: dict[tuple[str, int, str], str] = {}
        self._values = {
            os.path.abspath(file): vars(module)  # noqa: PTH100
            for module in [*sys.modules.values()]
            if isinstance(file := getattr(module, "__file__", None), str)
        }
        self._main = str(getattr(sys.modules["__main__"], "__file__", ""))
        mains = [self._main] if is_of_user(self._main) and self._main else []
        for file in [*self._roots, *mains, *sorted(self.files)]:
            self._load(file)
        for root in roots:
            self._start(root)

    # files -----------------------------------------------------------------------------------

    def _load(self, file: str) -> None:
        """Finds all files that a file imports, directly or not, without parsing one."""
        waiting = [file]
        for path in waiting:
            if path in self.sources:
                continue
            source = self.sources[path] = CodeSource(path, self._documented)
            for level, module, names in source.imports():
                place = self._place(path, level, module)
                parts = module.split(".")
                outer = [
                    self._place(path, level, ".".join(parts[:end])) for end in range(1, len(parts))
                ]
                inner = [f"{place}/{name}" for name in names if place]
                for found in map(self._file, (*outer, place, *inner)):
                    if found:
                        self._importers.setdefault(found, set()).add(path)
                        waiting.append(found)

    def _file(self, place: str) -> str:
        """Returns the user's file of a module; empty if there is none."""
        for file in (f"{place}/__init__.py", f"{place}.py"):
            if place and (file in self._roots or is_of_user(file)) and os.path.isfile(file):  # noqa: PTH113
                return file
        return ""

    def _place(self, file: str, level: int, module: str) -> str:
        """Returns the path of a module without its suffix; empty if it is not the user's."""
        key = os.path.dirname(file), level, module  # noqa: PTH120
        if key not in self._places:
            self._places[key] = _find(*key)
        return self._places[key]

    # where a name leads ----------------------------------------------------------------------

    def _keys(self, statement: Statement, chain: Chain) -> list[Key]:
        """Returns where a name leads, through all imports."""
        file = home(statement.file)
        bound = self.sources[file].bound(chain[0])
        found = [(file, chain[0])] if bound else []
        waiting = [
            (file, one, chain[1:])
            for each in (*bound, statement)
            for one in each.imports
            if one.bound == chain[0]
        ]
        if not waiting and not bound:
            waiting = self._stars(file, chain)
        for path, one, rest in waiting:
            place = self._place(path, one.level, one.module)
            names = (*one.names, *rest)
            while place:
                inner = self._file(place)
                if inner and not names:
                    found.append((inner, ""))
                if not names:
                    break
                if inner:
                    self._load(inner)
                    bound = self.sources[inner].bound(names[0])
                    steps = [
                        (inner, each, names[1:])
                        for binding in bound
                        for each in binding.imports
                        if each.bound == names[0]
                    ]
                    steps = [
                        step for step in steps or self._stars(inner, names) if step not in waiting
                    ]
                    found += [(inner, names[0]), (inner, "__getattr__")]
                    if one.bound == "*":
                        found += [(path, "*"), (inner, "__all__")]
                    waiting += steps
                    if bound and (steps or not bound[0].imports):
                        break
                place = f"{place}/{names[0]}"
                names = names[1:]
        return found

    def _stars(self, file: str, chain: Chain) -> list[tuple[str, Import, Chain]]:
        stars = self.sources[file].bound("*")
        return [(file, one, chain) for statement in stars for one in statement.imports]

    def _changes(self, file: str) -> dict[Key, list[Statement]]:
        """Returns what the statements of a file change, in all files."""
        if file not in self._changed:
            found = self._changed[file] = {}
            for statement in self.sources[file].statements:
                chains = statement.changes | statement.passed
                if self._subclasses:
                    chains |= statement.bases
                for chain in chains:
                    keys = self._keys(statement, chain)
                    # What it takes of a module is no change of the import.
                    bound = self.sources[file].bound(chain[0])
                    if bound and all(one.imports and not one.is_definition for one in bound):
                        del keys[0]
                    for key in {*keys}:
                        passed = self.sources[key[0]].bound(key[1])
                        if chain in statement.passed and all(one.is_definition for one in passed):
                            continue
                        found.setdefault(key, []).append(statement)
        return self._changed[file]

    # the walk --------------------------------------------------------------------------------

    def _start(self, root: Root) -> None:
        file = home(root.file)
        source = self.sources[file]
        top = root.name.partition(".")[0]
        functions = [root.thing]
        if isinstance(root.thing, type):
            functions = [*vars(root.thing).values()]
        codes = []
        for one in functions:
            if isinstance(one, types.FunctionType):
                self._values.setdefault(file, one.__globals__)
                if one.__code__.co_filename == root.file and not source.is_of(one):
                    codes.append(one.__code__)
        for code in codes:
            texts = sorted(map(write_constant, codes))
            self.bytecode[f"{root.label} code"] = (
                f"bytecode {sys.implementation.cache_tag} {digest(*texts)}"
            )
            for name in sorted(loaded_names(code)):
                self._go((file, name), USED + name, (root.label, name))
        if codes:
            return
        line = getattr(getattr(root.thing, "__code__", None), "co_firstlineno", 0)
        if top == "<lambda>" or not source.bound(top):
            for statement in source.statements:
                if statement.file == root.file and line in statement.lines:
                    top = statement.alias
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
        is_imported = any(
            root.file == file and _is_imported(root) for root in [*self._roots.values()]
        )
        own = file == self._main or (file in self._roots and not is_imported)
        self.units[key] = Unit(label, way, kept, own)
        for statement in kept:
            self.words |= statement.words
            for found in dict.fromkeys(self._mentioned(statement, name)):
                shown = found[1] or Path(found[0]).stem
                self._go(found, USED + shown, (*way, shown))

    def _mentioned(self, statement: Statement, name: str) -> Iterator[Key]:
        if statement.is_import and name:
            return
        for chain in [*statement.chains, *((one,) for one in sorted(statement.binds))]:
            yield from self._keys(statement, chain)
        if statement.is_import or statement.words.isdisjoint(_WHOLE):
            return
        # Names do not show what such a statement reaches.
        source = self.sources[home(statement.file)]
        places = [
            self._place(source.path, 0, text) for text in statement.texts if _MODULE.fullmatch(text)
        ]
        for other in source.statements:
            for one in other.imports:
                place = self._place(source.path, one.level, one.module)
                places += (place, *(f"{place}/{inner}" for inner in one.names if place))
        for file in sorted({source.path, *map(self._file, places)} - {""}):
            self.files.add(file)
            yield file, ""

    def resume(self, before: CodeDescription) -> None:
        """Continues from the names of modules that functions use which came by value."""
        for place, _, _ in before.imported:
            self._load(_on_path(place))
        for place, name, label in before.imported:
            self._go((_on_path(place), name), label, (label,))

    # fields ----------------------------------------------------------------------------------

    def fields(self, own: bool, taken: Mapping[str, object]) -> dict[str, object]:
        """Returns the fields of what a pickle holds by value, or of the rest."""
        texts: dict[str, set[tuple[str, ...]]] = {}
        fields: dict[str, object] = {}
        for (path, name), unit in self.units.items():
            if unit.own is own and not name and "getsource" in self.words:
                content = "".join(self.sources[path].texts.values())
                texts.setdefault(f"{USED}source of {Path(path).name}", set()).add((content,))
            for statement in unit.statements if unit.own is own else ():
                fields |= self._from_outside(statement)
                place = Path(home(statement.file))
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
            for one in unit.statements[:1]:
                way = " -> ".join(dict.fromkeys(unit.way))
                note = f"{unit.way[-1]} in {one.file}, line {one.line}: {way}"
                notes.setdefault(f"{unit.label} code", note)
        return notes

    def _text(self, statement: Statement) -> str:
        """Returns the text that counts: from which of the user's modules a name comes does not."""
        if statement.is_import:
            one = statement.imports[0]
            place = self._place(home(statement.file), one.level, one.module)
            if place and is_of_user(place):
                return "" if one.names in ((), (one.bound,)) else f"{one.bound}={one.names}"
        return statement.text

    def _from_outside(self, statement: Statement) -> dict[str, object]:
        """Returns values of the environment and of the command line."""
        found: dict[str, object] = {}
        if not self.words.isdisjoint({"environ", "getenv"}):
            for text in statement.texts_at_import & os.environ.keys():
                if not _MACHINE.match(text):
                    found[f"{USED}environment {text}"] = f"hash {digest(os.environ[text])}"
        file = home(statement.file)
        makers = [one for word in statement.words for one in self.sources[file].bound(word)]
        words = statement.words.union(*(one.words for one in makers if one.is_definition))
        if isinstance(statement.node, ast.Assign) and not words.isdisjoint(_OUTSIDE):
            chains = {(name,) for name in statement.binds} | statement.changes
            keys = {key for chain in chains for key in self._keys(statement, chain)}
            for path, name in keys & self.units.keys():
                value = self._values.get(path, {}).get(name)
                for part, inner in getattr(value, "__dict__", {"": value}).items():
                    if not self.words.isdisjoint({part, "vars", "__dict__"}) or part == "":
                        found[f"{USED}{name}.{part}".rstrip(".")] = written(inner)
        return found

    @functools.cached_property
    def _written(self) -> set[Statement]:
        """Returns statements that bind names of files which the code writes, and read none."""
        statements = [one for unit in self.units.values() for one in unit.statements]
        chains = [(one, chain) for one in statements for chain in one.written]
        keys = {key for one, chain in chains for key in self._keys(one, chain)}
        found = {one for key in keys & self.units.keys() for one in self.units[key].statements}
        return {one for one in found if not one.is_definition and one.words.isdisjoint(READING)}

    def _text_files(self, statement: Statement) -> Iterator[Path]:
        if statement in self._written:
            return
        for folder in self._folders:
            for text in sorted(filter(_PATH.fullmatch, statement.files)):
                pattern = os.path.join(glob.escape(str(folder)), text)  # noqa: PTH118
                for file in map(Path, islice(glob.iglob(pattern), _MAX_FILES)):  # noqa: PTH207
                    if file.is_file() and 0 < file.stat().st_size < _MAX_FILE:  # not of /proc
                        yield file

    @functools.cached_property
    def _folders(self) -> list[Path]:
        """Returns the folders of all statements, and those below that a text in one names."""
        statements = [one for unit in self.units.values() for one in unit.statements]
        named = {text for one in statements for text in one.texts | one.files}
        named = {text for text in named if _PATH.fullmatch(text) and "*" not in text}
        found = {Path(one.file).parent for one in statements} | {Path.cwd()}
        for _ in range(_DEEPEST_FOLDER):
            found |= {*filter(Path.is_dir, (one / text for one in found for text in named))}
        return sorted(found)

    def unstable(self) -> set[str]:
        """Returns names that are given values which differ at each start."""
        found: set[str] = set()
        parsed = [one for one in self.sources.values() if "statements" in vars(one)]
        values = [value for one in parsed for each in one.statements for value in each.assigned]
        for _ in range(_SPREADS):
            for names, called, words in values:
                is_stable = called.isdisjoint(_UNSTABLE) and words.isdisjoint(found)
                if not is_stable and "sorted" not in called:
                    found |= names
        return found


def home(file: str) -> str:
    """Returns the file of a statement; the cells of a notebook are one."""
    return NOTEBOOK if CELL.match(file) else file


def _find(folder: str, level: int, module: str) -> str:
    parts = module.split(".")
    for _ in range(level - 1):
        folder = os.path.dirname(folder)  # noqa: PTH120
    if level:
        return os.path.join(folder, *filter(None, parts))  # noqa: PTH118
    if parts[0] in sys.stdlib_module_names:
        return ""
    spec = getattr(sys.modules.get(parts[0]), "__spec__", None)
    try:
        spec = spec or PathFinder.find_spec(parts[0], [folder, *sys.path])
    except (ImportError, ValueError):
        return ""
    places = [*(getattr(spec, "submodule_search_locations", None) or [])]
    places += [origin.removesuffix(".py") for origin in [getattr(spec, "origin", None)] if origin]
    return os.path.join(os.path.abspath(places[0]), *parts[1:]) if places else ""  # noqa: PTH100, PTH118


def _is_imported(root: Root) -> bool:
    """Returns whether a pickle holds only the names of what is in the file of a root."""
    module = sys.modules.get(root.thing.__module__ if root.name else root.thing.__name__)
    is_main = getattr(module, "__name__", "__main__") in MAIN
    return not is_main and getattr(module, "__file__", None) == root.file


def _off_path(file: str) -> str:
    bases = [base for base in map(os.path.abspath, sys.path) if file.startswith(base + os.sep)]
    return os.path.relpath(file, max(bases, key=len)) if bases else file


def _on_path(place: str) -> str:
    files = (os.path.abspath(os.path.join(base, place)) for base in sys.path)  # noqa: PTH100, PTH118
    return next(filter(os.path.isfile, files), place)


_first: dict[tuple[int, ...], tuple[object, Given]] = {}
"""What this process saw first of things, which the rollout may change."""


def describe(
    things: Mapping[str, object], before: CodeDescription | None = None
) -> CodeDescription:
    """Describes functions and objects, by their field.

    Args:
        before: describes what a pickle brought by value.
    """
    things = {label: thing for label, thing in things.items() if thing is not None}
    with _one_at_a_time, _deep():
        place = tuple(map(id, things.values()))
        given = look_at(things)
        first = _first.setdefault(place, (things, given))[1]
        known: frozenset[str] = frozenset()
        files: set[str] = set()
        while True:
            if before is None:
                walk = _Walk(known, given.roots, files)
            else:
                walk = _Walk(known | before.known, [], files)
                walk.resume(before)
            walk.run()
            now = known | (walk.words & (_HINTS | _SUBCLASSES))
            if now == known and walk.files == files:
                break
            known = now
            files = walk.files
        if before is not None:
            fields = before.own | walk.fields(False, before.own)
            return before._replace(fields=fields, notes=before.notes | walk.notes())
        return _description(walk, given, first, known)


def _description(walk: _Walk, given: Given, first: Given, known: frozenset[str]) -> CodeDescription:
    """Puts the parts together; what the code changes while it runs is as it was seen first."""
    statements = [one for unit in walk.units.values() for one in unit.statements]
    mutated = {name for one in statements for name in one.mutated}
    values = {
        label: value
        for fields, is_state in ((given.fields, False), (first.fields, True))
        for label, value in fields.items()
        if mutated.isdisjoint(label.split(".")[1:]) is not is_state
    }
    unstable = walk.unstable()
    names = walk.words.union(*(one.texts for one in statements))
    partly = set()
    for label, function in given.variables.items():
        variable = label.rpartition(".")[2]
        if not any(one.takes_all(function, variable) for one in statements):
            partly.add(label)
    own = {**walk.fields(True, {}), **walk.bytecode}
    left = []
    for label, value in values.items():
        is_set = isinstance(value, dict) and not {"(set)", "(frozenset)"}.isdisjoint(value)
        if not unstable.isdisjoint(label.split(".")[1:]) and not is_set:
            left.append(label)
        elif label.rpartition(".")[0] not in partly or label.rpartition(".")[2] in names:
            own[label] = value
    imported = [
        (_off_path(file), name, unit.label)
        for (file, name), unit in walk.units.items()
        if not unit.own
    ]
    fields = own | walk.fields(False, own)
    for root in given.roots:
        if "." not in root.label and not any(label.startswith(root.label) for label in fields):
            raise ValueError(f"the source of {root.name} is not in {root.file}")
    return CodeDescription(fields, walk.notes(), own, imported, known, left)


@contextmanager
def _deep() -> Iterator[None]:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, _DEEPEST))  # hundreds of elifs are a tree as deep
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)
