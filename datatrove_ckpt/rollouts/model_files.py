"""Small files of a model, such as its tokenizer: from a folder, or from the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from datatrove_ckpt.config.paths import expand_path
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.formatting import error_text, missing_package

_LOCAL = ("/", ".", "~", "$")


def find_file(setting: str, model: str, name: str, revision: str | None) -> Path:
    """The file of this name: in a folder, the file itself, or downloaded into the hub's cache.

    Args:
        setting: names the setting in errors.
        model: a folder, a file, or a repository of the hub.
        revision: branch, tag or commit of the repository; None: the default branch.

    Raises:
        ConfigError: there is no such file, or it cannot be downloaded.
    """
    path = expand_path(setting, model) if model.startswith(_LOCAL) else Path(model)
    if path.is_file() and path.suffix == Path(name).suffix:
        return path
    if path.is_dir() or model.startswith(_LOCAL):
        if not (path / name).is_file():
            raise ConfigError(f"{setting}: {path / name} is no file on this machine. Correct the path.")
        return path / name
    return _download(setting, model, name, revision)


def _download(setting: str, model: str, name: str, revision: str | None) -> Path:
    try:
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(model, name, revision=revision))
    except ImportError:
        raise ConfigError(f"{setting}: {missing_package('huggingface_hub')}") from None
    except Exception as error:  # the client's errors, those of the network, and those of the disk
        where = f"{model!r}" if revision is None else f"{model!r} at {revision!r}"
        raise ConfigError(
            f"{setting}: {name} of {where} is in no folder of that name, and the hub does not give it "
            f"({error_text(error).splitlines()[0][:200]}). Correct the name, or give the path of a folder that has it."
        ) from error
