"""Rows of a training: a dataset with some of its calls, and the states of its ranks as one."""

from datatrove_ckpt.torch.dataset import ReaderDataset
from datatrove_ckpt.torch.states import (
    check_snapshots,
    find_states,
    is_ours,
    load_file,
    merge_all,
    sealed,
)


def rows_of(
    reader,
    rank=0,
    ranks=1,
    *,
    seed=None,
    window="128MB",
    columns=None,
    function=None,
    drop_last=False,
    batch_size=None,
):
    rows = ReaderDataset(reader).shard(ranks, rank, drop_last=drop_last, batch_size=batch_size)
    if seed is not None:
        rows = rows.shuffle(seed, window)
    if columns is not None:
        rows = rows.select_columns(columns)
    if function is not None:
        rows = rows.map(function)
    return rows


def merge(states):
    """What ``restore`` makes of the states of all ranks."""
    loaded = [load_file(state) for state in states]
    check_snapshots(loaded)
    return sealed(merge_all(list(find_states(loaded, is_ours))))
