"""Checksums of states, by which a damaged state is an error and never gives other samples.

Each state of a ``ReaderDataset``, ``Pack`` or ``Mix`` has a checksum of its other values. States of
earlier releases have none, and are accepted.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path

from xxhash import xxh3_64_hexdigest

from datatrove_ckpt.errors import CheckpointCorrupt
from datatrove_ckpt.readers.positions import State

_KEY = "checksum"
_KIND = "xxh3:"
REMEDY = "Give the state of the step before, of all ranks."


def sealed(state: State) -> State:
    """Adds the checksum, which survives JSON and ``torch.save``."""
    content = {key: value for key, value in state.items() if key != _KEY}
    return content | {_KEY: _KIND + xxh3_64_hexdigest(json.dumps(_plain(content)).encode())}


def _plain(value: object) -> object:
    """Returns what JSON keeps of a value; the type alone of other values, in states of foreign
    sources.
    """
    if isinstance(value, Mapping):
        return sorted((str(key), _plain(one)) for key, one in value.items())
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, str | int | float | None):
        return value
    return type(value).__name__


def check_seals(content: object, name: str = "") -> None:
    """Raises CheckpointCorrupt if a state in ``content`` has changed. ``name``: of its file."""
    for state in find_states(content, lambda one: str(one.get(_KEY)).startswith(_KIND)):
        if sealed(state)[_KEY] != state[_KEY]:
            where = f" in {name!r}" if name else ""
            raise CheckpointCorrupt(
                f"The state{where} is damaged: its checksum is that of another content. {REMEDY}"
            )


def load_file(state: State | str | PathLike[str]) -> object:
    """Returns a state, or loads what ``torch.save`` has written.

    Raises:
        CheckpointCorrupt: the state or the file is damaged.
        OSError: the file cannot be opened.
    """
    if not isinstance(state, str | PathLike):
        check_seals(state)
        return state
    import torch

    with Path(state).open("rb") as file:
        try:
            if zipfile.is_zipfile(file):
                with zipfile.ZipFile(file) as archive:  # torch compares no checksums
                    for name in archive.namelist():
                        if not name.rpartition("/")[0].endswith("/data"):  # no tensors
                            archive.read(name)
            file.seek(0)
            content: object = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # whatever pickle, zipfile and torch raise
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise CheckpointCorrupt(
                f"The file {str(state)!r} cannot be read: it is damaged, or torch.save did not "
                f"write it, or it holds more than torch.load(weights_only=True) takes ({reason}). "
                f"{REMEDY}"
            ) from error
    check_seals(content, str(state))
    return content


def find_states(content: object, is_wanted: Callable[[State], bool]) -> Iterator[State]:
    """Yields the wanted dicts in the state of a loader or of a wrapper around it."""
    if isinstance(content, dict) and is_wanted(content):
        yield content
    elif isinstance(content, Mapping):
        for value in content.values():
            yield from find_states(value, is_wanted)
    elif isinstance(content, Sequence) and not isinstance(content, str | bytes):
        for value in content:
            yield from find_states(value, is_wanted)
