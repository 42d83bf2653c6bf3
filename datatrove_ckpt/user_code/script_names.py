"""Collects the names that a script's function needs, for a pickle that another program loads.

dill pickles a function of ``__main__`` by value, but not the module's other functions and
constants. So a step also carries what its functions name.

    the program that unpickles           what happens
    imports the script (multiprocess)    nothing: the names are there, or are not
                                         (``nothing_carried``)
    cannot import it (a notebook)        ``__main__`` gets the names
    is another program                   ``__main__`` gets the names; it has begun and no longer
                                         needs its own

Ray's pickles bring the names themselves. Secrets stay behind, because others may read a pickle's
file. A value is pickled to nowhere: this finds the functions in it, whose names count, and secrets,
by ``is_surely_secret`` and environment variables like HF_TOKEN.

The user's own modules, which were imported from the script's folder or the working folder, are
collected for machines without them:

    name.py                            the file
    a package (with __init__.py)       all its files: also templates and tables
    a namespace package                its .py files: such a folder may hold all files of a user
    hidden files, environments         never
"""

from __future__ import annotations

import functools
import importlib.metadata
import io
import os
import re
import sys
import sysconfig
import threading
import types
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, NamedTuple

from loguru import logger

from datatrove_ckpt.common.formatting import byte_size
from datatrove_ckpt.common.redaction import (
    Veil,
    environment_secrets,
    is_surely_secret,
    may_hold_secret,
)
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.user_code.description import cells
from datatrove_ckpt.user_code.statements import loaded_names

_pickling = threading.local()


class ScriptNames(NamedTuple):
    """The names of a script, as a part of a pickle.

    Attributes:
        left_out: names that are not pickled, with the reasons.
    """

    file: str | None
    values: dict[str, object]
    left_out: dict[str, str]


def collect(*objects: object) -> ScriptNames | None:
    """Returns the names of the script that the functions in these objects use, directly or not;
    None if there are none, or the pickle is probably not for a file.

    Raises:
        ConfigError: a pickle of the objects, which may be written to a file, would hold a secret.
    """
    ray = sys.modules.get("ray")
    is_by_ray = ray is not None and ray.is_initialized()
    if is_by_ray or getattr(_pickling, "carries_nothing", False):
        return None
    is_private = getattr(_pickling, "is_private", False)
    main = sys.modules["__main__"]
    script_names = ScriptNames(getattr(main, "__file__", None), {}, {})
    with _pickling_that("carries_nothing"):
        scan = _PickleScan("")
        with suppress(Exception):  # the pickle itself raises the error
            scan.pickle(objects)
        if scan.secrets and not is_private:
            raise ConfigError(
                "rollout, shared_context or config: the job's pickle would hold what looks like "
                f"a secret: {', '.join(scan.secrets)}. Let the rollout read it from the "
                "environment where the task runs."
            )
        waiting = sorted(scan.names)
        for name in waiting:
            value = vars(main)[name]
            scan = _PickleScan(name)
            if reason := _stays(scan, value, is_private):
                script_names.left_out[name] = reason
            else:
                script_names.values[name] = value
                waiting += sorted(scan.names - {*waiting})
    if waiting:
        return script_names
    return None


def _stays(scan: _PickleScan, value: object, is_private: bool) -> str:
    if isinstance(value, types.ModuleType):
        return ""
    try:
        scan.pickle(value)
    except Exception as error:  # whatever the value's own __reduce__ raises
        return f"it cannot be pickled ({type(error).__name__}: {error})"
    if scan.secrets and not is_private:
        return f"it holds what looks like a secret ({', '.join(scan.secrets)})"
    return ""


def restore(names: ScriptNames) -> None:
    main = sys.modules["__main__"]
    if getattr(main, "__file__", None) != names.file:
        vars(main).update(names.values)
    elif names.file is None:
        # A worker of a notebook loads the pickle for each task: what rollouts have changed stays.
        for name, value in names.values.items():
            vars(main).setdefault(name, value)


@contextmanager
def nothing_carried() -> Iterator[None]:
    """Wraps a pickle for processes that import the script, which may name large tables.

    A process cannot import the cells of a notebook, which have no file, so the pickle carries their
    names. It may hold secrets, because it goes through a pipe.
    """
    has_file = hasattr(sys.modules["__main__"], "__file__")
    with _pickling_that("carries_nothing" if has_file else "is_private"):
        yield


@contextmanager
def _pickling_that(mark: str) -> Iterator[None]:
    before = getattr(_pickling, mark, False)
    setattr(_pickling, mark, True)
    try:
        yield
    finally:
        setattr(_pickling, mark, before)


def warn_left_out(names: ScriptNames) -> None:
    for name, reason in names.left_out.items():
        logger.warning(
            f"The script's {name} is not pickled with the job, because {reason}. Let a rollout "
            "that needs it read it where the task runs, or move it to a module."
        )


class _PickleScan:
    """Scans each object that a pickle writes: for secrets, which it names by the attribute that
    holds them, and for the script's names that functions use.
    """

    def __init__(self, name: str) -> None:
        self.secrets: dict[str, None] = {}
        self.names = set[str]()
        self._name = name
        self._objects: dict[int, object] = {}  # kept alive, so that ids stay unique
        self._attribute_paths: dict[int, str] = {}
        self._functions: dict[int, types.FunctionType] = {}
        self._variables = environment_secrets(is_surely_secret)

    def pickle(self, value: object) -> None:
        import dill  # type: ignore[import-untyped]

        self._check("", {self._name: value})
        with Path(os.devnull).open("wb") as nowhere:
            pickler = dill.Pickler(nowhere)
            pickler.persistent_id = self._scan
            pickler.dump(value)

    def _scan(self, value: object) -> None:
        # The code of a function that is not written by its name; functions may share it.
        if function := self._functions.get(id(value)):
            self._check(function.__qualname__, _variables(function))
        if id(value) in self._objects:
            return
        self._objects[id(value)] = value
        attribute_path = self._attribute_paths.get(id(value), self._name)
        if isinstance(value, str | bytes | bytearray):
            self._check_text(attribute_path, value)
        elif isinstance(value, dict):
            if value.get("__name__") not in sys.modules:
                self._check(attribute_path, value)
        elif isinstance(value, types.FunctionType):
            self._functions[id(value.__code__)] = value
            script = vars(sys.modules["__main__"])
            if value.__globals__ is script:
                used = loaded_names(value.__code__) & script.keys()
                self.names |= {name for name in used if not name.startswith("__")}
        elif isinstance(value, functools.partial):
            names = getattr(getattr(value.func, "__code__", None), "co_varnames", ())
            arguments = dict(zip(names, value.args, strict=False))
            self._check("functools.partial", arguments | value.keywords)
        elif isinstance(value, Veil):
            self._attribute_paths[id(value.value)] = value.name
        elif isinstance(value, tuple) and hasattr(value, "_asdict"):
            self._check(type(value).__qualname__, value._asdict())
        elif hasattr(value, "__dict__"):
            self._attribute_paths[id(vars(value))] = type(value).__qualname__

    def _check(self, owner: str, values: Mapping[Any, object]) -> None:
        for name, value in values.items():
            parts = [value]
            if isinstance(value, list | tuple | set | frozenset):
                parts += value
            attribute_path = f"{owner}.{name}".lstrip(".")
            for part in parts:
                self._attribute_paths.setdefault(id(part), attribute_path)
                if is_surely_secret(str(name), part):
                    self.secrets[attribute_path] = None

    def _check_text(self, attribute_path: str, text: str | bytes | bytearray) -> None:
        if is_surely_secret("", text):
            self.secrets[attribute_path] = None
        if isinstance(text, str):
            text = text.encode("utf-8", "surrogatepass")
        for name, value in self._variables.items():
            if value.encode() in text:
                self.secrets[f"the value of the environment variable {name}"] = None


def _variables(function: types.FunctionType) -> dict[str, object]:
    code = function.__code__
    names = reversed(code.co_varnames[: code.co_argcount])
    defaults = zip(names, reversed(function.__defaults__ or ()), strict=False)
    return {**dict(defaults), **(function.__kwdefaults__ or {}), **dict(cells(function))}


# modules ------------------------------------------------------------------------------------------


_ENVIRONMENT = {"pyvenv.cfg", "conda-meta"}
_NO_CODE = {"__pycache__", "site-packages"}
_STDLIB = sysconfig.get_path("stdlib")


def own_modules() -> dict[str, dict[str, Path]]:
    modules: dict[str, dict[str, Path]] = {}
    user_folders = {Path(folder).absolute() for folder in [*sys.path[:1], str(Path.cwd())]}
    for name in sorted({name.partition(".")[0] for name in [*sys.modules]} - {"datatrove_ckpt"}):
        for path in places_of(name):
            if (
                path.parent in user_folders
                and path.name in (name, f"{name}.py")
                and not is_installed(path)
            ):
                files = [path] if path.suffix else _files(path)
                modules.setdefault(name, {}).update(
                    {file.relative_to(path.parent).as_posix(): file for file in files}
                )
    return modules


def places_of(name: str) -> list[Path]:
    spec = getattr(sys.modules.get(name), "__spec__", None)
    if not isinstance(spec, ModuleSpec):
        return []
    paths = [*(spec.submodule_search_locations or ())] or [spec.origin or ""] * spec.has_location
    return [Path(path).absolute() for path in paths]


def is_installed(path: Path) -> bool:
    by_pip = {"site-packages", "dist-packages"} & {*path.parts}
    return bool(by_pip) or path.is_relative_to(_STDLIB)


def _files(package: Path) -> Iterator[Path]:
    regular = set[str]()
    for folder, folders, names in os.walk(package):
        if _ENVIRONMENT & {*folders, *names}:
            folders.clear()
            continue
        folders[:] = sorted(
            name for name in folders if not name.startswith(".") and name not in _NO_CODE
        )
        if "__init__.py" in names or str(Path(folder).parent) in regular:
            regular.add(folder)
        for name in sorted(names):
            is_needed = name.endswith(".py") or (folder in regular and not name.endswith(".pyc"))
            if is_needed and not name.startswith(".") and (file := Path(folder, name)).is_file():
                yield file


_SAME = ("datatrove", "dill", "huggingface_hub")
_MAX_BYTES = 10 * 2**20


def version() -> str:
    return importlib.metadata.version("datatrove-ckpt")


def required(*extras: str) -> list[str]:
    """Returns the requirements of this package with these extras. Packages that read pickles have
    this machine's versions.

    Raises:
        ConfigError: huggingface_hub is not installed.
    """
    requirements = []
    for requirement in importlib.metadata.requires("datatrove-ckpt") or []:
        extra = re.search(r"extra == ['\"](\w+)", requirement)
        if extra is None or extra[1] in extras:
            requirements.append(requirement.partition(";")[0].strip() if extra else requirement)
    try:
        return [*requirements, *(f"{name}=={importlib.metadata.version(name)}" for name in _SAME)]
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(
            "JobsPipelineExecutor needs huggingface_hub: pip install 'datatrove-ckpt[hub]'"
        ) from error


def bundle() -> bytes:
    package = Path(__file__).parents[1]
    files = {
        f"{package.name}/{path.relative_to(package)}": path for path in sorted(package.rglob("*"))
    }
    contents = {
        name: path.read_bytes()
        for name, path in files.items()
        if path.is_file() and path.suffix != ".pyc"
    }
    metadata = importlib.metadata.distribution("datatrove-ckpt").read_text("METADATA") or ""
    contents[f"datatrove_ckpt-{version()}.dist-info/METADATA"] = metadata.encode()
    contents |= own_files()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in contents.items():
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def own_files() -> dict[str, bytes]:
    """Returns the content of the user's own modules, by path.

    Raises:
        ConfigError: the modules are too large, or a module may hold a secret.
    """
    files = {name: path for module in own_modules().values() for name, path in module.items()}
    sizes = {path: path.stat().st_size for path in files.values()}
    if (total := sum(sizes.values())) > _MAX_BYTES:
        largest = max(sizes, key=lambda path: sizes[path])
        raise ConfigError(
            f"the local modules have {byte_size(total)}, and at most {byte_size(_MAX_BYTES)} go "
            f"along with the jobs. The largest file is {largest} ({byte_size(sizes[largest])}). "
            "Move data to a URL.",
            setting="executor",
        )
    contents = {name: path.read_bytes() for name, path in files.items()}
    for name, data in contents.items():
        if may_hold_secret(data.decode(errors="replace")):
            raise ConfigError(f"{files[name]}: holds what may be a secret. Use secrets.")
    return contents
