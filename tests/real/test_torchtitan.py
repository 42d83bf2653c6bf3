"""torchtitan's checkpoints keep the rows of a dataset: the dataloader of docs/trainers.md.

torchtitan's Trainer needs Triton, so that its loop is made here of what it is made of. Needs torch,
torchdata and torchtitan, which wants older ``datasets`` than the other tests:
``uv pip install -e .[torch] torchtitan``.
"""

import itertools
from functools import partial

import pytest
import torch
import torch.distributed as dist

from tests.pages import run_example
from tests.real.loops import assert_stops_change_nothing, write_rows

pytestmark = [
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore"),  # of torchtitan
]

ROWS = 48
BATCH = 8
STEPS = ROWS // BATCH  # in an epoch
STOPS = [2, STEPS, STEPS + 3, 2 * STEPS + 1, 3 * STEPS]


def train(folder, run, stop):
    """One process: it goes on until it has made ``stop`` steps. Returns batches and weights."""
    from torchtitan.components.checkpoint import CheckpointManager

    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Embedding(128, 3), torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = (
        run_example("torchtitan")["Rows"]
        .Config(dataset_path=folder)
        .build(dp_rank=0, dp_world_size=1, tokenizer=None, seq_len=1, local_batch_size=BATCH)
    )
    progress = {"step": torch.tensor(0)}
    manager = CheckpointManager.Config(enable=True, interval=1, last_save_model_only=False).build(
        dataloader=loader,
        model_parts=[model],
        optimizers=optimizer,
        lr_schedulers=torch.optim.lr_scheduler.ConstantLR(optimizer),
        states={"train_state": progress},
        sd_adapter=None,
        base_folder=str(run),
    )
    manager.load()
    batches = []
    step = int(progress["step"])
    for inputs, _ in itertools.islice(loader, stop - step):
        batches.append(inputs["input"].tolist())
        model(inputs["input"]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        progress["step"] += 1
        manager.save(int(progress["step"]))
    manager.close()
    return batches, model.state_dict()


def test_a_training_that_stops_in_any_epoch_is_that_of_no_stop(tmp_path):
    write_rows(tmp_path / "input", [{"text": str(number)} for number in range(ROWS)])
    folder = (tmp_path / "input").as_posix()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        whole = assert_stops_change_nothing(partial(train, folder), tmp_path, STOPS)
        rows = [bytes(row).decode() for batch in whole[-STEPS:] for row in batch]
        assert sorted(map(int, rows)) == list(range(ROWS))
    finally:
        dist.destroy_process_group()
