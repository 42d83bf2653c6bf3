"""Whether a loader that stopped goes on where it stopped: the samples of a run with stops against
those without.

The idea is the leakage check of data loader benchmarks: train in pieces, and look for samples that
two pieces share or that no piece has. Here the order counts, too, and so do the borders of the
batches.
"""

from __future__ import annotations

import pickle
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate, groupby

import xxhash

_SHOWN = 60  # characters of a sample in a message
_NAMED = 5  # samples that a message names; it counts the others


@dataclass(frozen=True)
class ResumeReport:
    """What was tried.

    Attributes:
        samples: number of samples in each epoch of the run without stops.
        batches: number of batches in each epoch of the run without stops.
        stops: the stops of each resumed run: numbers of batches, each counted from the stop before
            it.
    """

    samples: list[int] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    stops: list[tuple[int, ...]] = field(default_factory=list)

    def __str__(self):
        return (
            f"{len(self.stops)} resumed runs of {len(self.samples)} epochs with {sum(self.samples)} samples in "
            f"{sum(self.batches)} batches: each as the run without stops"
        )


def samples_of(batch):
    """The samples of a batch, as torch's and Hugging Face's default collate functions make it.

    A dict of columns of one length, and a list of arrays of one length, are split into rows, a list
    into its items, an array along its first dimension. Anything else is one sample.
    """
    if isinstance(batch, Mapping):
        columns = list(batch.values())
    else:
        columns = batch
    if isinstance(columns, list | tuple):
        lengths = {_length(column) for column in columns}
        is_table = isinstance(batch, Mapping) or all(hasattr(column, "shape") for column in columns)
        if columns and is_table and len(lengths) == 1 and lengths != {None}:
            rows = zip(*columns, strict=True)
            if isinstance(batch, Mapping):
                return [dict(zip(batch, row, strict=True)) for row in rows]
            return list(rows)
        if isinstance(batch, Mapping):
            return [batch]
        return list(columns)
    if _length(batch) is not None:
        return list(batch)
    return [batch]


def assert_resume_is_exact(make_loader, stops=None, *, epochs=1, samples=samples_of):
    """Asserts that a loader that stops and resumes gives the samples of one that does not, in the
    same batches.

    Each run is a training loop: a new loader, its state if there is one, then the rest of the
    epochs. The state comes from ``loader.state_dict()`` (or ``loader.dataset.state_dict()`` if the
    loader has none) and goes through pickle, as it would through a file. With more than one epoch,
    ``set_epoch`` of the loader, or else of its dataset and its sampler, is called before each.

    Args:
        make_loader: makes a loader of the same data each time: a StatefulDataLoader, a DataLoader,
            a dataset, a reader of any library: anything that can be iterated and has ``state_dict``
                and ``load_state_dict``.
        stops: after how many batches to stop, counted over all epochs; or several numbers for a run
            that stops several times, each counted from the one before. None: after the first, in
            the middle, after the last batch of each epoch and one batch later. At the end of an
            epoch, both its last batch and the time after it are tried.
        epochs: how many epochs a run has.
        samples: the samples of a batch. Each is compared by its values and their types: the dtype
            of arrays and tensors, and the classes of plain values and containers.

    Raises:
        AssertionError: a resumed run differs. The message names the stop, and the samples that were
            seen twice, skipped or moved, or the first one that has other types.
        TypeError: neither the loader nor its dataset has ``state_dict`` and ``load_state_dict``.
        ValueError: a stop lies behind the last batch, or there is no batch at all.
    """
    trial = _Trial(make_loader, epochs, samples)
    whole = list(trial.run(None, 0))
    if not whole:
        raise ValueError("The loader gave no batch. Nothing can be compared.")
    report = ResumeReport([0] * epochs, [0] * epochs)
    for epoch, names in whole:
        report.samples[epoch] += len(names)
        report.batches[epoch] += 1
    ends = [*accumulate(report.batches)][:-1]  # of epochs that another one follows
    if stops is None:
        stops = _default_stops(report.batches)
    for stop in stops:
        numbers = (stop,) if isinstance(stop, int) else tuple(stop)
        last = sum(numbers)
        if min(numbers, default=-1) < 0 or last > len(whole):
            raise ValueError(
                f"stops must lie from 0 to {len(whole)}, the number of batches, not {stop!r}."
            )
        _compare(whole, trial.in_pieces(numbers, False), numbers, False)
        report.stops.append(numbers)
        if last > 0 and last in ends:
            _compare(whole, trial.in_pieces(numbers, True), numbers, True)
            report.stops.append(numbers)
    return report


class _Trial:
    """Runs of one loader."""

    def __init__(self, make_loader, epochs, samples):
        self.make_loader = make_loader
        self.epochs = epochs
        self.samples = samples
        self.state = None

    def run(self, stop, first, between=False):
        """The batches of one process: all, or ``stop`` of them. Keeps the state at the stop.

        ``between``: the state is taken when the epoch is over, and not at its last batch.
        """
        loader = self.make_loader()
        stateful = loader
        if not hasattr(loader, "state_dict"):
            stateful = getattr(loader, "dataset", None)
        if not hasattr(stateful, "state_dict") or not hasattr(stateful, "load_state_dict"):
            raise TypeError(
                f"{type(loader).__name__} has no state_dict and load_state_dict, and nor has its dataset."
            )
        if self.state is not None:
            stateful.load_state_dict(pickle.loads(self.state[1]))
        taken = 0
        for epoch in range(first, self.epochs):
            if self.epochs > 1:
                _set_epoch(loader, epoch)
            batches = iter(())
            if stop != 0 or between:  # no iterator for a state that is taken before the first batch
                batches = iter(loader)
            while taken != stop or between:
                batch = next(batches, None)
                if batch is None:
                    break
                taken += 1
                yield (
                    epoch,
                    tuple(
                        (name_of(sample), sys.intern(_types(sample)))
                        for sample in self.samples(batch)
                    ),
                )
            if taken == stop:
                self.state = epoch + between, pickle.dumps(stateful.state_dict())
                return

    def in_pieces(self, stops, between):
        """The batches of a run that stops there, one process after the other."""
        self.state = None
        seen = []
        for number, stop in enumerate([*stops, None]):
            first = 0
            if self.state is not None:
                first = self.state[0]
            seen += self.run(stop, first, between and number == len(stops) - 1)
        return seen


def name_of(sample):
    """A sample as text that is equal only for equal values: what a message shows of it, and a hash
    of the rest.
    """
    text = repr(_plain(sample))
    if len(text) <= _SHOWN:
        return text
    return f"{text[:_SHOWN]}... #{xxhash.xxh3_64_hexdigest(text.encode())}"


def _types(value):
    """The dtype of an array or tensor, else the class, with the types of its items.

    Runs of one type are one.
    """
    if hasattr(value, "dtype"):
        return str(value.dtype)
    name = type(value).__name__
    if isinstance(value, Mapping):
        return f"{name}{{{', '.join(f'{key!r}: {_types(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple) and value:
        return f"{name}[{', '.join(kind for kind, _ in groupby(map(_types, value)))}]"
    return name


def _plain(value):
    """The values of tensors, arrays and their containers, without their types and devices."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _length(value):
    """The length of a column, or None for anything else."""
    shape = getattr(value, "shape", None)
    if shape is not None:
        if len(shape):
            return int(shape[0])
        return None
    if isinstance(value, list | tuple):
        return len(value)
    return None


def _set_epoch(loader, epoch):
    if hasattr(loader, "set_epoch"):
        loader.set_epoch(epoch)
        return
    for name in ("dataset", "sampler"):
        part = getattr(loader, name, None)
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)


def _default_stops(batches):
    stops = set()
    before = 0
    for count in batches:
        stops |= {before + 1, before + max(count // 2, 1), before + count}
        before += count
    return sorted(stop for stop in stops if stop <= before)


def _compare(whole, seen, stops, between):
    """Raises an AssertionError that says how they differ."""
    if seen == whole:
        return
    wanted = _counts(whole)
    got = _counts(seen)
    where = f"{' and then '.join(map(str, stops))} batches"
    if between:
        where += ", between two epochs,"
    lines = [f"Stopped after {where} the loader did not go on where it had stopped:"]
    for what, more in (("seen too often", got - wanted), ("skipped", wanted - got)):
        for epoch in sorted({epoch for epoch, _ in more}):
            these = {name: count for (at, name), count in more.items() if at == epoch}
            named = ", ".join(list(these)[:_NAMED])
            if len(these) > _NAMED:
                named += ", ..."
            lines.append(f"  {what} in epoch {epoch}: {sum(these.values())} samples: {named}")
    if len(lines) == 1:
        lines.append("  " + _where_they_part(whole, seen))
    raise AssertionError("\n".join(lines))


def _counts(batches):
    return Counter((epoch, name) for epoch, names in batches for name, _ in names)


def _where_they_part(whole, seen):
    """For runs with the same samples."""
    flat = [[name for _, names in batches for name in names] for batches in (whole, seen)]
    for index, (wanted, got) in enumerate(zip(*flat, strict=True)):
        if wanted[0] != got[0]:
            return f"the same samples in another order: sample {index} is {got[0]}, and without a stop {wanted[0]}"
    for index, (wanted, got) in enumerate(zip(*flat, strict=True)):
        if wanted != got:
            return f"the same values in other types: sample {index}, {got[0]}, is {got[1]}, and without a stop {wanted[1]}"
    index = next(i for i, pair in enumerate(zip(whole, seen, strict=False)) if pair[0] != pair[1])
    sizes = len(seen[index][1]), len(whole[index][1])
    return f"the same samples in other batches: batch {index} has {sizes[0]}, and without a stop {sizes[1]}"
