"""``datatrove-ckpt track``: sends what a job does to MLflow, until no task is at work."""

import argparse
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import xxhash

from datatrove_ckpt.cli.open_run import open_run
from datatrove_ckpt.cli.printing import say
from datatrove_ckpt.common.formatting import missing_package
from datatrove_ckpt.common.redaction import holds_credentials
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.run_folder import tracking
from datatrove_ckpt.run_folder.run_state import wanted_files
from datatrove_ckpt.torch.step_folder import is_training
from datatrove_ckpt.torch.training_history import MetricsRow, read_training

_SENDING_SECONDS = 60.0  # between two sendings


def track(arguments: argparse.Namespace) -> int:
    """Sends the numbers of a job until no more can come. Returns the exit code."""
    missing = missing_package("mlflow")
    if missing is not None:
        raise ConfigError(f"--mlflow: {missing}")
    if holds_credentials(arguments.mlflow):
        raise ConfigError(
            "--mlflow: the URI holds a user or a password, which other users of this machine can "
            "see. Leave them out, and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in "
            "the environment."
        )
    service = partial(tracking.MlflowRun, uri=arguments.mlflow, experiment=arguments.experiment)
    if is_training(arguments.what):
        folder = Path(arguments.what)
        _send(TrainingTracker(service, arguments.name_of_run, folder=folder))
        say("All is sent, and no training saves there.")
        return 0
    with open_run(arguments, wanted_files) as location:
        _send(tracking.RunTracker(service, arguments.name_of_run, place=location))
    say("All is sent, and no task is at work.")
    return 0


def _send(tracker: tracking.Tracker) -> None:
    printed = ""
    while True:
        problem = tracker.work()
        if problem != printed:
            say(problem or "up to date again")
        printed = problem
        if tracker.is_over:
            return
        time.sleep(_SENDING_SECONDS)


_UNKNOWN_SECONDS = 3600.0  # between saves, if only one save is kept
_INTERVALS = 2  # between saves: a training restarts, and makes the steps to its next save


@dataclass
class TrainingTracker(tracking.Tracker):
    """Sends the loss curve of a training: each step once, and again after a rollback. It ends when
    no process saves into the folder, at several polls and for longer than between the newest saves:
    a restarted training has not saved yet.
    """

    folder: Path = field(kw_only=True)
    _sent: list[MetricsRow] = field(default_factory=list)

    def look(self) -> tuple[tracking.TrackedJob, Iterable[tracking.Point], str]:
        state = read_training(self.folder, full=False)
        path = str(self.folder.absolute())
        times = sorted(step.at for step in state.steps if step.at)
        started = min(times, default=time.time())
        name = self.name or self.folder.absolute().name
        identity = xxhash.xxh3_128_hexdigest(path.encode())
        job = tracking.TrackedJob(identity, name, started, {"folder": path})
        self.idle_looks += 1
        if state.writer:
            self.idle_looks = 0
        status = "RUNNING"
        if self.idle_looks >= tracking.IDLE_LOOKS:
            interval = _UNKNOWN_SECONDS
            if len(times) > 1:
                interval = times[-1] - times[-2]
            # An active training would have saved since.
            if not times or time.time() - times[-1] > _INTERVALS * interval:
                status = "FINISHED"
        return job, self._new_points(state.curve), status

    def _new_points(self, curve: Sequence[MetricsRow]) -> Iterator[tracking.Point]:
        """Yields the points to send. A step counts as sent when the next point is requested."""
        for number, (step, metrics) in enumerate(curve):
            if self._sent[number : number + 1] != [(step, metrics)]:
                numbers = {key: value for key, value in metrics.items() if value is not None}
                yield time.time(), numbers, step
                self._sent[number:] = [(step, metrics)]
