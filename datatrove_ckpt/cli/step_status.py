"""The steps of a run folder, for ``status``, ``verify`` and ``show --sql``."""

import argparse
from collections.abc import Mapping

import orjson

from datatrove_ckpt.checkpoint.run_limits import NO_TOTALS
from datatrove_ckpt.cli.open_run import note_stale
from datatrove_ckpt.cli.printing import say, say_result
from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.common.formatting import plural
from datatrove_ckpt.run_folder import queries, status_text
from datatrove_ckpt.run_folder.run_state import to_json
from datatrove_ckpt.run_folder.steps import StepFolder, outdated


def status(steps: Mapping[str, StepFolder], arguments: argparse.Namespace) -> int:
    stale = outdated(steps)
    states = {name: step.state() for name, step in steps.items()}
    totals = sum((state.run_totals for state in states.values()), NO_TOTALS)
    requests = sum(state.together.done.requests for state in states.values())
    fields: JsonObject = {}
    lines = [f"{arguments.what}: {plural(len(steps), 'step')}"]
    for name, state in states.items():
        fields[name] = {"is_finished": False}
        text = "waiting"
        kept = steps[name].rows
        if steps[name].has_begun:
            fields[name] = orjson.loads(to_json(state))
            documents = dict(status_text.status_lines(state))["documents"]
            text = f"{status_text.progress_of(state)}; {documents}"
        elif kept is not None:
            fields[name] = {"is_finished": True, "rows": kept.rows}
            text = f"finished; {plural(kept.rows, 'row') if kept.rows else 'NO ROW'}"
        if name in stale:
            text += f"; stale: the rows of {stale[name]} have changed"
        lines.append(f"  {name:<{max(map(len, steps))}}  {text}")
    cost = f", {totals.cost / 1e9:.6g} paid" if totals.cost else ""
    lines.append(
        f"All steps: {plural(requests, 'request')}, {plural(totals.tokens, 'token')}{cost}. More: "
        f"datatrove-ckpt status {next(iter(steps.values())).folder}"
    )
    result = {"version": 2, "what": arguments.what, "steps": fields, "stale": stale}
    say_result(arguments.json, result, lines)
    return int(any(state.is_damaged for state in states.values()))


def show(steps: Mapping[str, StepFolder], arguments: argparse.Namespace) -> int:
    from datatrove_ckpt.run_folder.documents import rows_of

    query = queries.parse(arguments.sql, "--sql")
    for name in query.tables:
        note_stale(steps, name)
    tables = {name: rows_of(steps[name]) for name in query.tables if name in steps}
    with_rows = {name: paths for name, paths in tables.items() if paths}
    say(queries.printed(query, with_rows, arguments.n))
    return 0
