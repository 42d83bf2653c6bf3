"""Describes the launchers of tasks: datatrove's executors, and ours, which have the same names.

No other module tests the class of an executor. They read a row here, and test for methods that only
some executors have: ``check``, ``run_ranks``, ``run_worker``, ``submit`` and ``script``,
``cancel``.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Launcher:
    """The properties of a class of executors.

    Attributes:
        has_own_disks: the disk of a task goes with it, and no other machine sees it.
        submits: ``run`` returns while the tasks wait or run, but within a task.
        in_task: the environment variable that only a submitted task has.
        sends_pickle: the tasks load the executor in another Python, without this script.
    """

    is_here: bool = False
    has_own_disks: bool = False
    submits: bool = False
    in_task: str = ""
    sends_pickle: bool = False


LAUNCHERS = {
    "LocalPipelineExecutor": Launcher(is_here=True),
    "RayPipelineExecutor": Launcher(),
    "SlurmPipelineExecutor": Launcher(
        submits=True, in_task="SLURM_ARRAY_TASK_ID", sends_pickle=True
    ),
    "JobsPipelineExecutor": Launcher(has_own_disks=True, sends_pickle=True),
}


def launcher(executor: object) -> Launcher:
    for kind in type(executor).__mro__:
        if kind.__name__ in LAUNCHERS:
            return LAUNCHERS[kind.__name__]
    return Launcher()


def default_mirror(logging_dir: str, runner: int = 0) -> str:
    return f"{logging_dir.rstrip('/')}/checkpoints{f'-{runner}' if runner else ''}"
