"""Whether a loader that stopped goes on where it stopped: the samples of a run with stops against
those without.

The idea is the leakage check of data loader benchmarks: train in pieces, and look for samples that
two pieces share or that no piece has. Here the order counts, too, and so do the borders of the
batches and the types of the values.
"""

import pickle
from collections.abc import Mapping
from itertools import accumulate


def samples_of(batch):
    """The rows of a dict of columns, or the items of a list or an array."""
    if not isinstance(batch, Mapping):
        return list(batch)
    return [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]


def assert_resume_is_exact(make_loader, stops, *, epochs=1, samples=samples_of):
    """Asserts that a loader that stops and resumes gives the samples of one that does not, in the
    same batches. Returns the number of samples in each epoch.

    Each run is a training loop: a new loader, its state if there is one, then the rest of the
    epochs. The state comes from ``loader.state_dict()`` (or ``loader.dataset.state_dict()`` if the
    loader has none) and goes through pickle, as it would through a file. With more than one epoch,
    ``set_epoch`` of the loader, or else of its dataset, is called before each.

    Args:
        make_loader: makes a loader of the same data each time.
        stops: after how many batches to stop, counted over all epochs; or several numbers for a run
            that stops several times, each counted from the one before. At the end of an epoch, both
            its last batch and the time after it are tried.
        epochs: how many epochs a run has.
        samples: the samples of a batch.
    """
    whole = _in_pieces(make_loader, epochs, samples, ())
    batches = [sum(epoch == number for epoch, _ in whole) for number in range(epochs)]
    for stop in stops:
        numbers = (stop,) if isinstance(stop, int) else stop
        assert _in_pieces(make_loader, epochs, samples, numbers) == whole, numbers
        if sum(numbers) in [*accumulate(batches)][:-1]:
            found = _in_pieces(make_loader, epochs, samples, numbers, between=True)
            assert found == whole, f"{numbers}, between two epochs"
    return [sum(len(one) for epoch, one in whole if epoch == n) for n in range(epochs)]


def _in_pieces(make_loader, epochs, samples, stops, between=False):
    """The batches of a run that stops there, one process after the other.

    ``between``: the last state is taken when the epoch is over, and not at its last batch.
    """
    seen, state, first = [], None, 0
    for number, stop in enumerate([*stops, None]):
        loader = make_loader()
        stateful = loader if hasattr(loader, "state_dict") else loader.dataset
        if state is not None:
            stateful.load_state_dict(pickle.loads(state))
        to_the_end = between and number == len(stops) - 1
        taken = 0
        for epoch in range(first, epochs):
            if epochs > 1:
                (loader if hasattr(loader, "set_epoch") else loader.dataset).set_epoch(epoch)
            batches = iter(loader)
            while (taken != stop or to_the_end) and (batch := next(batches, None)) is not None:
                taken += 1
                seen.append((epoch, [_shown(sample) for sample in samples(batch)]))
            if taken == stop:
                first, state = epoch + to_the_end, pickle.dumps(stateful.state_dict())
                break
    return seen


def _shown(value):
    """The value as text that is equal only for equal values of the same types."""
    if hasattr(value, "tolist"):
        return f"{value.dtype} {value.tolist()!r}"
    if isinstance(value, Mapping):
        return str({key: _shown(item) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return str([_shown(item) for item in value])
    return f"{type(value).__name__} {value!r}"
