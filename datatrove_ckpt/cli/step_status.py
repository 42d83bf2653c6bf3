"""The steps of a run folder, for ``status``, ``verify`` and ``show --sql``."""

import argparse
from collections.abc import Mapping

import orjson

from datatrove_ckpt.checkpoint.run_limits import NO_TOTALS
from datatrove_ckpt.cli.open_run import note_stale
from datatrove_ckpt.cli.printing import say, say_result
from datatrove_ckpt.common.formatting import plural
from datatrove_ckpt.run_folder import queries, status_text
from datatrove_ckpt.run_folder.run_state import to_json
from datatrove_ckpt.run_folder.steps import StepFolder, outdated


def status(steps: Mapping[str, StepFolder], arguments: argparse.Namespace) -> int:
    stale = outdated(steps)
    totals = NO_TOTALS
    requests = 0
    code = 0
    fields: dict[str, object] = {}
    lines = [f"{arguments.what}: {plural(len(steps), 'step')}"]
    for name, step in steps.items():
        state = step.state()
        totals += state.run_totals
        requests += state.together.done.requests
        code = max(code, int(state.is_damaged))
        if step.has_begun:
            fields[name] = orjson.loads(to_json(state))
            documents = dict(status_text.status_lines(state))["documents"]
            text = f"{status_text.progress_of(state)}; {documents}"
        elif step.rows is not None:
            rows = step.rows.rows
            fields[name] = {"is_finished": True, "rows": rows}
            text = f"finished; {plural(rows, 'row') if rows else 'NO ROW'}"
        else:
            fields[name] = {"is_finished": False}
            text = "waiting"
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
    return code


def show(steps: Mapping[str, StepFolder], arguments: argparse.Namespace) -> int:
    from datatrove_ckpt.run_folder.documents import rows_of

    query = queries.parse(arguments.sql, "--sql")
    for name in query.tables:
        note_stale(steps, name)
    tables = {name: rows_of(steps[name]) for name in query.tables if name in steps}
    with_rows = {name: paths for name, paths in tables.items() if paths}
    say(queries.printed(query, with_rows, arguments.n))
    return 0
