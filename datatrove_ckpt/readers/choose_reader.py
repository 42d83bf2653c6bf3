"""Chooses the reader for the files of a folder, or of a dataset on the Hugging Face hub."""

import base64
from collections.abc import Iterable
from os import PathLike, fspath

from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.readers.compressed import uncompressed
from datatrove_ckpt.readers.huggingface import HuggingFaceDatasetReader
from datatrove_ckpt.readers.inputs import list_input
from datatrove_ckpt.readers.jsonl import JsonlReader
from datatrove_ckpt.readers.tables import IpcReader, ParquetReader

FilesReader = JsonlReader | ParquetReader | IpcReader
"""The readers whose rows can be counted, and read in any order."""

_KINDS: tuple[type[FilesReader], ...] = (ParquetReader, IpcReader, JsonlReader)
_READERS = {suffix: kind for kind in _KINDS for suffix in kind.suffixes.split()}


def folder_reader(folder: str | PathLike[str], glob_pattern: str | None) -> FilesReader:
    folder = fspath(folder)
    names = list_input(JsonlReader(folder, glob_pattern=glob_pattern)).names
    if not any(names):  # for a file, the listing has one empty name
        raise ConfigError(
            f"{folder!r} is no folder with files. Give a folder, and glob_pattern for some of its "
            "files."
        )
    if "state.json" in names:  # written by save_to_disk; map() leaves cache-*.arrow behind
        return IpcReader(folder, glob_pattern="data-*.arrow")
    ending = _ending(names, folder)
    return _READERS[ending](folder, glob_pattern=glob_pattern or f"**/*{ending}*")


def hub_reader(path: str, name: str | None, split: str, revision: str | None) -> FilesReader:
    arguments = {"name": name, "split": split, "revision": revision}
    options = {key: value for key, value in arguments.items() if value is not None}
    dataset = HuggingFaceDatasetReader(
        path, dataset_options=options, streaming=True, text_key=None
    ).list_dataset()
    root = f"hf://datasets/{path}@{dataset.commit}"
    other_urls = [url for url in dataset.urls if not url.startswith(root)]
    if other_urls:
        raise ConfigError(
            f"{other_urls[0]} is not a file of a dataset on the hub. Use from_folder."
        )
    names = [url.removeprefix(f"{root}/") for url in dataset.urls]
    listed = base64.b64encode("\n".join(names).encode()).decode()
    reader = _READERS[_ending(names, path)]
    return reader(root, paths_file=f"data:text/plain;base64,{listed}")


def _ending(names: Iterable[str], location: str) -> str:
    """Returns the suffix of the files that readers can read, without a compression's suffix."""
    suffixes = _READERS.keys() & {uncompressed(name).suffix for name in names}
    if len(suffixes) > 1:
        suffixes.discard(".json")  # usually describes the other files
    if len(suffixes) != 1:
        raise ConfigError(
            f"{location!r} has {' and '.join(sorted(suffixes)) or 'no'} files to read, and one "
            f"kind of {', '.join(_READERS)} is needed. Name them by a pattern, or convert them to "
            "Parquet."
        )
    return suffixes.pop()
