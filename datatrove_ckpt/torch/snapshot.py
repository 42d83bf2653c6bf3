"""Copies states and random generators into the host's memory, while the training waits."""

from __future__ import annotations

import copy
import random
import sys
from collections import OrderedDict
from typing import Any, TypeVar

import torch

from datatrove_ckpt.common import JsonObject

_T = TypeVar("_T")


class StateSnapshot:
    """Copies in the host's memory.

    A copy uses the buffers of the one before again, so only one is in use at a time.
    """

    def __init__(self) -> None:
        self._old: dict[int, torch.Tensor] = {}  # by number, because states keep their order
        self._new: dict[int, torch.Tensor] = {}
        self._same: dict[object, torch.Tensor] = {}
        self._devices: set[torch.device] = set()

    def take(self, value: _T) -> _T:
        self._old = self._new
        self._new = {}
        self._same = {}
        copied: _T = self._copy(value)
        for device in self._devices:
            torch.cuda.synchronize(device)
        self._same.clear()
        return copied

    def _copy(self, value: Any) -> Any:  # of the same type
        if isinstance(value, torch.Tensor):
            return self._copy_tensor(value.detach())
        if type(value) in (dict, OrderedDict):
            items = type(value)((name, self._copy(each)) for name, each in value.items())
            if hasattr(value, "_metadata"):  # of a module's state
                items._metadata = copy.deepcopy(value._metadata)
            return items
        if type(value) in (list, tuple):
            return type(value)(map(self._copy, value))
        return copy.deepcopy(value)

    def _copy_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if (
            type(tensor) is not torch.Tensor
            or tensor.layout is not torch.strided
            or tensor.is_quantized
        ):
            return copy.deepcopy(tensor).cpu()
        view = tensor.dtype, tensor.is_conj(), tensor.is_neg()
        # Tied weights.
        same = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), view)
        if tensor.numel() and same in self._same:
            return self._same[same]
        number = len(self._new)
        buffer = self._old.pop(number, None)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        if tensor.is_cuda:
            self._devices.add(tensor.device)
        self._new[number] = self._same[same] = buffer.copy_(tensor, non_blocking=tensor.is_cuda)
        return buffer


def random_state() -> JsonObject:
    version, numbers, gauss = random.getstate()
    state = {"python": [version, list(numbers), gauss], "torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:
        import numpy as np

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
        import numpy as np

        name, keys, *others = state["numpy"]
        np.random.set_state((name, keys.numpy().astype("uint32"), *others))
