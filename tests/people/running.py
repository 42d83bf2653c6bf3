"""Ways to run the job: to its end, killed, stopped, twice at once, on a full disk, while its output
changes.
"""

import itertools
import re
import shlex
import signal
import threading
from dataclasses import replace

from tests.people.commands import error_of
from tests.people.operations import action
from tests.people.oracle import check_verify
from tests.people.tampering import (
    cut_output_file,
    mix_up_output_files,
    remove_output_file,
    replace_output_file,
)

_CHANGES = (
    remove_output_file,
    cut_output_file,
    mix_up_output_files,
    mix_up_output_files,
    replace_output_file,
)


@action(weight=8, run=True)
def run(world, chance):
    return _said("run", world.run())


@action(weight=4, run=True)
def run_killed(world, chance):
    at = chance.randint(1, 15)
    ended = world.run(at=at, trap=lambda running: running[0].signal(signal.SIGKILL))
    return _said(f"run, kill -9 at request {at}", ended)


@action(run=True)
def run_stopped(world, chance):
    number, at = chance.choice((signal.SIGTERM, signal.SIGINT)), chance.randint(1, 15)
    return _said(
        f"run, {number.name} at request {at}",
        world.run(at=at, trap=lambda running: running[0].signal(number)),
    )


@action(run=True)
def run_killed_at_a_time(world, chance):
    seconds = chance.uniform(0, 0.2)
    timers = []

    def started(running):
        timers.append(threading.Timer(seconds, running[0].signal))
        timers[0].start()

    ended = world.run(at=1, trap=started)
    for timer in timers:
        timer.join()
    return _said(f"run, kill -9 {seconds:.3f} s after the first request", ended)


@action(run=True)
def run_on_a_full_disk(world, chance):
    size = chance.choice((0, 4, 8, 16, 32)) * 1024 + chance.randrange(4096)
    return _said(f"run, no file larger than {size} bytes", world.run(file_size=size))


@action(run=True)
def run_two(world, chance):
    return _said("run two at once", world.run(also=world.settings))


@action(run=True)
def run_two_different(world, chance):
    """Two people with two YAML files, and the same folders."""
    settings = world.settings
    what, also = chance.choice(
        (
            ("other tasks", replace(settings, tasks=settings.tasks + 1)),
            ("another model", replace(settings, model="model-c")),
            ("another prompt", replace(settings, prompt="Ask: {text}")),
        )
    )
    return _said(f"run two at once, the second with {what}", world.run(also=also))


@action(run=True)
def run_while_output_changes(world, chance):
    at, done = chance.randint(3, 20), []
    change = chance.choice(_CHANGES)

    def trap(running):
        world.runs = True
        done.append(change(world, chance))
        world.runs = False

    ended = world.run(at=at, trap=trap)
    return _said(f"run; at request {at}: {done[0] if done and done[0] else 'nothing'}", ended)


@action(run=True)
def run_retry(world, chance):
    if world.history.began_with is not None and world.settings != world.history.began_with[0]:
        return ""  # a retry may use another prompt, for its letters only
    world.history.exact_tokens = False  # a letter may have had answers, and its retry asks again
    return _said("run --retry-dead-letters", world.run(options=["--retry-dead-letters"]))


@action(weight=3, run=True)
def do_what_it_says(world, chance):
    """The command that the last message names, or the removals that it asks for; then the job
    again.
    """
    advice = re.search(r"datatrove-ckpt repair( [^\s`'\"]+)+", world.last_terminal)
    if advice is not None:
        argv = _command_of(advice[0])
        done = f"{shlex.join(['datatrove-ckpt', *argv])}: {_exit(world.command(argv))}"
    else:
        done = _remove_what_it_names(
            world, world.last_terminal[max(0, world.last_terminal.rfind("error: ")) :]
        )
    return f"{done}; {_said('run', world.run())}" if done else ""


def _remove_what_it_names(world, error):
    """Output files that the message wants deleted by name, or the markers and the output of tasks
    by number.
    """
    tasks = re.search(r"task ([\d, ]+) as complete", error)
    if "delete" not in error.lower() or "output" not in error:
        return ""
    ranks = [f"{int(number):05d}" for number in tasks[1].split(",")] if tasks is not None else []
    removed = [world.logs / "completions" / rank for rank in ranks]
    for path in world.output_files():
        if path.name in error or any(path.name.startswith(f"{rank}_") for rank in ranks):
            removed.append(path)
    for path in removed:
        path.unlink(missing_ok=True)
    world.touched()
    return (
        f"remove {', '.join(str(path.relative_to(world.folder)) for path in removed)}"
        if removed
        else ""
    )


_PLACES = ("checkpoints", "logs", "CHECKPOINTS", "LOGGING_DIR")


def _command_of(advice):
    """The arguments of a command inside a sentence: it ends with the last path or option."""
    words = advice.split()[1:]
    kept = words[:1]
    for before, word in itertools.pairwise(words):
        if not (word.startswith("--") or "/" in word or word.rstrip(".,:;") in _PLACES):
            break
        kept.append(
            word.rstrip(".,:;").replace("CHECKPOINTS", "checkpoints").replace("LOGGING_DIR", "logs")
        )
        if before.endswith((".", ":", ";")):
            break
    return kept


def _said(what, ended):
    return f"{what}: {', '.join(_exit(end) for end in ended)}"


def _exit(ended):
    error = error_of(ended)
    return f"exit {ended.code}" + (f" ({error})" if error else "")


@action(weight=1)
def look(world, chance):
    """Commands that only read."""
    if not world.checkpoints.exists():
        return ""
    argv = chance.choice(
        (["status", "checkpoints"], ["verify", "checkpoints", "--full"], ["verify", "checkpoints"])
    )
    ended = world.command(argv)
    if argv[0] == "verify" and world.is_finished:
        check_verify(world.truth(), ended)
    return f"{shlex.join(argv)}: {_exit(ended)}"
