"""``datatrove-ckpt plan``: how often to save, from the measured cost of a save and the mean time between losses.

The model is that of ``checkpoint/interval.py``: a save takes C seconds, there is one every T seconds.

    overhead       C / T
    lost           T/2 + C on average, T + C at most, per loss: the time since the start of the last complete save

There the work stops during a save. Here it continues, so the overhead is that of the saving thread only, and
the true optimum is at most theirs. C is what every save costs again: each byte is written once whatever the interval,
so bytes do not count. Restarts cost the same at every interval and are left out. ``cli/run.py`` prints
the result. ``training_plan.py`` is for training.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from datatrove.io import DataFolder, get_datafolder

from datatrove_ckpt.checkpoint.interval import (
    MIRROR_TUNING,
    SYNC_TUNING,
    Seconds,
    Tuning,
    daly,
    efficiency,
    young,
)
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.formatting import byte_size, duration
from datatrove_ckpt.preflight.checks import (
    LARGE_GROUP,
    LARGE_OBJECT,
    REMOTE_SECONDS,
    SMALL_GROUP,
    SMALL_OBJECT,
    DiskCost,
    Quantiles,
    UploadCost,
    commits_each_write,
    file_system,
    measure_disk,
    measure_upload,
    probe_folder,
    within,
)
from datatrove_ckpt.runner import InferenceRunner

# Counted: on average 1.3 objects with their copies, a manifest, two listings, and three removals.
MIRROR_REQUESTS = 9
_LADDER = [step * 10**power for power in range(-2, 6) for step in (1, 3)]
# The model -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One interval, in seconds; shares are from 0 to 1. ``notes``: why this one is listed."""

    interval: float
    overhead: float
    lost_mean: float
    lost_most: float
    efficiency: float
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Table:
    """What a setting costs at several intervals.

    Attributes:
        setting: its name.
        cost: of one save, in seconds.
        best: the interval to use, in seconds, and ``best_low`` and ``best_high`` what it would be at the ends of the
            cost's spread.
    """

    setting: str
    cost: Quantiles
    mtbf: float
    young: float
    daly: float
    best: float
    best_low: float
    best_high: float
    rows: tuple[Row, ...]


def make_table(setting: str, cost: Quantiles, mtbf: float, now: Seconds | None, tuning: Tuning) -> Table:
    """The table of a setting whose present value is ``now``, in seconds (None: not set)."""
    # In two significant digits, and not shorter than ``auto`` ever is.
    costs = (cost.median, cost.low, cost.high)
    best, low, high = (max(float(f"{daly(seconds, mtbf):.2g}"), tuning.shortest) for seconds in costs)
    auto = tuning.interval([cost.median])
    notes: dict[float, list[str]] = {step: [] for step in _LADDER if best / 40 <= step <= best * 40}
    notes.setdefault(best, []).append("best")
    notes.setdefault(auto, []).append("auto" if now != "auto" else "auto, set now")
    if isinstance(now, int | float) and now > 0:
        notes.setdefault(float(now), []).append("set now")
    save = cost.median
    rows = tuple(
        Row(at, save / at, at / 2 + save, at + save, efficiency(at, save, mtbf), tuple(notes[at]))
        for at in sorted(notes)
    )
    return Table(setting, cost, mtbf, young(save, mtbf), daly(save, mtbf), best, low, high, rows)


def describe_table(table: Table) -> Iterator[str]:
    """The table as lines of text."""
    yield f"{table.setting}: a save costs {table.cost}; a loss every {duration(table.mtbf)}"
    yield f"  {'interval':>9} {'overhead':>9} {'lost: mean':>11} {'at most':>9} {'efficiency':>11}"
    for row in table.rows:
        shares = f"{f'{100 * row.overhead:.2g} %':>9} {duration(row.lost_mean):>11} {duration(row.lost_most):>9}"
        line = f"  {duration(row.interval):>9} {shares} {100 * row.efficiency:>9.3f} %  {', '.join(row.notes)}"
        yield line.rstrip()
    yield (
        f"  best: {duration(table.young)} (Young), {duration(table.daly)} (Daly); {duration(table.best_low)} to "
        f"{duration(table.best_high)} within the spread of what a save costs"
    )


# The measurement -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Advice:
    """What was measured for one runner, and the tables that follow from it."""

    place: str
    folder: str
    file_system: str
    disk: tuple[DiskCost, ...]
    remote: str | None
    uploads: tuple[UploadCost, ...]
    tables: tuple[Table, ...]
    notes: tuple[str, ...]


def advise(place: str, step: InferenceRunner, mtbf: float) -> Advice:
    """Measures what saving costs for one runner, and computes the tables.

    Raises:
        ConfigError: the step has no checkpoints.
        StorageFailed, RemoteFailed: a measurement failed.
    """
    if step.checkpoints_local_dir is None:
        raise ConfigError(f"{place}: checkpoints_local_dir is not set, so there is nothing to save.")
    folder = step.checkpoints_root
    with probe_folder(folder) as probe:
        disk = (measure_disk(probe, SMALL_GROUP, seconds=2.0), measure_disk(probe, LARGE_GROUP, seconds=3.0))
    tables = [make_table("sync_seconds", disk[0].sync, mtbf, step.sync_seconds, SYNC_TUNING)]
    remote, notes = _remote(step)
    uploads: tuple[UploadCost, ...] = ()
    if remote is not None:
        uploads = within(2 * REMOTE_SECONDS, partial(_measure_uploads, remote), remote.resolve_paths(""))
        one = uploads[0].upload
        n = MIRROR_REQUESTS
        cost = Quantiles(n * one.median, n * one.low, n * one.high, one.number)
        now = step.mirror_seconds if step.checkpoints_remote_dir else None
        tables.append(make_table("mirror_seconds", cost, mtbf, now, MIRROR_TUNING))
    url = remote.resolve_paths("") if remote is not None else None
    kind = file_system(folder).name
    return Advice(place, str(folder), kind, disk, url, uploads, tuple(tables), tuple(notes))


def _remote(step: InferenceRunner) -> tuple[DataFolder | None, list[str]]:
    """The remote folder to measure, if there is one, and notes about it."""
    url, output = step.checkpoints_remote_dir, step.output_writer.output_folder
    if url is not None:
        return get_datafolder(url), []
    if output.is_local():
        return None, ["A node that is lost with its disk loses all of this: set checkpoints_remote_dir to keep a copy."]
    if commits_each_write(output):
        return None, [f"{output.resolve_paths('')} was not measured: each upload would be a commit in its history."]
    return output, ["There is no mirror: set checkpoints_remote_dir to have one. The output's folder was measured."]


def _measure_uploads(remote: DataFolder) -> tuple[UploadCost, UploadCost]:
    return measure_upload(remote, SMALL_OBJECT, seconds=5.0), measure_upload(remote, LARGE_OBJECT, seconds=10.0)


def describe(advice: Advice) -> Iterator[str]:
    """What was measured, the tables, and the settings to use, as lines of text."""
    yield f"{advice.place} checkpoints: {advice.folder}, {advice.file_system}"
    for disk in advice.disk:
        yield f"  {byte_size(disk.size):>6}  write {disk.write}"
        yield f"  {'':>6}  sync  {disk.sync}"
    if advice.remote is not None:
        yield f"remote: {advice.remote}"
        for upload in advice.uploads:
            yield f"  {byte_size(upload.size):>6}  upload {upload.upload}"
        large = advice.uploads[-1]
        yield f"  more than {byte_size(large.size / large.upload.median)} of new answers per second would fall behind"
        yield f"  a save takes about {MIRROR_REQUESTS} small requests; each byte is sent once, whatever the interval"
    for table in advice.tables:
        yield ""
        yield from describe_table(table)
    yield ""
    yield "settings for this machine:"
    for table in advice.tables:
        yield f"  {table.setting}: {table.best:g}"
    yield from advice.notes
