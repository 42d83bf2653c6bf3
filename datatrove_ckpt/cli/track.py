"""``datatrove-ckpt track``: sends what a job does to MLflow, until no task is at work."""

import argparse
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

from datatrove_ckpt.checkpoint.training_steps import is_training
from datatrove_ckpt.cli.printing import say
from datatrove_ckpt.cli.what import place_of
from datatrove_ckpt.common.formatting import missing_package
from datatrove_ckpt.common.redaction import holds_credentials
from datatrove_ckpt.errors import ConfigError, StorageFailed
from datatrove_ckpt.run_folder import tracking
from datatrove_ckpt.run_folder.run_state import wanted_files
from datatrove_ckpt.run_folder.where import Place

_SENDING_SECONDS = 60.0  # between two sendings


def track(arguments: argparse.Namespace) -> int:
    """Sends all, as long as there is something to come. Returns the exit code."""
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
        _send(tracking.TrainingTracker(service, arguments.name_of_run, folder=folder))
        say("All is sent, and no training saves there.")
        return 0
    with place_of(arguments, wanted_files) as place:
        _send(tracking.Tracker(service, arguments.name_of_run, place=place), place)
    say("All is sent, and no task is at work.")
    return 0


def _send(tracker: tracking.Tracker | tracking.TrainingTracker, place: Place | None = None) -> None:
    said = ""
    while True:
        problem = tracker.work()
        if problem != said:
            say(problem or "up to date again")
        said = problem
        if tracker.is_over:
            return
        time.sleep(_SENDING_SECONDS)
        if place is not None:
            with suppress(StorageFailed):  # a network that comes back
                place.refresh()
