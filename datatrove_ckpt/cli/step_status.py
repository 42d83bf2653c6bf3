"""``status``, ``report``, ``verify`` and ``show --sql`` of a run folder with steps."""

import argparse
from collections.abc import Callable
from pathlib import Path

import orjson

from datatrove_ckpt.checkpoint.run_limits import RunTotals
from datatrove_ckpt.cli.printing import say, say_result, write_page
from datatrove_ckpt.common.formatting import plural
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.run_folder import queries, run_location, status_text
from datatrove_ckpt.run_folder.run_state import to_json
from datatrove_ckpt.run_folder.steps import outdated, step_folders


def root_of_steps(arguments: argparse.Namespace) -> Path | None:
    root = Path(arguments.what)
    if run_location.is_config(arguments.what):
        from datatrove_ckpt.cli.short_form import read_job

        job = read_job(arguments.what, arguments.overrides)
        if "steps" not in job:
            return None
        root = Path(str(job.get("run_folder"))).expanduser()
        if not step_folders(root):
            raise run_location.RunNotStarted(f"{arguments.what}: no step has started yet.")
    return root if step_folders(root) else None


def status(root: Path, arguments: argparse.Namespace) -> int:
    steps = step_folders(root)
    stale = dict(outdated(steps))
    totals = RunTotals()
    requests = 0
    code = 0
    fields: dict[str, object] = {}
    lines = [f"{root}: {plural(len(steps), 'step')}"]
    for name, step in steps.items():
        state = step.state()
        if state is not None:
            fields[name] = orjson.loads(to_json(state))
            documents = dict(status_text.status_lines(state))["documents"]
            text = f"{status_text.progress_of(state)}; {documents}"
            totals += state.run_totals
            requests += state.together.done.requests
            code = max(code, int(state.is_damaged))
        elif step.rows is not None:
            fields[name] = {"is_finished": True, "rows": step.rows.rows}
            rows = step.rows.rows
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
        f"datatrove-ckpt status {root}/{next(iter(steps))}"
    )
    result = {"version": 2, "what": str(root), "steps": fields, "stale": stale}
    say_result(arguments.json, result, lines)
    return code


def report(root: Path, arguments: argparse.Namespace) -> int:
    from datatrove_ckpt.run_folder.report.page import steps_page

    states = {name: step.state() for name, step in step_folders(root).items()}
    runs = {name: state for name, state in states.items() if state is not None}
    page = steps_page(str(root), runs)
    return write_page(arguments.output, root / "checkpoints", page, plural(len(runs), "step"))


def verify(
    root: Path, arguments: argparse.Namespace, verify_run: Callable[[argparse.Namespace], int]
) -> int:
    """Verifies each step. Returns the worst exit code."""
    steps = step_folders(root)
    codes = []
    for name, step in steps.items():
        if step.has_begun:
            say(f"{name}:")
            codes.append(
                verify_run(argparse.Namespace(**{**vars(arguments), "what": str(root / name)}))
            )
        elif step.rows is None:
            say(f"{name}: not finished")
            codes.append(3)
        elif queries.is_damaged(step.rows):
            say(f"{name}: {step.rows.folder} is damaged. Remove the folder, and run again.")
            codes.append(1)
    for name, source in outdated(steps):
        say(f"{name}: was made of other rows than {source} has now. Run again: it says what to do.")
        codes.append(1)
    say(f"{plural(len(steps), 'step')} verified.")
    return 1 if 1 in codes else max(codes, default=0)


def show(root: Path, arguments: argparse.Namespace) -> int:
    from datatrove_ckpt.run_folder.documents import select_rows

    steps = step_folders(root)
    if arguments.sql is None:
        names = ", ".join(steps)
        raise ConfigError(f"{root}: has steps: name the folder of one, or give --sql: {names}.")
    query = queries.parse(arguments.sql, "--sql")
    tables = {name: select_rows(steps[name]) for name in query.tables if name in steps}
    with_rows = {name: table for name, table in tables.items() if table}
    say(queries.printed(query, with_rows, arguments.n))
    return 0
