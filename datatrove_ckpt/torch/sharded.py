"""Finds parts of a training's states (FSDP) and values that are not plain, and copies states in the
host's memory.

``torch.distributed.checkpoint`` (DCP) saves such parts as a folder, and restores them on any number
of ranks, also without FSDP.
"""

import copy
import io
import pickle
import re
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as sharding
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from xxhash import xxh3_64_hexdigest

from datatrove_ckpt.errors import ConfigError

States = Mapping[str, Any]
"""Models, optimizers and other objects with ``state_dict`` and ``load_state_dict``, by name."""

METADATA = ".metadata"
_COMPILED = "_orig_mod."
VALUES = (bool, int, float, str, type(None))
_PLAIN = (torch.Tensor, torch.nn.Parameter, *VALUES)


def check_savable(states: States) -> None:
    for key, state in states.items():
        if not re.fullmatch(r"\w[\w.-]*", key):
            raise ConfigError(
                f"{key!r} is no name of a state: take letters, digits, '_', '-' and, not first, "
                "'.'."
            )
        if not isinstance(state, dict) and not hasattr(state, "state_dict"):
            raise ConfigError(
                f"save: {key} ({type(state).__name__}) has no state_dict(). Give it to a writer; "
                "a loader must be torchdata's StatefulDataLoader."
            )


def contents_of(states: States) -> tuple[dict[str, object], dict[str, object]]:
    """Returns the states that are alike in all ranks, and the states of which each rank has a part.

    Raises:
        ConfigError: the model of an optimizer is missing.
    """
    alike = {}
    parts = {}
    for key, state in states.items():
        value = _state_dict(state)
        tensors = [leaf for _, leaf in leaves(value, "")]
        if isinstance(state, Optimizer):  # before its first step it has no state
            tensors += [each for group in state.param_groups for each in group["params"]]
        if not any(isinstance(each, DTensor) for each in tensors):
            alike[key] = value
        elif isinstance(state, torch.nn.Module | Optimizer):
            parts[key] = state_of(key, states)
        else:
            parts[key] = value
    return alike, parts


def _state_dict(state: Any) -> object:
    if isinstance(state, dict):
        return state
    return state.state_dict()


def give(state: Any, saved: Any) -> None:
    """Restores a state whose content is known. Tensors in a dict keep their memory unless they
    cannot hold the content.

    Raises ValueError if a tensor of a dict has another shape.
    """
    if isinstance(state, torch.nn.Module | dict):
        saved = _named_as(_state_dict(state), saved)
    if not isinstance(state, dict):
        state.load_state_dict(saved)
        return
    for key in state.keys() - saved.keys():
        del state[key]
    for key, value in saved.items():
        current: object = state.get(key)
        if isinstance(current, dict) and isinstance(value, dict):
            give(current, value)
        elif not isinstance(current, torch.Tensor) or not isinstance(value, torch.Tensor):
            state[key] = value
        # An integer would cut a number, a vector repeat it.
        elif current.shape == value.shape and torch.can_cast(value.dtype, current.dtype):
            with torch.no_grad():
                current.copy_(value)
        elif value.shape not in ((), current.shape):
            raise ValueError(f"{key} was {list(value.shape)}, and this is {list(current.shape)}")
        else:
            state[key] = value


def _named_as(current: Any, saved: Any) -> Any:
    """Takes the names of a model that ``torch.compile`` may have wrapped."""
    if not any(_COMPILED in str(name) for name in (*current, *saved)):
        return saved
    names = {name.replace(_COMPILED, ""): name for name in current}
    return {names.get(name.replace(_COMPILED, ""), name): saved[name] for name in saved}


def state_of(key: str, states: States) -> object:
    state = states[key]
    if isinstance(state, torch.nn.Module):
        return sharding.get_model_state_dict(state)
    if isinstance(state, Optimizer):
        return sharding.get_optimizer_state_dict(_model_of(key, states), state)
    return _state_dict(state)


def _model_of(key: str, states: States) -> torch.nn.Module:
    wanted = {id(each) for group in states[key].param_groups for each in group["params"]}
    for state in states.values():
        if isinstance(state, torch.nn.Module) and wanted <= {
            id(each) for each in state.parameters()
        }:
            return state
    raise ConfigError(f"{key} needs its model beside it, for the names of its parameters.")


def save_parts(state: object, folder: Path, group: ProcessGroup | None) -> None:
    writer = dcp.FileSystemWriter(folder)
    dcp.save(state, storage_writer=writer, process_group=group, no_dist=group is None)


def load_parts(
    key: str, states: States, folder: Path, group: ProcessGroup | None, only_plain: bool
) -> None:

    class Planner(dcp.DefaultLoadPlanner):  # type: ignore[misc]
        def load_bytes(self, read_item: object, value: io.BytesIO) -> None:
            torch.load(value, weights_only=only_plain)  # DCP would run any code
            value.seek(0)
            super().load_bytes(read_item, value)

    if only_plain:
        with Path(folder, METADATA).open("rb") as file:
            _Metadata(file, _known_classes()).load()
    loaded = state_of(key, states)
    reader = dcp.FileSystemReader(folder)
    dcp.load(
        loaded,
        storage_reader=reader,
        planner=Planner(),
        process_group=group,
        no_dist=group is None,
    )
    state = states[key]
    if isinstance(state, torch.nn.Module):
        sharding.set_model_state_dict(state, loaded)
    elif isinstance(state, Optimizer):
        sharding.set_optimizer_state_dict(_model_of(key, states), state, loaded)
    else:
        give(state, loaded)


class _Metadata(pickle.Unpickler):
    """Reads a list of parts, and refuses all classes but ``allowed``: DCP would load any pickle."""

    def __init__(self, file: IO[bytes], allowed: set[tuple[str, str]] | None = None) -> None:
        super().__init__(file)
        self._allowed = allowed
        self.classes = set[tuple[str, str]]()

    def find_class(self, module: str, name: str) -> object:
        named = (module.removesuffix("._local"), name)  # what Python 3.13 calls a path
        self.classes.add(named)
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if self._allowed is not None and not is_dtype and named not in self._allowed:
            raise pickle.UnpicklingError(f"it holds {module}.{name}")
        return super().find_class(module, name)


@cache
def _known_classes() -> set[tuple[str, str]]:
    with TemporaryDirectory() as folder, warnings.catch_warnings(action="ignore"):
        save_parts({"tensor": torch.zeros(1), "number": 1}, Path(folder), None)
        with Path(folder, METADATA).open("rb") as file:
            metadata = _Metadata(file)
            metadata.load()
    return metadata.classes


# all states --------------------------------------------------------------------------------------


def leaves(value: object, key: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict) and type(value) in (dict, OrderedDict):
        for name, each in value.items():
            if type(name) not in _PLAIN:
                yield key, name
            yield from leaves(each, f"{key}/{name}")
    elif isinstance(value, list | tuple) and type(value) in (list, tuple):
        for number, each in enumerate(value):
            yield from leaves(each, f"{key}/{number}")
    else:
        yield key, value


def outline(state: object, kinds: tuple[type, ...] = _PLAIN) -> str:
    """Tensors may differ between ranks, as with BatchNorm, so only their shapes and types are
    hashed.
    """
    values = [
        (key, getattr(leaf, "shape", leaf), getattr(leaf, "dtype", None))
        for key, leaf in leaves(state, "")
        if isinstance(leaf, kinds)
    ]
    return xxh3_64_hexdigest(repr(values).encode())


def check_alike(outlines: Sequence[Mapping[str, str]]) -> None:
    for key in sorted({key for outline in outlines for key in outline}):
        if len({outline.get(key) for outline in outlines}) > 1:
            raise ConfigError(
                f"save: {key} differs between the ranks, and rank 0's alone would be kept. Make "
                "DTensors of the parts of a tensor, or give what belongs to one rank to a writer."
            )


def not_plain(contents: Mapping[str, object]) -> str:
    """Describes a value that no restore would take, as its file may run any code; else ""."""
    for path, leaf in leaves(contents, ""):
        if type(leaf) in _PLAIN or isinstance(leaf, DTensor):
            continue
        file = io.BytesIO()
        try:
            torch.save(leaf, file)
            file.seek(0)
            problem = ", ".join(torch.serialization.get_unsafe_globals_in_checkpoint(file))
        except Exception as error:
            problem = f"what cannot be pickled ({error})"
        if problem:
            return f"{path[1:]} holds {problem}"
    return ""


class StateSnapshot:
    """Makes copies in the host's memory, by the stager of torch.distributed.checkpoint.

    Each copy reuses the buffers of the copy before: only one copy is in use at a time.
    """

    @cached_property
    def _stager(self) -> DefaultStager:
        on_gpu = torch.cuda.is_initialized()
        options = StagingOptions(
            use_pinned_memory=on_gpu,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=on_gpu,
        )
        return DefaultStager(options)

    def take(self, value: list[dict[str, object]]) -> list[dict[str, object]]:
        if any(map(_is_view_or_sparse, (leaf for _, leaf in leaves(value, "")))):
            return copy.deepcopy(value)  # the stager would copy the tensor below
        try:
            return list(self._stager.stage(value))
        # A tensor has another size than its buffer; torch 2.11 uses no stager twice.
        except (AssertionError, KeyError):
            del self._stager
            return list(self._stager.stage(value))


def _is_view_or_sparse(value: object) -> bool:
    return isinstance(value, torch.Tensor) and (
        value.layout is not torch.strided or value.is_quantized or value.is_conj() or value.is_neg()
    )


def hashes(states: States) -> dict[str, str]:
    """Hashes the parameters of models and optimizers, and the tensors of dicts. Buffers of a model
    may differ between ranks, as with BatchNorm.
    """
    result = {}
    for key, state in states.items():
        if isinstance(state, torch.nn.Module):
            state = dict(state.named_parameters())
        elif isinstance(state, Optimizer):  # each rank may have a part, as of FSDP1
            state = {"params": [group["params"] for group in state.param_groups]}
        tensors = leaves(state, key) if isinstance(state, dict) else ()
        for name, tensor in tensors:
            if _is_view_or_sparse(tensor) or isinstance(tensor, DTensor) or "running_" in name:
                continue
            if isinstance(tensor, torch.Tensor):
                data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
                result[name] = xxh3_64_hexdigest(data.numpy())
    return result
