"""Modules that have moved, under the paths by which pickles, YAML files and scripts may name them.

Tasks that an earlier version has queued import what their executor.pik names. ``Door`` and
``Description`` are in the pickles of version 0.2.0 alone, beside a step's settings.
"""

import sys
from collections import namedtuple
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Self

_PACKAGE = "datatrove_ckpt"
MOVED = {
    "checkpoint.skipped": "old_paths",
    "errors.doors": "old_paths",
    "generation.code_walk": "old_paths",
    "output.hub_pace": "output.hub",
    "output.hub_writers": "output.writer_checks",
    "readers.batch": "readers.jsonl",
    "readers.batch_files": "readers.jsonl",
    "readers.dataset_source": "readers.huggingface",
    "readers.extent": "old_paths",
    "readers.input_progress": "readers.inputs",
    "readers.pages": "readers.whole_files",
    "readers.positions": "readers.inputs",
    "readers.step_records": "readers.shard_record",
    "readers.texts": "readers.whole_files",
    "rollouts.batch": "rollouts.batch_rollout",
    "rollouts.judge": "rollouts.prompt",
    "testing.server": "testing.fake_server",
    "torch.loader_workers": "torch.training_input",
    "torch.workers": "torch.training_input",
}
"""Old path below the package: new path."""


class Door: ...


Description = namedtuple("Description", "fields notes own counts edges state documented left")
"""The description of the user's code by version 5 of the identity."""


class _ReaderState:
    """What an earlier version pickled of a reader that had been used. The next run of the reader
    makes its own.
    """

    def __new__(cls, *values: object) -> Self:
        return super().__new__(cls)

    def __setstate__(self, state: object) -> None:
        """Keeps nothing."""


SkippedLines = FileExtent = InputExtent = _ReaderState


class OldPaths:
    """Imports a module that has moved, at the first use of its old path."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        old = fullname.removeprefix(f"{_PACKAGE}.")
        if old not in MOVED:
            return None
        # No subclass of importlib.abc.Loader, which takes 8 ms to import.
        return ModuleSpec(fullname, self)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """Leaves the making of a module to Python."""

    def exec_module(self, module: ModuleType) -> None:
        """Puts the module that has moved in the place of ``module``, as imports may."""
        old = module.__name__.removeprefix(f"{_PACKAGE}.")
        sys.modules[module.__name__] = import_module(f"{_PACKAGE}.{MOVED[old]}")


sys.meta_path.append(OldPaths())
