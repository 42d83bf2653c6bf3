"""The random generators of a process, of Python, numpy and torch: their states, and their seeds."""

import random

import numpy as np
import torch

from datatrove_ckpt.common import JsonObject


def random_state() -> JsonObject:
    state = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    name, keys, *further = np.random.get_state(legacy=True)
    state["numpy"] = [name, torch.from_numpy(np.asarray(keys).astype("int64")), *further]
    return state


def set_random_state(state: JsonObject) -> None:
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        for device, each in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(each, device)
    if "numpy" in state:
        name, keys, *further = state["numpy"]
        np.random.set_state((name, keys.numpy().astype("uint32"), *further))


def seed_random(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
