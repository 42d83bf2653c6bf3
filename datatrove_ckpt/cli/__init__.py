"""The command ``datatrove-ckpt``: argparse, YAML files into executors, Slurm submission. The only room that prints.

It may import every other room; no room imports it. What a command needs is imported when it is called, so that
``--help`` and ``status`` start without datatrove. Start at ``main.py`` (every command and option).
"""


def __getattr__(name: str) -> object:
    """Finds ``QuietErrors``, which was here in 0.1, for executors that 0.1 pickled, such as queued Slurm tasks."""
    if name == "QuietErrors":
        from datatrove_ckpt.process.task_errors import QuietErrors

        return QuietErrors
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
