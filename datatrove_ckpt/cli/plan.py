"""``datatrove-ckpt plan``: prints how often a training should save, and how much time is lost then.

The model is in ``torch/policies.py``. A save costs the ``pause_seconds`` in which the training
stops, not the time of writes beside it.
"""

import argparse
from pathlib import Path
from statistics import median

from datatrove_ckpt.cli.printing import say_result
from datatrove_ckpt.common.formatting import duration, figure
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.torch import policies
from datatrove_ckpt.torch.training_history import HISTORY, read_events


def plan(arguments: argparse.Namespace) -> int:
    """Prints the intervals. The history of a training has the median pause of its saves, and the
    mean time between its restarts. Returns the exit code.

    Raises:
        ConfigError: there is no history, or it lacks a figure that no flag gives.
    """
    save_cost = arguments.save_cost
    mtbf = arguments.mtbf
    if arguments.folder is not None:
        folder = Path(arguments.folder)
        path = folder / HISTORY
        if not path.is_file():
            raise ConfigError(
                f"{path}: there is no such file, so nothing can be measured. Give --save-cost and "
                "--mtbf."
            )
        events = list(read_events(folder))
        pauses = [event["pause_seconds"] for event in events if event["event"] == "saved"]
        restarts = [event["at"] for event in events if event["event"] == "restored"]
        if pauses:
            save_cost = save_cost or median(pauses)
        if len(restarts) >= 3:
            mtbf = mtbf or (restarts[-1] - restarts[0]) / (len(restarts) - 1)
    if not save_cost:
        raise ConfigError(
            "--save-cost is missing: how long a save stops training, such as 140s; or give FOLDER."
        )
    if not mtbf:
        raise ConfigError(
            "--mtbf is missing: the mean time between two losses, such as 6h. 3 restarts show it."
        )
    best = policies.daly(save_cost, mtbf)
    figures = {
        "save_cost": save_cost,
        "mtbf": mtbf,
        "young": policies.young(save_cost, mtbf),
        "daly": best,
    }
    figures["lost"] = 1 - policies.efficiency(best, save_cost, mtbf)
    lines = [
        f"training: a save takes {duration(save_cost)}; a loss every {duration(mtbf)}",
        f"  save every {figure(figures['young'])} s (Young)",
        f"  save every {figure(best)} s (Daly): {100 * figures['lost']:.2f} % of all time is lost",
    ]
    say_result(arguments.json, figures, lines)
    return 0
