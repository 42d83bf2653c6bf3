"""Values of the user's code as JSON, the same in every process; and which names give another value at each start.

This module imports only the standard library: a test runs it alone on every Python that it finds.
"""

from __future__ import annotations

import collections
import copy
import enum
import functools
import hashlib
import json
import os
import re
import string
import sys
import types
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import PurePath
from typing import Any

_UNSTABLE = re.compile(
    r"time\.((time|monotonic|perf_counter|process_time)(_ns)?|ctime|asctime|localtime|gmtime|strftime)|uuid\.uuid[14]|"
    r"datetime\.(\w+\.)?(now|utcnow|today)|os\.(getpid|getppid|urandom|getcwd|cpu_count|uname|getlogin|times)|"
    r"(socket|platform|tempfile|secrets|getpass)\.\w+|random\.(?!Random$|seed$)\w+|(pathlib\.)?Path\.(cwd|home)|"
    r"numpy\.random\.(?!default_rng|seed|RandomState|Generator)\w+|os\.path\.expanduser|id|hash"
)
_MACHINE = re.compile("SLURM_.*|HOSTNAME|PWD|HOME|USER|LOGNAME|TMPDIR|CUDA_VISIBLE_DEVICES|(LOCAL_)?RANK|WORLD_SIZE")
_ADDRESS = re.compile(r"\bat 0x[0-9a-f]{6,}>")
_AS_TEXT = {"datetime", "decimal", "fractions", "uuid", "zoneinfo", "ipaddress"}
_PACING = {
    "logging",
    "loguru",
    "threading",
    "_thread",
    "asyncio",
    "_asyncio",
    "concurrent",
    "queue",
    "_queue",
    "weakref",
}
_MAX_DEPTH = 50
_MAX_EXACT = 2**53
_MAX_BYTES = 2**26
_MAX_PARTS = 20_000
"""Beyond that, what is shared is looked at once: there are more ways through a graph than anybody can go."""
_BASES = (dict, list, tuple, set, frozenset, str, bytes, int, float)


Path = tuple[str, ...]
"""Attributes and constant keys (see ``key``) from a value to a part of it; () is all of it."""
LeftOut = Mapping[str, Collection[Path] | None]
"""By the names of attributes or arguments, what changes while the rollout runs; None: it is made at each start."""
LEFT = object()
"""What stays of a value that changes as a whole."""


def is_unstable(name: str) -> bool:
    """Whether what has this dotted name gives another value at each start, or on each machine."""
    return _UNSTABLE.fullmatch(name) is not None


def is_of_machine(variable: str) -> bool:
    """Whether an environment variable tells where the process runs."""
    return _MACHINE.fullmatch(variable) is not None


def type_name(cls: type) -> str:
    """Module and name, without private modules of the standard library: 3.13 has ``pathlib._local.PosixPath``."""
    root, *rest = str(cls.__module__).split(".")
    hidden = root in sys.stdlib_module_names
    private = next((index for index, part in enumerate(rest) if hidden and part.startswith("_")), len(rest))
    name = ".".join([root, *rest[:private], cls.__qualname__])
    # Optional[int] and int | None: two types before Python 3.14, one type since.
    return "typing.Union" if name in ("typing._UnionGenericAlias", "types.UnionType") else name


class Plain:
    """Writes values as JSON.

    Args:
        is_users: whether a class, function or module is of the user.
        left_out: the attributes that an object of a class has for its own use: see ``attributes``.
        folders: of the project, which may be somewhere else next time.

    Attributes:
        form: what JSON does not tell: types, the order of keys.
        code: the user's functions, classes and modules in the values.
        is_opaque: there are objects of libraries, of which only the type is known.
        is_pacing: there are loggers, locks or the like.
        cause: why they differ at each start.
        left: what was taken away of them, because it changes while the rollout runs.
    """

    def __init__(self, is_users: Callable[[object], bool], left_out: Callable[[type], LeftOut], *folders: str) -> None:
        self.form: list[str] = []
        self.code: list[object] = []
        self.is_opaque = self.is_pacing = False
        self.cause = ""
        self.left: list[object] = []
        self._again = functools.partial(Plain, is_users, left_out, *folders)
        self._is_users, self._left_out = is_users, left_out
        self._folders = [re.escape(folder) for folder in sorted(folders, key=len, reverse=True) if len(folder) > 1]
        self._inside: list[int] = []
        self._seen: dict[int, Any] = {}  # the objects, too, so that no other gets the id of one
        self._count = 0

    def of(self, value: Any) -> Any:
        """The value as JSON."""
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is str or isinstance(value, PurePath):
            self.form += [] if kind is str else ["path"]
            return self._text(str(value))
        if kind is int:
            return value if abs(value) < _MAX_EXACT else f"{self._note('int')} {value:#x}"
        if kind is float:
            self.form += ["float"] if value.is_integer() else []
            return value if abs(value) < float("inf") and value else f"float {value.hex()}"
        is_known, self._count = id(value) in self._seen, self._count + 1
        if id(value) in self._inside or len(self._inside) > _MAX_DEPTH or (is_known and self._count > _MAX_PARTS):
            return "<...>"
        self._seen[id(value)] = value
        self._inside.append(id(value))
        try:
            return self._other(value, kind)
        finally:
            self._inside.pop()

    def take_form(self) -> list[str]:
        """What ``form`` tells of the values since the last call."""
        form, self.form = self.form, []
        return form

    def _note(self, text: str) -> str:
        self.form.append(text)
        return text

    def _text(self, value: str) -> str:
        self.cause = "the address of an object" if " at 0x" in value and _ADDRESS.search(value) else self.cause
        for folder in self._folders:
            value = re.sub(folder + r"(?=/|$)", "<folder>", value)
        try:
            value.encode()
        except UnicodeEncodeError:  # half of a pair
            return f"{self._note('text')} {value!a}"
        return value

    def _other(self, value: Any, kind: type) -> Any:
        if isinstance(value, enum.Enum):
            self._found(kind)
            return f"<{kind.__qualname__}.{value.name}>"
        if self._is_users(kind) or kind is types.SimpleNamespace or type_name(kind) == "argparse.Namespace":
            self._found(kind)
            self._note(kind.__name__)
            base = next((one for one in _BASES if isinstance(value, one)), None)
            content = {} if base is None else {"": self.of(base(value))}
            if isinstance(names := getattr(kind, "_fields", None), tuple) and base is tuple:
                content = {name: self.of(part) for name, part in zip(names, value, strict=False)}  # secrets have names
            found = sorted(attributes(value, self._left_out(kind), self.left).items())
            return content | {name: self.of(part) for name, part in found}
        if kind in (bytes, bytearray):
            return f"{self._note(kind.__name__)} {value.hex()}"
        if kind in (complex, range, slice, type(...)) or kind.__module__ in _AS_TEXT:
            return f"{self._note(kind.__name__)} {value}"
        if isinstance(value, re.Pattern | string.Template):
            parts = [value.pattern, int(value.flags)] if isinstance(value, re.Pattern) else [value.template]
            return [self._note(kind.__name__), *map(self.of, parts)]
        if isinstance(value, Mapping) and (kind.__module__ in ("builtins", "collections")):
            return self._mapping(value, kind)
        if isinstance(value, list | tuple | set | frozenset | collections.deque):
            self._note(f"{kind.__name__} {len(value)} {getattr(value, 'maxlen', '')}")
            if isinstance(value, set | frozenset):  # has no order
                value = sorted(value, key=lambda one: json.dumps(self._again().of(one)))
            return [self.of(one) for one in value]
        if isinstance(value, functools.partial | functools.partialmethod):
            return [self._note("partial"), self.of(value.func), self.of(list(value.args)), self.of(value.keywords)]
        if isinstance(value, types.MethodType):
            return [self._note("method"), self.of(value.__self__), value.__name__]
        if isinstance(value, types.ModuleType | type | types.FunctionType | types.BuiltinFunctionType):
            owner = getattr(value, "__self__", None)
            if not isinstance(value, types.ModuleType | type) and not isinstance(owner, types.ModuleType | type | None):
                return [self._note("method"), self.of(owner), value.__name__]
            is_made = (
                isinstance(value, type) and getattr(sys.modules.get(value.__module__), value.__name__, None) is None
            )
            self.is_opaque |= is_made and "." not in value.__qualname__
            self._found(value)
            if isinstance(value, types.FunctionType) and not self._is_users(value):  # wrappers of libraries
                form, opaque = [*self.form], self.is_opaque
                inside = [content for _, content in cells(value)]
                self.of([*inside, wrapped(value)])
                self.form, self.is_opaque = form, opaque
            return f"<{'module' if isinstance(value, types.ModuleType) else value.__name__}>"
        if kind.__module__ == "numpy" and getattr(value, "nbytes", _MAX_BYTES) < _MAX_BYTES:  # an array, or a number
            self._note(f"{value.dtype} {value.shape}")
            is_plain = not value.dtype.hasobject
            return hashlib.sha256(value.tobytes()).hexdigest()[:32] if is_plain else self.of(value.tolist())
        inner = value.func if isinstance(value, functools.cached_property) else wrapped(value)
        if inner is not None:
            return [self._note(kind.__name__), self.of(inner)]
        self.is_opaque, self.is_pacing = True, self.is_pacing or kind.__module__.partition(".")[0] in _PACING
        return f"<{type_name(kind)}>"

    def _mapping(self, value: Mapping[object, object], kind: type) -> Any:
        if isinstance(value, collections.ChainMap):
            return self.of(value.maps)
        names = [name if type(name) is str else json.dumps(self.of(name)) for name in value]
        self.form += [kind.__name__, *(type(name).__name__ for name in value), *names]
        factory = {"default_factory": value.default_factory} if isinstance(value, collections.defaultdict) else {}
        parts = [*zip(names, value.values(), strict=True), *factory.items()]
        return {name: self.of(part) for name, part in parts}

    def _found(self, thing: object) -> None:
        if self._is_users(thing) and thing not in self.code:
            self.code.append(thing)


def key(constant: object) -> str:
    """A step of a path for ``name[constant]``."""
    return f"[{constant!r}]"


def without(value: Any, paths: Collection[Path], left: list[Any] | None = None) -> Any:
    """A value without what changes at these paths; ``LEFT`` if nothing stays. ``left`` gets what is taken away."""
    if not paths:
        return value
    is_list = type(value) is list
    if () in paths or not (is_list or isinstance(value, dict)):
        if left is not None:
            left.append(value)
        return LEFT
    below: dict[str, set[Path]] = {}
    for first, *rest in paths:
        below.setdefault(first, set()).add(tuple(rest))
    value = copy.copy(value)
    for each, part in [*(enumerate(value) if is_list else value.items())]:
        kept = without(part, below.get(key(each), ()), left)
        if kept is LEFT and not is_list:
            del value[each]
        else:
            value[each] = None if kept is LEFT else kept
    return value


def follow(value: object, path: Path) -> tuple[object, Path]:
    """The part of plain data that a path leads to, and the steps that were gone."""
    for index, step in enumerate(path):
        parts: dict[str, object] = {}
        if isinstance(value, Mapping):
            parts = {key(name): part for name, part in value.items()}
        elif isinstance(value, list | tuple):
            parts = {key(number): part for number, part in enumerate(value)}
        if not isinstance(value, type | types.ModuleType):
            parts |= getattr(value, "__dict__", {})
        if step not in parts:
            return value, path[:index]
        value = parts[step]
    return value, path


def attributes(value: object, left_out: LeftOut, left: list[object] | None = None) -> dict[str, object]:
    """Of an object: those in its dict and in slots. Left out is what changes: an attribute, or parts of it."""
    found = {}
    for cls in type(value).__mro__:
        for name, slot in vars(cls).items() if "__slots__" in vars(cls) else ():
            if isinstance(slot, types.MemberDescriptorType):
                with suppress(AttributeError):
                    found[name] = slot.__get__(value)
    with suppress(AttributeError):
        found |= object.__getattribute__(value, "__dict__")
    kept = {name: left_out.get(name, ()) for name in found if isinstance(name, str)}
    parts = {name: without(found[name], paths, left) for name, paths in kept.items() if paths is not None}
    return {name: part for name, part in parts.items() if part is not LEFT}


def folder_of(file: str) -> str:
    """The absolute folder of a file, "" for text that is in none."""
    return os.path.dirname(os.path.abspath(file)) if file and not file.startswith("<") else ""  # noqa: PTH100, PTH120


def cells(function: types.FunctionType) -> list[tuple[str, object]]:
    """The variables of enclosing functions, without those that are not filled yet."""
    found = []
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        with suppress(ValueError):
            found.append((name, cell.cell_contents))
    return found


def wrapped(thing: object) -> Any:
    """What ``functools`` says that a function is around; None if it is around nothing."""
    try:
        return None if isinstance(thing, type) else object.__getattribute__(thing, "__dict__").get("__wrapped__")
    except AttributeError:
        return None
