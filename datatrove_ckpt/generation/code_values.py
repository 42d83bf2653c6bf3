"""Writes values of the user's code as JSON that is equal in every process, and finds unstable
values.
"""

from __future__ import annotations

import collections
import enum
import functools
import hashlib
import json
import math
import re
import sys
import types
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import PurePath
from typing import Any

UNSTABLE = re.compile(
    r"time\.((time|monotonic|perf_counter|process_time)(_ns)?|ctime|asctime|localtime|gmtime|strftime)|uuid\.uuid[14]|"
    r"datetime\.(\w+\.)?(now|utcnow|today)|os\.(getpid|getppid|urandom|getcwd|cpu_count|uname|getlogin|times)|"
    r"(socket|platform|tempfile|secrets|getpass)\.\w+|random\.(?!Random$|seed$)\w+|(pathlib\.)?Path\.(cwd|home)|"
    r"numpy\.random\.(?!default_rng|seed|RandomState|Generator)\w+|os\.path\.expanduser|id|hash"
)
MACHINE = re.compile(
    "SLURM_.*|HOSTNAME|PWD|HOME|USER|LOGNAME|TMPDIR|CUDA_VISIBLE_DEVICES|(LOCAL_)?RANK|WORLD_SIZE"
)
_ADDRESS = re.compile(r"\bat 0x[0-9a-f]{6,}>")
_AS_TEXT = re.compile("datetime|decimal|fractions|uuid|zoneinfo|ipaddress")
_PACING = re.compile(
    r"(logging|loguru|threading|_thread|asyncio|_asyncio|concurrent|queue|_queue|weakref)(\..*)?"
)
_MAX_DEPTH = 50
_MAX_EXACT = 2**53
_MAX_BYTES = 1 << 26
_BASES = (dict, list, tuple, set, frozenset, str, bytes, int, float)


Path = tuple[str, ...]
"""Attributes and constant keys (see ``key``) from a value to a part of it; () is all of it."""
_first: dict[tuple[Any, ...], tuple[object, Plain]] = {}
"""What this process saw first of values that the rollout changes, with their owners."""


def type_name(cls: type) -> str:
    """Module and name, without private modules such as ``pathlib._local`` of Python 3.13."""
    module = str(cls.__module__)
    if module.partition(".")[0] in sys.stdlib_module_names:
        module = re.sub(r"\._.*", "", module)
    name = f"{module}.{cls.__qualname__}"
    # Optional[int] and int | None: two types before Python 3.14, one type since.
    if name in ("typing._UnionGenericAlias", "types.UnionType"):
        return "typing.Union"
    return name


class Plain:
    """Writes values as JSON.

    Args:
        project: a ``code_modules.Project``.
        folder: of the project; may differ at the next start.

    Attributes:
        parts: JSON values, by path.
        code: the user's functions, classes and modules in the values.
        is_opaque: some objects are of libraries; only their type is known.
        cause: why the values differ at each start.
    """

    def __init__(self, project: Any, folder: str) -> None:
        self.parts: dict[str, object] = {}
        self.code: list[object] = []
        self.is_opaque = False
        self.cause = ""
        self._project = project
        self._folder = folder
        self._seen: dict[int, object] = {}  # the objects, too, so that no other gets the id of one
        self._depth = 0

    def look(
        self, owner: object, name: str, value: object, paths: Iterable[Path] = ((),), depth: int = 0
    ) -> Plain:
        """Writes parts of a value; for a value that the rollout changes, as this process first saw
        it.
        """
        self._depth = depth
        place = (id(owner), name, *sorted(paths))
        is_changed = name in self._project.changed and not isinstance(value, str)
        if is_changed and place in _first:
            return _first[place][1]
        for path in sorted(paths):
            part, done = follow(value, path)
            # Shows whether the part is a secret.
            field = "".join("." + step.strip("[]'\"") for step in done)
            self._seen = {}
            self.parts[field] = self.of(part)
        if is_changed:
            _first[place] = owner, self
        return self

    def _inner(self, owner: object, name: str, value: object) -> object:
        if name not in self._project.changed or id(value) in self._seen:
            return self.of(value)
        inner = Plain(self._project, self._folder).look(owner, name, value, depth=self._depth)
        self.code += [one for one in inner.code if one not in self.code]
        self.is_opaque |= inner.is_opaque
        self.cause = self.cause or inner.cause
        return inner.parts[""]

    def of(self, value: Any) -> object:
        kind = type(value)
        if kind is str:
            return self._text(value)
        if isinstance(value, PurePath):
            return self._text(f"path {value}")
        if value is None or kind is bool or (kind is int and abs(value) < _MAX_EXACT):
            return value
        if kind is int:
            return f"int {value:#x}"
        if kind is float and math.isfinite(value) and not value.is_integer():
            return value
        if kind in (float, complex, range, slice, type(...)) or _AS_TEXT.fullmatch(kind.__module__):
            return f"{kind.__name__} {value}"
        if kind in (bytes, bytearray):
            return f"{kind.__name__} {value.hex()}"
        if id(value) in self._seen:
            return f"<{[*self._seen].index(id(value))}>"
        if self._depth > _MAX_DEPTH:
            return "<...>"
        self._seen[id(value)] = value
        self._depth += 1
        written = self._other(value, kind)
        self._depth -= 1
        return written

    def _text(self, value: str) -> str:
        if " at 0x" in value and _ADDRESS.search(value):
            self.cause = "the address of an object"
        if len(self._folder) > 1:
            value = re.sub(re.escape(self._folder) + r"(?=/|$)", "<folder>", value)
        return value.encode("utf-8", "backslashreplace").decode()  # of half of a pair

    def _other(self, value: Any, kind: Any) -> object:
        if isinstance(value, enum.Enum):
            self._found(kind)
            return f"<{kind.__qualname__}.{value.name}>"
        if self._project.owns(kind) or type_name(kind) in (
            "types.SimpleNamespace",
            "argparse.Namespace",
        ):
            self._found(kind)
            inside: Any = None
            if isinstance(value, tuple) and hasattr(kind, "_fields"):
                inside = dict(zip(kind._fields, value, strict=True))  # secrets have names
            elif isinstance(value, _BASES):
                base: Any = next(one for one in _BASES if isinstance(value, one))
                inside = base(value)
            content = {f"({kind.__name__})": self.of(inside)}
            found = attributes(value)
            for name in sorted(found.keys() - self._project.unstable_of(kind)):
                content[name] = self._inner(value, name, found[name])
            return content
        if isinstance(value, re.Pattern):
            return [f"pattern {value.pattern!r}", int(value.flags)]
        if isinstance(value, Mapping) and kind.__module__ in ("builtins", "collections"):
            names = [
                name if type(name) is str else f"{type(name).__name__} {self.of(name)}"
                for name in value
            ]
            content = dict(zip(names, map(self.of, value.values()), strict=True))
            if kind is not dict or names != sorted(names):
                factory = self.of(getattr(value, "default_factory", None))
                content["(order)"] = f"{kind.__name__} {', '.join(names)} {factory}"
            return content
        if isinstance(value, list | tuple | set | frozenset | collections.deque):
            items = [self.of(one) for one in value]
            if isinstance(value, set | frozenset):  # has no order
                items.sort(key=json.dumps)
            if kind is list:
                return items
            return {f"({kind.__name__} {getattr(value, 'maxlen', '')})": items}
        if isinstance(value, functools.partial | functools.partialmethod):
            return [
                "partial",
                self.of(value.func),
                self.of(list(value.args)),
                self.of(value.keywords),
            ]
        return self._code_or_array(value, kind)

    def _code_or_array(self, value: Any, kind: Any) -> object:
        owner = getattr(value, "__self__", None)
        if isinstance(value, types.MethodType | types.BuiltinFunctionType) and not isinstance(
            owner, types.ModuleType | type | None
        ):
            return ["method", self.of(owner), value.__name__]
        if isinstance(
            value, types.ModuleType | type | types.FunctionType | types.BuiltinFunctionType
        ):
            if isinstance(value, type):
                self.is_opaque |= not hasattr(
                    sys.modules.get(value.__module__), value.__qualname__.partition(".")[0]
                )
            self._found(value)
            # Wrappers of libraries.
            if isinstance(value, types.FunctionType) and not self._project.owns(value):
                is_opaque = self.is_opaque
                self.of([*(content for _, content in cells(value)), wrapped(value)])
                self.is_opaque = is_opaque
            return f"<{value.__name__}>"
        if isinstance(value, functools.cached_property):
            around = value.func
        else:
            around = wrapped(value)
        if around is not None:
            return [kind.__name__, self.of(around)]
        # An array, or a number.
        if kind.__module__ == "numpy" and getattr(value, "nbytes", _MAX_BYTES) < _MAX_BYTES:
            if value.dtype.hasobject:
                content = self.of(value.tolist())
            else:
                content = hashlib.sha256(value.tobytes()).hexdigest()[:32]
            return [f"{value.dtype} {value.shape}", content]
        self.is_opaque = True
        return f"<{type_name(kind)}>"

    def _found(self, thing: object) -> None:
        if self._project.owns(thing) and thing not in self.code:
            self.code.append(thing)


def key(constant: object) -> str:
    return f"[{constant!r}]"


def follow(value: object, path: Path) -> tuple[object, Path]:
    """Returns the part of plain data to which a path leads, and the steps up to there."""
    for index, step in enumerate(path):
        parts: Mapping[str, object] = {}
        if isinstance(value, Mapping):
            parts = {key(name): part for name, part in value.items()}
        elif not isinstance(value, type | types.ModuleType):
            parts = getattr(value, "__dict__", {})
        if step not in parts:
            return value, path[:index]
        value = parts[step]
    return value, path


def attributes(value: object) -> dict[str, object]:
    found = {}
    for cls in type(value).__mro__:
        for name, slot in vars(cls).items():
            if isinstance(slot, types.MemberDescriptorType):
                with suppress(AttributeError):
                    found[name] = slot.__get__(value)
    with suppress(AttributeError):
        found |= object.__getattribute__(value, "__dict__")
    return {name: part for name, part in found.items() if isinstance(name, str)}


def is_pacing(value: object) -> bool:
    return _PACING.fullmatch(type(value).__module__) is not None


def cells(function: types.FunctionType) -> list[tuple[str, object]]:
    found = []
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        with suppress(ValueError):
            found.append((name, cell.cell_contents))
    return found


def wrapped(thing: object) -> Any:
    try:
        if isinstance(thing, type):
            return None
        return object.__getattribute__(thing, "__dict__").get("__wrapped__")
    except AttributeError:
        return None
