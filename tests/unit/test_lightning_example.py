"""The callback for Lightning of docs/trainers.md keeps the gradients of an unfinished step.

Lightning and torch are doubles here: ``tests/real/test_lightning.py`` has the real ones.
"""

import sys
from types import SimpleNamespace

import pytest

from tests.pages import run_example


class Weight:
    def __init__(self, grad=None):
        self.grad = grad
        self.device = "gpu"


class Gradient:
    def to(self, device):
        return (self, device)


class Module:
    def __init__(self, **weights):
        self.weights = weights

    def named_parameters(self):
        return self.weights.items()

    def get_parameter(self, key):
        return self.weights[key]


@pytest.fixture
def saves(monkeypatch):
    doubles = {
        "torch": {},
        "lightning": {"LightningDataModule": object, "Trainer": None},
        "lightning.pytorch": {},
        "lightning.pytorch.callbacks": {"Callback": object},
        "torchdata": {},
        "torchdata.stateful_dataloader": {"StatefulDataLoader": None},
        "datatrove_ckpt.torch.checkpoints": {"TrainingCheckpoints": None},
    }
    for name, values in doubles.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**values))
    return run_example("lightning")["Saves"]


@pytest.mark.parametrize("batches, kept", [(2, True), (1, False)])
def test_gradients_of_a_step_that_accumulates_are_in_the_checkpoint(saves, batches, kept):
    gradient = Gradient()
    checkpoint = {}
    trainer = SimpleNamespace(accumulate_grad_batches=batches)
    saves(None).on_save_checkpoint(trainer, Module(a=Weight(gradient), b=Weight()), checkpoint)
    after = saves(None)
    new = Module(a=Weight(), b=Weight())
    after.on_load_checkpoint(trainer, new, checkpoint)
    after.on_train_start(trainer, new)
    assert new.weights["a"].grad == ((gradient, "gpu") if kept else None)
    assert new.weights["b"].grad is None
