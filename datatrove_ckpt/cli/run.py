"""``datatrove-ckpt run``: builds the executor that a YAML file describes. ``execution.py`` does the rest."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from datatrove_ckpt.cli.yaml_config import build, read_config


def run(arguments: argparse.Namespace) -> int:
    """Builds the executor and runs it. Returns the exit code.

    Raises:
        ConfigError: a mistake in the file or on the command line; nothing was started.
    """
    sys.path.insert(0, str(Path.cwd()))  # rollout_fn: my_module.my_rollout
    content = read_config(arguments.config, arguments.overrides)
    executor = build(content)
    from datatrove_ckpt.cli.execution import execute  # a file with a mistake needs none of it

    return execute(executor, content, arguments)
