"""Collects the user's own modules, for machines without them: modules that were imported from the
script's folder or the working folder.

name.py                            the file
a package (with __init__.py)       all its files: also templates and tables
a namespace package                its .py files: such a folder may hold all files of a user
hidden files, environments         never
"""

import importlib.metadata
import io
import os
import re
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

from datatrove_ckpt.common.formatting import byte_size
from datatrove_ckpt.common.redaction import may_hold_secret
from datatrove_ckpt.errors import ConfigError

_ENVIRONMENT = {"pyvenv.cfg", "conda-meta"}
_NO_CODE = {"__pycache__", "site-packages"}
_STDLIB = sysconfig.get_path("stdlib")


def own_modules() -> dict[str, dict[str, Path]]:
    """Returns the files of each module, by their paths below the folder that holds the module."""
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
    """Returns the file of an imported module, or the folders of a package; nothing for a built-in
    module.
    """
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
_MAX_BYTES = 10 * 2**20  # of the user's own modules


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
    """Returns a zip of this package and of the user's own modules. Raises as ``own_files``."""
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
            "the imported modules and packages beside the script or in the "
            f"working folder have {byte_size(total)}, and at most {byte_size(_MAX_BYTES)} go "
            f"along with the jobs. The largest file is {largest} ({byte_size(sizes[largest])}). "
            "Move data out of the packages; what jobs need of it, to a URL.",
            setting="executor",
        )
    contents = {name: path.read_bytes() for name, path in files.items()}
    for name, data in contents.items():
        if may_hold_secret(data.decode(errors="replace")):
            raise ConfigError(
                f"{files[name]}: holds what may be a secret, and goes along with the jobs. Use "
                "secrets."
            )
    return contents
