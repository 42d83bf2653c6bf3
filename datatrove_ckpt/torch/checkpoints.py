"""``TrainingCheckpoints`` saves model, optimizer, input and random numbers of a training together,
at one step.

All ranks make the same calls at the same steps. A save stops the training for a copy of the states
in the host's memory; a thread writes the copy (CheckFreq, Mohan, Phanishayee and Chidambaram,
FAST'21).
"""

import asyncio
import atexit
import math
import os
import shutil
import signal
import threading
import time
import uuid
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import index
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, Self

from loguru import logger
from torch import nn
from torch.utils.data import DataLoader

import datatrove_ckpt.torch.policies as policies
import datatrove_ckpt.torch.sharded as sharded
from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.common.object_store import ObjectStore, check_mirror
from datatrove_ckpt.common.retrying import READING, failure_line
from datatrove_ckpt.common.setting_types import refuse
from datatrove_ckpt.errors import (
    CheckpointCorrupt,
    CheckpointLocked,
    CkptError,
    ConfigError,
    StorageFailed,
)
from datatrove_ckpt.process import slurm_job
from datatrove_ckpt.process.preemption import Preemption
from datatrove_ckpt.process.shutdown import SIGNALS, check_signals
from datatrove_ckpt.torch.random_state import random_state, seed_random, set_random_state
from datatrove_ckpt.torch.ranks import Ranks
from datatrove_ckpt.torch.step_folder import (
    FORMAT,
    StepManifest,
    StepName,
    blocks,
    is_left_behind,
    rolled_back_steps,
    size_of,
    whole_manifests,
)
from datatrove_ckpt.torch.steps import Contents, Steps
from datatrove_ckpt.torch.training_history import TrainingHistory, config_file, write_heartbeat
from datatrove_ckpt.torch.training_input import TrainingInput
from datatrove_ckpt.torch.watched_loader import note_use

Writer = Callable[[Path], object]

_POLL_SECONDS = 0.25  # between agreements of the ranks to save or stop
_POLL_STEPS = 32  # at most: steps may get slower
_RETRY_SECONDS = 60.0
_CURVE_SECONDS = 600.0
_HEARTBEAT_SECONDS = 30.0
_MARGIN_SECONDS = 30.0  # between the end of the last save and the end of the job's time
_INPUT = "input.pt"
_RANDOM = "random.pt"
_SIGNAL = 2.0
_OTHER = 1.0
_WARN_SECONDS = 10.0
_REMOVED = {
    "every_steps": "save=EverySteps(500)",
    "every_seconds": "save=EverySeconds(600)",
    "mtbf_seconds": 'save=EverySeconds("auto", mtbf_seconds=3600)',
    "keep_last": "keep=Last(3)",
    "keep_best": 'keep=Best("loss", 1)',
    "keep_every": "keep=Every(10_000)",
    "best": 'keep=Best("loss")',
}
"""Arguments of 0.2, and what replaces them."""


class TrainingCheckpoints:
    """The checkpoints of one training. Use it in a ``with`` block, so that signals save and that
    the end waits.

    Args:
        folder: the folder of the steps, on a disk of each node, or on a disk that nodes share.
        remote: a URL (S3, a bucket of the Hugging Face hub, another folder) to which rank 0 copies
            the newest step of its folder, and then the steps that ``keep`` keeps beside ``Last``.
            Steps that a folder lacks are restored from there.
        save: the policy of ``maybe_save``, such as ``EverySteps(500) | EverySeconds("auto")``.
            None: ``EverySeconds("auto")``.
        keep: the policy of the steps that stay, such as ``Last(3) | Best("loss") |
            Every(10_000)``. None: ``Last(3) | Best("loss")``.
        asynchronous: False: a save returns when it is on the disk.
        only_plain: restore tensors and plain values only. False: any object, which runs code that a
            file names.
        on_failure: called with the error of a save that failed, in the rank where it happened: in
            its loop, at the latest in the next ``maybe_save`` or at the end. What it raises ends
            the training. None: the training continues.
        config: the settings of the training, a dict, dataclass or ``argparse.Namespace`` of what
            JSON holds: each step has them in ``config.json``, without secrets.
        signals: names of the signals after which the training saves and ends.

    Attributes:
        metrics: the metrics of the restored step.

    Raises:
        ConfigError: an argument is not allowed, or differs between the ranks.
        StorageFailed: the folder cannot be made.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        remote: str | None = None,
        *,
        save: policies.SavePolicy | None = None,
        keep: policies.KeepPolicy | None = None,
        asynchronous: bool = True,
        only_plain: bool = True,
        on_failure: Callable[[Exception], object] | None = None,
        config: object = None,
        signals: Sequence[str] = (*SIGNALS, "SIGUSR2"),
        **removed: object,
    ) -> None:
        refuse(removed, _REMOVED)
        policies.check_policy("save", save, policies.SavePolicy, "EverySteps(500)")
        policies.check_policy("keep", keep, policies.KeepPolicy, "Last(3)")
        if not (on_failure is None or callable(on_failure)):
            raise ConfigError(f"{on_failure!r} is not a function.", setting="on_failure")
        self._save_policy = save or policies.EverySeconds("auto")
        self._keep = keep or policies.Last(3) | policies.Best("loss")
        self._best = next(
            (part for part in self._keep.parts if isinstance(part, policies.Best)), None
        )
        self._asynchronous = asynchronous
        self._only_plain = only_plain
        self._on_failure = on_failure
        self._failures = SimpleQueue[Exception]()
        self._ranks = Ranks()
        # Else ranks would wait for each other at different steps.
        timed = (
            policies.EverySteps,
            policies.EverySeconds,
            policies.EveryEpoch,
            policies.Overhead,
            policies.Best,
        )
        timed_parts = [part for part in self._save_policy.parts if type(part) in timed]
        self._by_epoch = policies.EveryEpoch() in timed_parts
        self._by_best = any(isinstance(part, policies.Best) for part in timed_parts)
        descriptions = sorted(set(self._ranks.gather(str(timed_parts))))
        if len(descriptions) > 1:
            raise ConfigError(f"save differs between the ranks: {' and '.join(descriptions)}.")
        store = None
        if remote is not None:
            check_mirror(remote, "remote")
            store = ObjectStore(remote)
        self._steps = Steps(Path(folder).absolute(), store, only_plain, config_file(config))
        self._history = TrainingHistory(self._steps.folder)
        owner = self._ranks.owner(self._steps.folder)
        self._is_owner = owner == self._ranks.rank
        self._is_shared = not self._ranks.highest([owner])[0]
        self._signals = check_signals(signals, "signals")
        self._input = TrainingInput(self._ranks, self._signals)
        self.metrics = dict[str, float]()
        self._logged = set[str]()
        self._not_saved: Exception | None = None
        self._not_copied: Exception | None = None
        self._writing = _Task(asynchronous)
        self._uploading = _Task(asynchronous)
        self._signing = _Task(asynchronous)  # a shared folder may be busy, or away
        self._snapshot = sharded.StateSnapshot()
        self._copied = StepName(-1, 0)
        self._pause = 0.0
        self._write_seconds = 0.0
        self._begin_counting()
        self._sign_at = 0.0
        self._has_read_folder = self._has_claimed = False
        self._has_compared = self._ranks.size == 1
        self._last = StepName(0, 0)
        self._random_state: JsonObject = {}
        self._longest_step = 0.0
        self._preemption = Preemption(self._signals, drain_seconds=0.0)
        self._time_ends = math.inf
        _not_left.add(self)

    def _begin_counting(self) -> None:
        self._steps_to_poll = 0
        self._stopped = 0.0
        self._began = self._saved_at = self._stepped_at = time.monotonic()
        self._saved: policies.StepMetrics = {}
        if self._by_best:
            self._saved = _metrics(self._steps.manifests())

    @property
    def failure(self) -> Exception | None:
        """The error of the latest save, if it is not on the disk or in the remote; else None."""
        return self._not_saved or self._not_copied

    @property
    def epoch(self) -> int:
        """The epoch with which the loop continues after a restore.

        Raises:
            ConfigError: the step was saved without its epoch.
        """
        if self._input.epoch is None:
            raise ConfigError(
                f"{self._last} was saved without its epoch: give maybe_save and save epoch=, or "
                "count steps."
            )
        return self._input.epoch

    # the block -----------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._preemption.__enter__()
        self._preemption.shutdown.call(self._hurry)
        if slurm_job.job_id() is not None:
            self._time_ends = asyncio.run(slurm_job.slurm_deadline()) or math.inf
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if not self._preemption.shutdown.is_fast:
                self.close(raises=error is None)
        finally:
            _not_left.discard(self)
            preemption = self._preemption
            self._preemption = Preemption(self._signals, drain_seconds=0.0)
            preemption.__exit__(kind, error, trace)

    def close(self, raises: bool = True) -> None:
        """Waits until the latest save is on the disk and in the remote.

        Raises ``failure`` if ``raises`` is set.
        """
        self._writing.join()
        if self._wait_for_copy() and self._copies and self._steps.manifests():
            self._uploading.start(self._upload)  # a failed copy is tried again
            self._wait_for_copy()
        if self._steps.is_locked:
            self._history.write_curve()
        self._steps.unlock()
        self._has_claimed = False
        self._report()
        if raises and self.failure is not None:
            raise self.failure

    def _report(self) -> None:
        while not self._failures.empty():
            error = self._failures.get()
            if self._on_failure is not None:
                self._on_failure(error)

    def _wait_for_copy(self) -> bool:
        warn_at = time.monotonic() + _WARN_SECONDS
        shutdown = self._preemption.shutdown
        cause = shutdown.cause
        while not self._uploading.join(_POLL_SECONDS):
            if time.monotonic() > warn_at:
                warn_at = math.inf
                logger.warning(
                    f"Waiting for the copy of a step to {self._steps.url}. A signal ends that."
                )
            if shutdown.cause != cause:
                self._not_copied = StorageFailed(f"The copy to {self._steps.url} did not end.")
                return False
        return True

    def _hurry(self) -> None:
        if self._preemption.shutdown.is_fast:
            raise KeyboardInterrupt

    # save ----------------------------------------------------------------------------------------

    def maybe_save(self, step: int, **arguments: Any) -> bool:
        """Saves if a save is due, and returns whether it did. Call it after each step. See
        ``save``.

        A long evaluation also calls it, with the arguments of the step before it: a signal then
        saves before the evaluation has ended.

        Raises:
            Preempted, SystemExit: a signal came, or the job's time ends. The step is saved.
        """
        self._report()
        note_use(self._input.first_iteration)
        now = time.monotonic()
        self._longest_step = max(self._longest_step, now - self._stepped_at)
        self._stepped_at = now
        if self._has_claimed and now >= self._sign_at and not self._signing.is_running:
            self._sign_at = now + _HEARTBEAT_SECONDS
            ranks = self._ranks
            self._signing.start(write_heartbeat, self._steps.folder, ranks.rank, ranks.size, step)
        stops = 0.0
        self._steps_to_poll -= 1
        if self._steps_to_poll <= 0:
            self._ranks.barrier(f"maybe_save({step})")
        if self._by_epoch or self._by_best or self._steps_to_poll <= 0:
            stops, due = self._poll(now, step, arguments)
        else:
            due = self._save_policy.is_due(policies.Moment(step, self._last.step))
        if stops:
            self.save(step, **arguments)
            self.close(raises=False)
            # A rank that ends first makes torchrun end the others.
            is_saved = not any(self._ranks.gather(self._not_saved is not None))
            shutdown = self._preemption.shutdown
            reason = shutdown.cause or "another rank stops"
            end = "saved" if is_saved else "NOT saved"
            logger.warning(f"The training stops after step {step}, which is {end} ({reason}).")
            if stops == _SIGNAL and not shutdown.is_requested:
                os.kill(os.getpid(), signal.SIGTERM)  # this rank ends as the one that got a signal
            shutdown.request("another rank")
            shutdown.raise_preempted()
        if due:
            self.save(step, **arguments)
        return due

    def _poll(self, now: float, step: int, arguments: Mapping[str, Any]) -> tuple[float, bool]:
        reserve = 2 * (self._pause + self._write_seconds) + _MARGIN_SECONDS
        if time.time() >= slurm_job.stop_time(self._time_ends, reserve):
            self._preemption.stop_for_time_limit()
        cause = self._preemption.shutdown.cause
        stops = 0.0
        if cause in signal.Signals.__members__:
            stops = _SIGNAL
        elif cause:
            stops = _OTHER
        since = now - self._saved_at
        has_failed = self._not_saved is not None
        again = has_failed and since >= _RETRY_SECONDS
        values = [
            stops,
            again,
            self._writing.is_running or (has_failed and not again),
            self._longest_step,
            since,
            self._pause,
            self._write_seconds,
            self._by_epoch and self._input.has_ended(**arguments),
            self._stopped,
            now - self._began,
        ]
        all_stop, all_again, busy, slowest, *times = self._ranks.highest(values)
        self._longest_step = 0.0
        if self._ranks.size > 1:
            self._steps_to_poll = int(min(_POLL_STEPS, _POLL_SECONDS / max(slowest, 1e-6)))
        since, pause, written, ended, stopped, run = times
        if busy:
            since = -math.inf
            all_again = 0.0
        metrics = dict[str, float]()
        if self._ranks.rank == 0:
            metrics = _numbers(arguments.get("metrics") or {})
        moment = policies.Moment(
            step,
            self._last.step,
            since,
            pause,
            written,
            bool(ended),
            stopped,
            run,
            metrics,
            self._saved,
        )
        due = self._save_policy.is_due(moment) or all_again
        return all_stop, bool(self._ranks.highest([due])[0])

    def log(self, step: int, **metrics: float) -> None:
        """Adds metrics of a step to the loss curve, without a save. What other ranks log is
        ignored.

        The folder has them from its first save on: ``datatrove-ckpt status``. ``metrics.csv`` is
        written at the end, and each ten minutes.
        """
        self._log(step, _numbers(metrics))

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._logged |= metrics.keys()
        if metrics and self._ranks.rank == 0:
            with suppress(StorageFailed):  # the next save names the full disk
                self._history.note(self._steps.is_locked, "metrics", step, metrics=metrics)

    def save(
        self,
        step: int,
        *,
        loader: DataLoader | None = None,
        epoch: int | None = None,
        metrics: Mapping[str, float] | None = None,
        writer: Writer | None = None,
        **states: object,
    ) -> None:
        """Saves now. Waits for the previous save, if that is still being written.

        Args:
            step: how many steps the training has made.
            loader: the rank's own loader, with a ``state_dict``, as a StatefulDataLoader has it.
            epoch: the number of this epoch, if the loader reads no dataset of ours.
            metrics: numbers to choose the best step by; also for the loss curve, as ``log``.
            writer: called in each rank with a folder, for objects that save themselves. It is not
                asynchronous.
            states: objects whose ``state_dict`` is the same in all ranks, such as DDP's model;
                dicts; or objects of which each rank has a part, as with FSDP2 (``fully_shard``).

        A save that fails is logged, and is ``failure`` until a save succeeds. The training
        continues, unless ``on_failure`` raises.

        Raises:
            ConfigError: a state has no ``state_dict``; the shape of a tensor, a number or a text in
                it differs between ranks, or at the first save a parameter; it holds a value that no
                restore takes; there is a writer or FSDP, and nodes have folders of their own; the
                step is before the last step; or folder or remote hold steps, and nothing was
                restored.
            CheckpointLocked: another process saves into the folder.
        """
        began = time.monotonic()
        savable = dict(states)
        if loader is not None:
            savable["loader"] = loader
        sharded.check_savable(savable)
        step = index(step)
        if step < self._last.step:
            raise ConfigError(
                f"save: step {step} comes after step {self._last.step}. Count on from the step "
                "that restore returned, or start over in a new folder."
            )
        numbers = _numbers(metrics or {})
        self._ranks.barrier(f"save({step})")
        self._writing.join()
        self._report()
        name = self._last = StepName(self._last.rollbacks, step)
        self._input.told_epoch = epoch
        self._log(step, numbers)
        try:
            self._claim()
        except StorageFailed as error:
            self._failed(name, error, self._is_owner)
            self._report()
            return
        alike, parts = sharded.contents_of(states)
        if (writer is not None or parts) and not self._is_shared:
            raise ConfigError(
                "save: a writer, or a state of FSDP, needs a folder that all nodes share."
            )
        own_input = self._input.state(loader)
        generators, inputs, save = self._gather(own_input, states, alike, parts)
        if not self._agree(partial(self._begin, name), name):
            return

        if writer is not None:
            folder = self._steps.folder / f".saving-{name}" / "writer"
            if not self._agree(partial(_write_all, writer, folder), name):
                return
        contents: Contents = {}
        if self._is_owner:
            if not self._steps.names():
                self._warn_of_first(numbers, own_input)
            if loader is not None:
                inputs = self._input.restored.get(step, inputs)
            contents = {f"states/{key}.pt": state for key, state in alike.items()}
            contents |= {_RANDOM: generators, _INPUT: inputs}
        copies = [contents, parts]

        def copy() -> None:
            copies[:] = self._snapshot.take(copies)

        if self._asynchronous and not self._agree(copy, name):
            return
        self._saved_at = time.monotonic()
        self._pause = self._saved_at - began
        self._writing.start(self._write, name, *copies, numbers, save)
        self._saved = {**self._saved, name: numbers}
        self._stopped += time.monotonic() - began

    def _gather(
        self, own_input: Contents | None, states: sharded.States, alike: Contents, parts: Contents
    ) -> tuple[list[object], list[object], str]:
        outlines = {key: sharded.outline(state) for key, state in alike.items()}
        for key, state in parts.items():  # names differ between stages
            outlines[key] = sharded.outline(state, sharded.VALUES)
        if not self._has_compared:
            outlines |= sharded.hashes(states)
        problem = ""
        if self._only_plain:
            problem = sharded.not_plain({"loader": own_input, **alike, **parts})
        values = (random_state(), own_input, outlines, problem, uuid.uuid4().hex)
        gathered = [list(each) for each in zip(*self._ranks.gather(values), strict=True)]
        generators, inputs, gathered_outlines, problems, saves = gathered
        problem = next(filter(None, problems), "")
        if problem:
            raise ConfigError(
                f"save: {problem}: no restore would take it. Save plain values and tensors, or "
                "set only_plain=False."
            )
        sharded.check_alike(gathered_outlines)
        self._has_compared = True
        return generators, inputs, saves[0]

    def _warn_of_first(self, metrics: Mapping[str, float], input_state: Contents | None) -> None:
        best = self._best
        if self._logged and best is not None and best.count and best.name not in metrics:
            logger.warning(
                f"metrics has no {best.name!r}: no best step is kept. Give it to maybe_save and "
                "save, not only to log; or choose another keep=."
            )
        if input_state is not None and input_state["epoch"] is None:
            logger.warning(
                "The loader does not show its epoch: give maybe_save and save epoch=, or count "
                "steps."
            )

    def _claim(self) -> None:
        if self._has_claimed:
            return
        try:
            self._ranks.together(self._claim_folder)
        except CkptError:
            self._steps.unlock()
            raise
        self._has_claimed = self._has_read_folder = True
        self._steps.training = self._ranks.gather(self._steps.training or uuid.uuid4().hex)[0]

    def _claim_folder(self) -> None:
        if not self._is_owner:
            return
        self._steps.lock()
        there = dict[StepName, StepManifest]()
        if self._copies:
            with suppress(Exception):  # the copy of the step names a remote that is away
                there, _ = self._steps.remote_manifests()
        names = [*self._steps.names(), *there]
        if names and not self._has_read_folder:
            raise ConfigError(
                f"{self._steps.folder}, or its remote, holds {max(names)} of an earlier "
                "training. Call restore(), or choose another folder."
            )
        self._steps.refuse_others(there)

    def _agree(self, call: Callable[[], object], name: StepName) -> bool:
        errors = []

        def watched() -> None:
            try:
                call()
            except Exception as error:
                errors.append(error)
                raise

        try:
            self._ranks.together(watched)
        except Exception as error:
            self._failed(name, error, bool(errors))
            self._report()
            return False
        return True

    def _failed(self, name: StepName, error: Exception, is_own: bool = True) -> None:
        self._not_saved = error
        if is_own:
            self._failures.put(error)
        self._saved_at = time.monotonic()
        logger.error(f"{name} is not saved: {error} The training continues.")
        if self._is_owner:
            with suppress(Exception):
                self._steps.abandon(name)
            self._note("failed", name, error=str(error))

    # the writing thread

    def _write(
        self,
        name: StepName,
        contents: Contents,
        parts: Contents,
        metrics: dict[str, float],
        save: str,
    ) -> None:
        began = time.monotonic()
        try:
            for key, state in parts.items():
                folder = self._steps.folder / f".saving-{name}" / "states" / key
                sharded.save_parts(state, folder, self._ranks.writing)
            if not self._is_owner:
                self._not_saved = None
                return
            self._steps.write(name, contents, {"metrics": metrics, "save": save})
            self._steps.publish(name)
            self._write_seconds = time.monotonic() - began
            self._note(
                "saved",
                name,
                bytes=size_of(self._steps.manifest(name)),
                pause_seconds=self._pause,
                write_seconds=self._write_seconds,
            )
            self._not_saved = None
            self._remove_old()
        except Exception as error:
            self._failed(name, error)
            return
        if self._copies and not self._uploading.is_running:
            self._uploading.start(self._upload)
        if time.monotonic() - self._history.curve_at > _CURVE_SECONDS:
            self._history.write_curve()

    def _begin(self, name: StepName) -> None:
        """On a full disk, first removes steps that it would remove in any case."""
        if not self._is_owner:
            return
        with suppress(Exception):  # of no step, max raises
            there = self._steps.manifests()
            if shutil.disk_usage(self._steps.folder).free < size_of(there[max(there)]):
                self._remove_old({name: {}})
        self._steps.begin(name)

    def _remove_old(self, coming: policies.StepMetrics | None = None) -> None:
        there = _metrics(self._steps.manifests())
        staying = self._keep.kept({**there, **(coming or {})}) | {max(there), self._copied}
        for name in there.keys() - staying:
            self._steps.remove(name)

    @property
    def _copies(self) -> bool:
        return self._ranks.rank == 0 and self._steps.store is not None

    def _upload(self) -> None:
        name = self._last
        try:
            while True:
                there, incomplete = self._steps.remote_manifests()
                self._steps.refuse_others(there)
                here = self._steps.manifests()
                name = max(here)
                parts = [part for part in self._keep.parts if not isinstance(part, policies.Last)]
                needed = policies.AnyOf(tuple(parts)).kept(_metrics(here)) | {name}
                missing = [
                    step
                    for step in needed
                    if there.get(step, {}) | {"format": FORMAT} != here[step]
                ]
                if not missing:
                    break
                name = self._copied = max(missing)
                self._steps.own_remote()
                self._steps.upload(name, there)
                self._remove_copies({**there, name: here[name]}, incomplete - {name})
            self._not_copied = None
        except Exception as error:
            problem = f"{name} is not copied to {self._steps.url}: {failure_line(error)}"
            self._not_copied = StorageFailed(problem)
            logger.error(f"{problem}. The next save tries again.")
            self._note("not copied", name, error=str(error))

    def _remove_copies(
        self, there: Mapping[StepName, StepManifest], incomplete: set[StepName]
    ) -> None:
        staying = {
            name: there[name] for name in there.keys() - incomplete - rolled_back_steps(there)
        }
        selected = self._keep.kept(_metrics(staying)) | {max(staying)}
        try:
            self._steps.own_remote()
            for name in (incomplete | there.keys()) - selected:
                self._steps.remove_remote(name)
            self._steps.remove_shared(staying[name] for name in selected)
        except Exception as error:
            logger.warning(f"Old steps stay in {self._steps.url}: {error}")

    # restore -------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Returns the steps in the folder and in the remote, the oldest first. Of several steps
        with one number, the newest counts, as for ``restore``.

        Raises:
            StorageFailed: the folder has none, and the remote cannot be listed.
        """
        return [*dict.fromkeys(name.step for name in reversed(self._listed()))][::-1]

    def latest_step(self) -> int | None:
        return next(reversed(self.steps()), None)

    def restore(
        self,
        step: int | Literal["latest", "best"] = "latest",
        *,
        loader: DataLoader | None = None,
        reader: Writer | None = None,
        weights_only: bool = False,
        **states: object,
    ) -> int | None:
        """Restores a whole step. Logs which newer steps are damaged, and why. If no step is whole,
        restores one in which at least the given parts are.

        Args:
            step: its number; "latest": the newest step; "best": the best step by ``Best``. The
                saves that follow an older step are newer than all steps.
            loader: a loader that has not begun yet. A ``ReaderDataset``'s loader resumes with any
                number of ranks.
            reader: called in each rank with the folder that the ``writer`` had.
            weights_only: restore the given states alone, and no random numbers: the training does
                not continue from there. Only their files must be whole.
            states: objects with ``load_state_dict`` and dicts, by the names that ``save`` was
                given, or some of them. A tensor of a dict with the saved shape keeps its memory,
                which may be a model's. If a state does not fit, others may have changed.

        Returns:
            The step; None for "latest" if no step was saved, here or in the remote.

        Raises:
            CheckpointCorrupt: steps were saved, and none of them is whole.
            CheckpointMismatch: the loader's input is not that of the step.
            ConfigError: there is no such step, the step holds no such state, or the state does not
                fit its object.
        """
        began = time.monotonic()
        self._ranks.barrier(f"restore({step})")
        try:
            if not weights_only:
                self._has_read_folder = True
            parts = {f"states/{key}" for key in states}
            if reader is not None:
                parts.add("writer")
            try:
                name, passed = self._choose(step, parts=parts if weights_only and parts else None)
            except CheckpointCorrupt as error:
                if not parts or weights_only:
                    raise
                name, passed = self._choose(step, parts=parts | {"input", "random"})
                logger.warning(f"The parts that restore was given are whole in {name}. {error}")
            if name is None:
                self._input.prepare(loader, 0)
                return None
            try:
                self._load(name, reader, states, weights_only)
            except CkptError as error:
                if name in self._steps.names():
                    raise
                problem = f"{name} was removed by its training during the restore. Restore again."
                raise StorageFailed(problem) from error
            if not weights_only:
                self._last = name
                self._steps.back_to = self._steps.manifest(name).get("back_to")
                if step != "latest" and name != self._newest:
                    self._steps.back_to = None
                    self._last = StepName(self._newest.rollbacks + 1, name.step)
                self._input.load(loader, name, self._steps.load(name, _INPUT))
                self._begin_counting()
                seconds = time.monotonic() - began
                self._note("restored", name, seconds=seconds, passed_over=passed)
        finally:
            if not self._has_claimed:  # a process that only reads locks no training out
                self._steps.unlock()
        if self._ranks.rank == 0:
            at = time.strftime("%F %T", time.localtime(self._steps.manifest(name)["at"]))
            logger.info(f"Restored {self._steps.folder / str(name)}, saved at {at}.")
        return name.step

    def _note(self, event: str, name: StepName, **values: object) -> None:
        with suppress(Exception):
            is_owner = self._steps.is_locked
            self._history.note(is_owner, event, name.step, rollbacks=name.rollbacks, **values)

    def _best_last(self) -> list[StepName]:
        if self._best is None:
            raise ConfigError('"best": keep= has no Best(...), which names the metric.')
        # Also of steps that were found damaged: parts of them may be whole.
        manifests = whole_manifests(self._steps.names(), self._steps.manifest)
        if self._copies:
            manifests = self._steps.remote_manifests()[0] | manifests
        for name in rolled_back_steps(manifests):
            del manifests[name]
        return self._best.ordered(_metrics(manifests))[::-1]

    def _choose(
        self,
        step: int | str | None,
        before: int | None = None,
        parts: set[str] | None = None,
    ) -> tuple[StepName | None, list[str]]:
        """Returns the newest (or best) requested step that is whole in all folders, or whose
        ``parts`` are, and the damage of steps before it in that order.
        """
        self._writing.join()
        listings = self._ranks.together(self._names)
        # The training of rank 0's folder counts.
        self._steps.training = next(filter(None, self._ranks.gather(self._steps.training)), "")
        passed: list[str] = []
        names = sorted(set().union(*listings))
        self._newest = max(names, default=self._last)
        if step == "best":
            names = self._ranks.together(self._best_last)[0]
        elif before is not None:
            names = [name for name in names if name.step < before]
        elif step != "latest":
            names = [name for name in names if name.step == step]
        for name in reversed(names):
            damage = self._damage(name, parts)
            if damage and name not in set().union(*self._ranks.together(self._names)):
                return self._choose(step, before, parts)
            if not damage:
                if parts is None:
                    self._steps.damaged.discard(name)
                self._steps.training = self._steps.manifest(name)["training"]
                return name, passed
            passed.append(f"{name}: {damage}")
            self._steps.damaged.add(name)
            if self._ranks.rank == 0:
                logger.warning(f"{name} is passed over: {damage}")
        if passed:
            raise CheckpointCorrupt(
                f"{self._steps.folder} has no step that is whole: {' '.join(passed)}"
            )
        if step != "latest":
            requested = f"before {before}" if step is None else step
            raise ConfigError(f"There is no step {requested}; there are {self.steps()}.")
        return None, passed

    def _names(self) -> list[StepName]:
        if not self._is_owner:
            return []
        with suppress(CheckpointLocked, StorageFailed):  # another process has it: this reads
            self._steps.lock()
            if not self._has_claimed:
                self._steps.unlock()
        manifests = self._steps.manifests()
        if manifests:
            self._steps.training = manifests[max(manifests)]["training"]
        return self._listed()

    def _listed(self) -> list[StepName]:
        names = self._steps.names()
        try:
            return sorted({*names, *self._steps.remote_names()})
        except Exception as error:
            problem = f"{self._steps.url} cannot be listed: {failure_line(error)}."
            if not names:
                raise StorageFailed(problem) from error
            logger.warning(problem)
            return names

    def _damage(self, name: StepName, parts: set[str] | None) -> str:
        """First fetches copies that are missing or differ from the remote."""
        differs = False

        def own_damage() -> str:
            if not self._is_owner:
                return ""
            damage = "It is not the same save on all nodes."
            try:
                if not differs:
                    damage = self._steps.damage(name, parts)
                if damage and self._steps.store is not None:
                    self._steps.lock()
                    READING.run(partial(self._steps.fetch, name), f"{name} cannot be fetched")
                    return ""
            except CheckpointCorrupt as error:
                return f"{damage} {error}"
            except Exception as error:
                raise StorageFailed(f"{name} cannot be read: {failure_line(error)}.") from error
            return damage

        while True:
            damage = next(filter(None, self._ranks.together(own_damage)), "")
            if damage:
                return damage
            # A node that was lost may have made the step apart.
            manifests = self._ranks.together(partial(self._steps.manifest, name))
            differs = len({manifest.get("save") for manifest in manifests}) > 1
            if not differs:
                return ""

    def _load(
        self,
        name: StepName,
        reader: Writer | None,
        states: sharded.States,
        weights_only: bool = False,
    ) -> None:
        saved = {file for file in self._steps.manifest(name)["files"] if file.startswith("states/")}
        for key, state in states.items():
            folder = f"states/{key}"
            try:
                if f"{folder}/{sharded.METADATA}" in saved:
                    path = self._steps.folder / str(name) / folder
                    sharded.load_parts(key, states, path, self._ranks.group, self._only_plain)
                elif isinstance(state, dict) and "param_groups" in state:
                    raise ConfigError(
                        f"{key} is what an optimizer's state_dict() gave. Give the optimizer."
                    )
                else:
                    copies = isinstance(state, nn.Module)
                    sharded.give(state, self._steps.load(name, f"{folder}.pt", copies))
            except CkptError:
                raise
            except Exception as error:
                raise ConfigError(f"{key}: {name} does not fit: {error}") from error
        not_restored = {file.split("/")[1].removesuffix(".pt") for file in saved} - states.keys()
        if not_restored and not weights_only and self._ranks.rank == 0:
            logger.warning(
                f"{name} also holds {', '.join(sorted(not_restored))}, which is not restored."
            )
        if reader is not None:
            reader(self._steps.folder / str(name) / "writer")
        self.metrics = self._steps.manifest(name)["metrics"]
        if weights_only:
            return
        generators = self._steps.load(name, _RANDOM)
        if len(generators) == self._ranks.size:
            set_random_state(generators[self._ranks.rank])
        else:
            seed_random(self._input.seed(name.step))
        self._random_state = random_state()

    def restore_random(self) -> None:
        """Sets the random generators again, for a trainer that draws numbers between ``restore``
        and its first batch. Only the first call has an effect.
        """
        if self._random_state:
            set_random_state(self._random_state)
            self._random_state = {}

    # roll back -----------------------------------------------------------------------------------

    def rollback(
        self,
        to: int | Literal["best"] | None = None,
        *,
        before: int | None = None,
        loader: DataLoader | None = None,
        skip_input: bool = True,
        reader: Writer | None = None,
        **states: object,
    ) -> int:
        """Goes back to an older step, which becomes the newest, and removes the steps after it.

        Args:
            to: the step; "best": the step with the best metric.
            before: a step number, to go back to the newest step before it.
            loader: the loader in use with ``skip_input``; else a new loader, with which the loop
                begins again.
            skip_input: the input continues at its position, so that the rows that broke the model
                do not come again.

        Returns:
            The step.

        Raises:
            ConfigError: there is no such step, or both or none of ``to`` and ``before`` are given.
            CheckpointCorrupt, CheckpointMismatch: no such step is whole, or the loader's input is
                another.
            CheckpointLocked: another process saves into the folder.
        """
        if (to is None) == (before is None):
            raise ConfigError("rollback: give one of to= and before=.")
        self._ranks.barrier("rollback()")
        self._has_read_folder = True
        self._claim()

        old, _ = self._choose(to, before)
        assert old is not None
        new = StepName(self._last.rollbacks + 1, old.step)
        input_state = None
        if skip_input:
            input_state = self._input.state(loader)
        inputs = self._ranks.gather(input_state)
        back = {"back_to": old.step, "save": self._ranks.gather(uuid.uuid4().hex)[0]}

        def copy() -> None:
            if not self._is_owner:
                return
            self._steps.begin(new)
            manifest = self._steps.manifest(old)
            source = self._steps.folder / str(old)
            contents: Contents = {file: blocks(source / file) for file in manifest["files"]}
            if input_state is not None:
                contents[_INPUT] = inputs
            self._steps.write(new, contents, back | {"metrics": manifest["metrics"]})

        # Work that may fail comes before the model changes, and effects that others see after it.
        self._ranks.together(copy)
        self._load(old, reader, states)
        self._input.restored.clear()
        if loader is not None and not skip_input:
            self._input.load(loader, old, self._steps.load(old, _INPUT))
        self._ranks.gather(None)
        self._last = new
        self._steps.back_to = old.step
        if self._is_owner:
            self._uploading.join()
            self._steps.publish(new)
            for name in self._steps.names():
                if is_left_behind(name, new):
                    self._steps.remove(name)
            self._not_saved = None
            if self._copies:
                self._uploading.start(self._upload)
        self._ranks.gather(None)
        self._note("rolled back", new, to=old.step, skipped_input=skip_input)
        self._begin_counting()
        return old.step


_not_left = weakref.WeakSet[TrainingCheckpoints]()


def _metrics(manifests: Mapping[StepName, StepManifest]) -> policies.StepMetrics:
    return {name: manifest["metrics"] for name, manifest in manifests.items()}


@atexit.register
def _close_all() -> None:
    """Waits for the last saves, whose threads would end with the process."""
    for each in list(_not_left):
        if each._writing.is_running or each._uploading.is_running:
            logger.warning(
                "Use TrainingCheckpoints in a with block: its end waits for the last save."
            )
            each.close(raises=False)


def _write_all(writer: Writer, folder: Path) -> None:
    returned = writer(folder)
    if isinstance(returned, Awaitable | Iterator) or hasattr(returned, "result"):
        raise ConfigError(
            f"the writer returned a {type(returned).__name__}. Let it wait until all is written."
        )


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {key: float(value) for key, value in metrics.items()}


@dataclass(eq=False)
class _Task:
    """Makes at most one call at a time, in a thread that does not keep the process alive."""

    _asynchronous: bool
    _thread: threading.Thread | None = None

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, call: Callable[..., None], *arguments: object) -> None:
        if self._asynchronous:
            self._thread = threading.Thread(target=call, args=arguments, daemon=True)
            with suppress(RuntimeError):  # the process ends
                self._thread.start()
                return
            self._thread = None
        call(*arguments)

    def join(self, seconds: float | None = None) -> bool:
        if self._thread is not None:
            self._thread.join(seconds)
        return not self.is_running
