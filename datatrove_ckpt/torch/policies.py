"""Policies of ``TrainingCheckpoints`` as values: when a training saves, and which steps stay.

A class of your own is a subclass of ``SavePolicy`` or ``KeepPolicy``.

``young``, ``daly`` and ``efficiency`` know the MTBF: the mean of M seconds between two losses of
all unsaved work. A save stops the work for C seconds.
"""

import math
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from loguru import logger

from datatrove_ckpt.common.setting_types import (
    Count,
    CountFromZero,
    IntervalSeconds,
    Positive,
    check,
)
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.torch.step_folder import StepName

StepMetrics = Mapping[StepName, Mapping[str, float | None]]
"""The metrics of the steps."""

_MTBF_SECONDS = 6 * 3600.0


def daly(save_cost: float, mtbf: float) -> float:
    """Returns the best seconds of work between two saves: sqrt(2CM) * (1 + sqrt(C/2M)/3 + C/18M) -
    C, or M if C >= 2M.

    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS
    22(3), 2006.
    """
    if save_cost >= 2 * mtbf:
        return mtbf
    x = save_cost / (2 * mtbf)
    return math.sqrt(2 * save_cost * mtbf) * (1 + math.sqrt(x) / 3 + x / 9) - save_cost


@dataclass(frozen=True)
class Moment:
    """The end of a step, at which a policy decides.

    Attributes:
        seconds: seconds since the last save. Ranks agree on them a few times a second; otherwise,
            and while a save is written, they are -inf.
        pause_seconds: how long the last save stopped the training; 0: none was timed.
        epoch_ended: one of the ranks had the last batch. Known beside ``EveryEpoch`` only.
        stopped_seconds: how long all saves since the start or restore stopped the training.
        metrics: the metrics of this step, in rank 0 only.
        saved: the metrics of the saved steps.
    """

    step: int
    last_step: int = 0
    seconds: float = -math.inf
    pause_seconds: float = 0.0
    write_seconds: float = 0.0
    epoch_ended: bool = False
    stopped_seconds: float = 0.0
    run_seconds: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    saved: StepMetrics = field(default_factory=dict)


class Policy:
    def __post_init__(self) -> None:
        check(type(self), vars(self))

    @property
    def parts(self) -> tuple[object, ...]:
        return tuple(getattr(self, "_parts", (self,)))

    def __or__(self, other: "Policy") -> "AnyOf":
        return AnyOf((*self.parts, *other.parts))


class SavePolicy(Policy):
    """Decides when to save. ``a | b`` saves when one of them does.

    While ``moment.seconds`` is finite, all ranks save if a save is due in one rank. Otherwise a
    subclass decides by the moment alone: by a clock or a number of its own, one rank would save,
    and wait for the others for ever.
    """

    def is_due(self, moment: Moment) -> bool:
        raise NotImplementedError


class KeepPolicy(Policy):
    """Chooses the steps that stay. ``a | b`` keeps the steps of both. The newest step always
    stays.
    """

    def kept(self, metrics: StepMetrics) -> set[StepName]:
        raise NotImplementedError


class AnyOf(SavePolicy, KeepPolicy):
    def __init__(self, parts: tuple[Any, ...]) -> None:
        self._parts = parts

    def is_due(self, moment: Moment) -> bool:
        return any(part.is_due(moment) for part in self._parts)

    def kept(self, metrics: StepMetrics) -> set[StepName]:
        return set[StepName]().union(*(part.kept(metrics) for part in self._parts))


def check_policy(
    setting: str, policy: object, kind: type[SavePolicy] | type[KeepPolicy], example: str
) -> None:
    for part in policy.parts if isinstance(policy, Policy) else (policy,):
        if part is not None and not isinstance(part, kind):
            raise ConfigError(
                f"{part!r} is not a policy. Write {setting}={example}, or several with |.",
                setting=setting,
            )


@dataclass(frozen=True)
class EverySteps(SavePolicy):
    """Saves at multiples of ``steps``, or at the first step after one that the loop skips."""

    steps: Count

    def is_due(self, moment: Moment) -> bool:
        return moment.step // self.steps > moment.last_step // self.steps


@dataclass(frozen=True)
class EverySeconds(SavePolicy):
    """Saves when ``seconds`` have passed since the last save.

    "auto": the first time after a minute, then Daly's interval, from the measured pause and
    ``mtbf_seconds``, the mean time between failures of the whole job (None: six hours).
    """

    seconds: IntervalSeconds = "auto"
    mtbf_seconds: Positive | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mtbf_seconds is not None and self.seconds != "auto":
            raise ConfigError('mtbf_seconds: belongs to "auto", and the seconds are fixed.')

    def is_due(self, moment: Moment) -> bool:
        if self.seconds != "auto":
            return moment.seconds >= self.seconds
        if not moment.pause_seconds:
            return moment.seconds >= 60.0
        interval = daly(moment.pause_seconds, self.mtbf_seconds or _MTBF_SECONDS)
        return moment.seconds >= max(interval, moment.write_seconds)


@dataclass(frozen=True)
class EveryEpoch(SavePolicy):
    """Saves at the end of each epoch: after its last batch, which the loader of a ``ReaderDataset``
    knows; with other loaders after the first batch of the next epoch.
    """

    def is_due(self, moment: Moment) -> bool:
        return moment.epoch_ended


@dataclass(frozen=True)
class Overhead(SavePolicy):
    """Saves as often as possible while saves stop the training for at most ``share`` of its time
    (0.035: 3.5 %, as CheckFreq); the first time at once, to know how long a save takes.
    """

    share: Positive

    def is_due(self, moment: Moment) -> bool:
        stopped = moment.stopped_seconds + moment.pause_seconds
        run = moment.run_seconds + moment.pause_seconds
        return moment.seconds >= 0 and stopped <= self.share * run


@dataclass
class WhenFailing(SavePolicy):
    """Saves each ``every_seconds`` while a command fails in one of the ranks. Between the saves a
    shell repeats the command at that interval.
    """

    command: str
    every_seconds: Positive = 60.0

    @cached_property
    def _checks(self) -> subprocess.Popen[bytes]:
        loop = f"while kill -0 $PPID && {{ {self.command}\n}}; do sleep {self.every_seconds}; done"
        return subprocess.Popen(
            loop,
            shell=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # a launcher may wait for the end of a pipe
        )

    def is_due(self, moment: Moment) -> bool:
        if moment.seconds < self.every_seconds or self._checks.poll() is None:
            return False
        del self._checks
        logger.warning(f"{self.command!r} fails: a step is saved each {self.every_seconds} s.")
        return True


@dataclass(frozen=True)
class Last(KeepPolicy):
    count: Count = 3

    def kept(self, metrics: StepMetrics) -> set[StepName]:
        return set(sorted(metrics)[-self.count :])


@dataclass(frozen=True)
class Best(SavePolicy, KeepPolicy):
    """Keeps the steps with the lowest ``metric``; with ``lowest=False``, or as "-accuracy", with
    the highest. As ``save=``, saves a step that is better than all saved steps, by the number that
    rank 0 gave ``maybe_save``.
    """

    metric: str = "loss"
    count: CountFromZero = 1
    lowest: bool = True

    @property
    def name(self) -> str:
        return self.metric.removeprefix("-")

    def is_due(self, moment: Moment) -> bool:
        newest = StepName(1 << 60, moment.step)
        return self.ordered({**moment.saved, newest: moment.metrics})[:1] == [newest]

    def kept(self, metrics: StepMetrics) -> set[StepName]:
        return set(self.ordered(metrics)[: self.count])

    def ordered(self, metrics: StepMetrics) -> list[StepName]:
        is_highest = self.metric.startswith("-") or not self.lowest
        sign = -1 if is_highest else 1
        ranked = []
        for name, values in metrics.items():
            value = values.get(self.name)
            if value is not None and math.isfinite(value):
                ranked.append((sign * value, name))
        return [name for _, name in sorted(ranked)]


@dataclass(frozen=True)
class Every(KeepPolicy):
    steps: Count

    def kept(self, metrics: StepMetrics) -> set[StepName]:
        return {name for name in metrics if name.step % self.steps == 0}
