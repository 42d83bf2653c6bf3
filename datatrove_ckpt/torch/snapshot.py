"""Copies states and random generators into the host's memory, while the training waits."""

from __future__ import annotations

import copy
import random
from typing import TypeVar

import numpy as np
import torch

# Not DefaultStager, which in torch 2.11 can be used only once.
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.tensor import DTensor
from xxhash import xxh3_64_hexdigest

from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.torch.sharded import States, leaves

_T = TypeVar("_T")


class StateSnapshot:
    """Copies in the host's memory, by the stager of torch.distributed.checkpoint.

    A copy uses the buffers of the one before again, so only one is in use at a time.
    """

    def __init__(self) -> None:
        self._stager = _new_stager()

    def take(self, value: _T) -> _T:
        if any(map(_is_view_or_sparse, (leaf for _, leaf in leaves(value, "")))):
            return copy.deepcopy(value)  # the stager would copy what lies below
        on_gpu = torch.cuda.is_initialized()
        staged: _T
        try:
            staged = self._stager.stage(value, non_blocking=on_gpu)
        except AssertionError:  # a tensor has another size than its buffer
            self._stager = _new_stager()
            staged = self._stager.stage(value, non_blocking=on_gpu)
        if on_gpu:
            torch.cuda.synchronize()
        return staged


def _new_stager() -> StateDictStager:
    return StateDictStager(pin_memory=torch.cuda.is_available())


def _is_view_or_sparse(value: object) -> bool:
    return isinstance(value, torch.Tensor) and (
        value.layout is not torch.strided or value.is_quantized or value.is_conj() or value.is_neg()
    )


def hashes(states: States) -> dict[str, str]:
    """Hashes the parameters of models, and the tensors of dicts. Buffers of a model may differ
    between ranks, as those of BatchNorm.
    """
    found = {}
    for key, state in states.items():
        if isinstance(state, torch.nn.Module):
            state = dict(state.named_parameters())
        tensors = leaves(state, key) if isinstance(state, dict) else ()
        for name, tensor in tensors:
            if _is_view_or_sparse(tensor) or isinstance(tensor, DTensor) or "running_" in name:
                continue
            if isinstance(tensor, torch.Tensor):
                data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
                found[name] = xxh3_64_hexdigest(data.numpy())
    return found


def random_state() -> JsonObject:
    version, numbers, gauss = random.getstate()
    state = {"python": [version, list(numbers), gauss], "torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    name, keys, *others = np.random.get_state(legacy=True)
    state["numpy"] = [name, torch.from_numpy(np.asarray(keys).astype("int64")), *others]
    return state


def set_random_state(state: JsonObject) -> None:
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        for device, each in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(each, device)
    if "numpy" in state:
        name, keys, *others = state["numpy"]
        np.random.set_state((name, keys.numpy().astype("uint32"), *others))
