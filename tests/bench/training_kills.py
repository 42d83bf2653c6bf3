"""Kills and signals at random moments of a training: ``python -m tests.bench.training_kills
[--stops 50] [--steps 400] [--seed 0] [--ways ddp,fsdp]``.

A transformer with BatchNorm, AMP with a gradient scaler, EMA and a scheduler, as DDP and as FSDP2,
on 2 ranks (gloo, CPU) with 2 workers each. Half of the stops hit a model of each kind. A stop is
one of: SIGKILL to all processes, SIGKILL to one rank, SIGTERM or SIGINT to all processes with the
workers. It comes during the start, the restore, or the steps. In the end the losses of all steps,
in each rank, and the hash of all states must be those of a run that nothing interrupted, and so
must metrics.csv.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from loguru import logger
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchdata.stateful_dataloader import StatefulDataLoader

from datatrove_ckpt.inference.servers.server import free_port
from datatrove_ckpt.readers import JsonlReader
from datatrove_ckpt.torch import Best, EverySteps, Last, ReaderDataset, TrainingCheckpoints

RANKS = 2
WORKERS = 2
BATCH = 4
LENGTH = 24
WIDTH = 32
STOPS = ("kill all", "kill one", "SIGTERM", "SIGINT")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(128, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, 128)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        found = self.body(self.embed(tokens), mask=mask, is_causal=True)
        return self.head(self.norm(found.flatten(0, 1)))


class Ema:
    """A moving average of the parameters, in parts where the parameters are."""

    def __init__(self, model):
        self._shadow = {name: each.detach().clone() for name, each in model.named_parameters()}

    def update(self, model):
        for name, each in model.named_parameters():
            self._shadow[name].lerp_(each.detach(), 0.05)

    def state_dict(self):
        return {"shadow": self._shadow}

    def load_state_dict(self, state):
        for name, each in state["shadow"].items():
            self._shadow[name].copy_(each)


def tokens(document):
    return torch.tensor(list(document.text.encode()[:LENGTH].ljust(LENGTH))) % 128


def train(rank, port, way, documents, run, steps):
    os.setpgid(0, 0)  # a signal to the group is for the workers, too
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's "&" ignores it
    logger.remove()
    torch.set_num_threads(1)
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    model = Model()
    if way == "fsdp":
        for layer in model.body.layers:
            fully_shard(layer)
        fully_shard(model)
    else:
        model = nn.parallel.DistributedDataParallel(model)
    torch.manual_seed(rank)  # each rank has dropout of its own
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=20)
    ema = Ema(model)
    dataset = ReaderDataset(
        JsonlReader(documents),
        rank,
        RANKS,
        shuffle_seed=1,
        batch_size=BATCH,
        transform=tokens,
        even="drop",
    )
    loader = StatefulDataLoader(
        dataset, batch_size=BATCH, num_workers=WORKERS, multiprocessing_context="fork"
    )
    states = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "ema": ema}
    states |= {"scaler": scaler, "config": {"width": WIDTH}}
    with TrainingCheckpoints(run, save=EverySteps(5), keep=Last(2) | Best("loss")) as checkpoints:
        step = checkpoints.restore(loader=loader, **states) or 0
        epoch = checkpoints.epoch
        while step < steps:
            dataset.set_epoch(epoch)
            for batch in loader:
                loss = make_step(model, optimizer, scaler, batch)
                scheduler.step()
                ema.update(model)
                share_statistics(model)
                step += 1
                note(Path(run, f"losses-{rank}.jsonl"), [step, loss, int(batch.sum())])
                checkpoints.log(step, loss=loss, scale=scaler.get_scale())
                checkpoints.maybe_save(step, loader=loader, metrics={"loss": loss}, **states)
                if step == steps:
                    break
            epoch += 1
        checkpoints.save(step, loader=loader, metrics={"loss": loss}, **states)
    found = digest([states["model"], optimizer, scheduler, ema, scaler])
    Path(run, f"hash-{rank}").write_text(found)
    dist.destroy_process_group()


def make_step(model, optimizer, scaler, batch):
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.cross_entropy(model(batch[:, :-1]), batch[:, 1:].flatten())
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss.item()


def share_statistics(model):
    """Gives all ranks the mean of BatchNorm's statistics, which FSDP leaves to each rank."""
    for each in model.buffers():
        if each.is_floating_point():
            dist.all_reduce(each)
            each.div_(RANKS)


def note(path, values):
    with path.open("a") as file:
        file.write(json.dumps(values) + "\n")


def digest(states):
    """A hash of all tensors and numbers; of the parts that this rank has."""
    found = hashlib.sha256()

    def add(value):
        if isinstance(value, DTensor):
            value = value.to_local()
        if isinstance(value, torch.Tensor):
            found.update(
                value.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
            )
        elif isinstance(value, dict):
            for key, each in value.items():
                found.update(str(key).encode())
                add(each)
        elif isinstance(value, list | tuple):
            for each in value:
                add(each)
        else:
            found.update(repr(value).encode())

    for state in states:
        add(state.state_dict())
    return found.hexdigest()


# the driver --------------------------------------------------------------------------------------


def start(way, documents, run, steps):
    port = free_port()
    os.environ.setdefault("PYTHONPATH", str(Path.cwd()))  # or the server of forks preloads nothing
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__spec__.name])
    run.mkdir(exist_ok=True)
    processes = []
    for rank in range(RANKS):
        arguments = (rank, port, way, documents, str(run), steps)
        processes.append(context.Process(target=train, args=arguments))
        processes[-1].start()
    return processes


def end(processes, kind, dice):
    number = {"SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT}.get(kind, signal.SIGKILL)
    chosen = list(processes)
    if kind == "kill one":
        chosen = [dice.choice(processes)]
    for process in chosen:
        send(process, number)
    if kind.startswith("kill"):
        chosen[0].join()
    deadline = time.monotonic() + 60.0
    for process in processes:
        # The launcher ends the other ranks when one has died.
        process.join(0.5 if kind == "kill one" else max(0.1, deadline - time.monotonic()))
        send(process, signal.SIGKILL)
        process.join()


def send(process, number):
    assert process.pid is not None
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:  # before it made its group, or after its end
        with suppress(ProcessLookupError):
            if process.is_alive():
                os.kill(process.pid, number)


def losses_of(run, rank):
    """The losses by step, and how many steps were made again. Made again, a loss must be the
    same.
    """
    found = {}
    again = 0
    path = run / f"losses-{rank}.jsonl"
    if not path.exists():
        return {}, 0
    for line in path.read_bytes().splitlines(keepends=True):
        if not line.endswith(b"\n"):
            continue
        step, *values = json.loads(line)
        again += step in found
        if found.setdefault(step, values) != values:
            raise SystemExit(f"step {step} of rank {rank}: {values}, before {found[step]}")
    return found, again


def whole(way, documents, run, steps):
    for process in start(way, documents, run, steps):
        process.join(600)
        if process.exitcode != 0:
            raise SystemExit(f"{way}: a run that nothing interrupts ends with {process.exitcode}")


def try_way(way, documents, folder, options):
    dice = random.Random(f"{options.seed} {way}")
    expected = folder / f"{way}-whole"
    whole(way, documents, expected, options.steps)
    run = folder / f"{way}-stopped"
    kinds = Counter()
    saved = []
    stops = options.stops // len(options.ways)
    for number in range(stops):
        before = len(losses_of(run, 0)[0])
        processes = start(way, documents, run, options.steps)
        if dice.random() < 0.7:  # once it makes steps; else during the start
            wanted = max(before, int(0.9 * options.steps * number / stops))
            until = time.monotonic() + 300.0
            while len(losses_of(run, 0)[0]) <= wanted and time.monotonic() < until:
                time.sleep(0.02)
            time.sleep(dice.random() * 0.8)
        else:
            time.sleep(dice.random() * 6.0)
        kind = STOPS[number % len(STOPS)]
        kinds[kind] += 1
        end(processes, kind, dice)
        steps = sorted(path.name for path in run.glob("step-*"))
        saved.append(int(steps[-1].split("-")[1]) if steps else 0)
        print(f"{way} {number + 1}: {kind}, newest step {saved[-1]}", flush=True)
        if saved[-1] >= options.steps:
            raise SystemExit("The training ended before the last stop: give more --steps.")
    whole(way, documents, run, options.steps)
    again = 0
    for rank in range(RANKS):
        found, again = losses_of(run, rank)
        if found != losses_of(expected, rank)[0]:
            raise SystemExit(f"{way}: the losses of rank {rank} differ")
        name = f"hash-{rank}"
        if (run / name).read_text() != (expected / name).read_text():
            raise SystemExit(f"{way}: the states of rank {rank} differ")
    if (run / "metrics.csv").read_text() != (expected / "metrics.csv").read_text():
        raise SystemExit(f"{way}: metrics.csv differs")
    made = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    print(
        f"{way}: {stops} stops ({made}); {options.steps} losses, states and "
        f"metrics.csv of {RANKS} ranks are equal; {again} steps were made again"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stops", type=int, default=50)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ways", type=lambda text: text.split(","), default=["ddp", "fsdp"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        documents = folder / "documents"
        documents.mkdir()
        dice = random.Random(0)
        for file in range(2):
            texts = ["".join(dice.choices("abcdefgh ", k=LENGTH)) for _ in range(100)]
            lines = [json.dumps({"id": f"{file}-{n}", "text": t}) for n, t in enumerate(texts)]
            (documents / f"{file}.jsonl").write_text("\n".join(lines) + "\n")
        os.environ["DATATROVE_CKPT_CACHE"] = str(folder / "cache")
        for way in options.ways:
            try_way(way, str(documents), folder, options)


if __name__ == "__main__":
    main()
