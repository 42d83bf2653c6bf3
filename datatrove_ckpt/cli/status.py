"""``datatrove-ckpt status``: the state of a whole run, once or again and again. Imports no datatrove.

Exit codes: 0 all is well; 1 something is damaged; 2 a mistake on the command line.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from datatrove_ckpt.cli.printing import takes_unicode, write_out
from datatrove_ckpt.cli.status_text import Style, describe, table
from datatrove_ckpt.cli.what import place_of
from datatrove_ckpt.maintenance.read_state import read_run_state, wanted_files
from datatrove_ckpt.maintenance.run_state import RunState
from datatrove_ckpt.maintenance.state_json import dump, to_json


def status(arguments: argparse.Namespace) -> int:
    """Prints the state of the run. Returns the exit code."""
    with place_of(arguments, wanted_files) as place:
        if arguments.watch:
            from datatrove_ckpt.cli.watch import watch

            return int(watch(place, arguments.interval, as_json=arguments.json).is_damaged)
        state = read_run_state(place)
    if arguments.json:
        write_out(dump(to_json(state)).decode() + "\n")
    else:
        write_out("\n".join(_lines(state, arguments.all, Style(takes_unicode()))) + "\n")
    return int(state.is_damaged)


def _lines(state: RunState, everything: bool, style: Style) -> Iterator[str]:
    yield from describe(state, style)
    if everything:
        yield ""
        yield from table([*state.ranks, *state.retries], state.read_at, style)
