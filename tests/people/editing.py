"""Changes of the settings, of the input, and of the endpoint, and the way back."""

from dataclasses import replace

from tests.people.endpoint import Outage
from tests.people.inputs import (
    DROPPED,
    LEAVES,
    OUTSIDE,
    RAISES,
    REJECTED,
    UNWRITABLE,
    Row,
)
from tests.people.operations import action
from tests.people.settings import BY_LANGUAGE, Settings

_STATUSES = (503, 503, 429, 500, 502, 401, 403, 404, 402, 405, 421)

# Settings ----------------------------------------------------------------------------------------


def _changing(setting, values):
    """To another one of the values."""

    def change(world, chance):
        value = chance.choice(
            [other for other in values if other != getattr(world.settings, setting)]
        )
        world.settings = replace(world.settings, **{setting: value})
        return f"{setting}: {value!r}"

    change.__name__ = f"change_{setting}"
    return change


action(weight=3)(_changing("tasks", (0, 1, 2, 3, 4, 5)))
action(weight=3)(_changing("model", ("model-a", "model-b")))
action(weight=3)(_changing("prompt", ("Say: {text}", "Repeat {text}", "{text}")))
action()(_changing("text_key", ("text", "content")))
action()(_changing("on_document_error", ("stop", "dead_letter")))
action(weight=1)(_changing("records_per_chunk", (1, 2, 3, 4)))
action(weight=1)(_changing("retry_errors", (False, True)))
action(weight=1)(_changing("rollouts", (1, 2)))
action(weight=1)(_changing("mirror", (False, True)))


@action(weight=1)
def spell_folder(world, chance):
    """Names a folder by a variable or by ~: it must be the same folder, or be refused."""
    place = chance.choice(("$JOB/", "${JOB}/", "~/"))
    name = chance.choice(("output_folder", "checkpoints_folder", "logging_dir"))
    folder = getattr(Settings(), name)
    world.settings = replace(world.settings, **{name: place + folder})
    return f"{name}: {place}{folder}"


# Input -------------------------------------------------------------------------------------------


@action(weight=3)
def add_file(world, chance):
    name = chance.choice(
        [name for name in ("0.jsonl", "bb.jsonl", "y.jsonl", "z.jsonl") if name not in world.inputs]
        or ["z.jsonl"]
    )
    world.add_file(name, world.rows(chance, chance.randint(1, 5)))
    return f"add input {name} with {len(world.inputs[name].rows)} documents"


@action(weight=3)
def append_rows(world, chance):
    number = chance.randint(1, 4)
    rows = world.rows(chance, number)
    return _edit(
        world, chance, f"append {number} documents", lambda file: file.with_rows(file.rows + rows)
    )


@action()
def remove_file(world, chance):
    name = _some_input(world, chance)
    if not name:
        return ""
    del world.inputs[name]
    return f"remove input {name}"


@action()
def remove_row(world, chance):
    def without(file):
        place = chance.randrange(len(file.rows)) if file.rows else 0
        return file.with_rows(file.rows[:place] + file.rows[place + 1 :])

    return _edit(world, chance, "remove a document", without)


@action()
def edit_row(world, chance):
    """Makes one text longer."""

    def edited(file):
        rows = list(file.rows)
        if rows:
            place = chance.randrange(len(rows))
            rows[place] = replace(
                rows[place], text=rows[place].text + " " + "y" * chance.randint(1, 2000)
            )
        return file.with_rows(tuple(rows))

    return _edit(world, chance, "edit a document", edited)


@action()
def edit_row_keeping_size(world, chance):
    """Until the job is finished, a run does not see this in a file that was read to its end: both
    texts are right.
    """
    name = _some_input(world, chance)
    rows = list(world.inputs[name].rows) if name else []
    if not rows:
        return ""
    place = chance.randrange(len(rows))
    row = rows[place]
    if not world.history.has_finished:
        world.history.older_texts.setdefault(row.id, set()).add(row.text)
    rows[place] = replace(row, text=row.text[:-1] + ("y" if row.text[-1] == "z" else "z"))
    world.inputs[name] = world.inputs[name].with_rows(tuple(rows))
    return f"input {name}: edit a document, and keep the size"


@action(weight=1)
def reorder_rows(world, chance):
    def reordered(file):
        return file.with_rows(tuple(chance.sample(file.rows, len(file.rows))))

    return _edit(world, chance, "reorder the documents", reordered)


@action(weight=6)
def write_in_another_form(world, chance):
    form = chance.choice(("gz", "zst", "cut gz", "cut zst", "array", "plain text"))
    return _edit(world, chance, f"write as {form}", lambda file: replace(file, form=form))


@action(weight=1)
def damage_line(world, chance):
    return _edit(
        world, chance, "add half a line", lambda file: replace(file, damaged=file.damaged + 1)
    )


@action(weight=3)
def add_odd_document(world, chance):
    name = _some_input(world, chance)
    if not name:
        return ""
    what, extra = chance.choice(
        (
            (REJECTED, {}),
            (REJECTED, {}),
            (DROPPED, {}),
            (LEAVES, {}),
            (RAISES, {}),
            (UNWRITABLE, {}),
            ("rank 7", {"rank": 7}),
            ("rank 0", {"rank": "00000"}),
            ("chunk 0", {"chunk_index": 0}),
            ("outside", {"lang": "../outside"}),
            ("outside", {"lang": str(world.folder / "outside")}),
            ("two levels", {"lang": "de/at"}),
        )
    )
    if what == "outside" and world.settings.output_filename == BY_LANGUAGE:
        what = OUTSIDE
    (row,) = world.rows(chance, 1)
    row = Row(row.id, f"{what} {row.text}", {**row.extra, **extra})
    place = chance.randint(0, len(world.inputs[name].rows))
    rows = world.inputs[name].rows
    world.inputs[name] = world.inputs[name].with_rows((*rows[:place], row, *rows[place:]))
    return f"add to {name}: {what}"


def _edit(world, chance, what, edit):
    name = _some_input(world, chance)
    if not name:
        return ""
    world.inputs[name] = edit(world.inputs[name])
    return f"input {name}: {what}"


def _some_input(world, chance):
    return chance.choice(sorted(world.inputs) or [""])


# The endpoint ------------------------------------------------------------------------------------


@action(weight=3)
def outage(world, chance):
    status, after, lasts = (
        chance.choice(_STATUSES),
        chance.choice((0, 0, 1, 3, 7)),
        chance.choice((None, None, 1, 4)),
    )
    world.endpoint.outage = Outage(status, after, lasts)
    until = f" for {lasts} requests" if lasts else ""
    return f"after {after} requests the endpoint answers {status}{until}"


@action(weight=1)
def endpoint_away(world, chance):
    world.away = True
    return "the endpoint is away"


@action()
def odd_usage(world, chance):
    """Counts of tokens that are none."""
    odd = chance.choice((-1, "7", "\N{SNOWMAN}", 0.5, 1e300, 2**53, True, None, [], {"a": [None]}))
    world.endpoint.server.usage = {
        "prompt_tokens": odd,
        "completion_tokens": odd,
        "details": {"cost": odd},
        "x": odd,
    }
    world.history.exact_tokens = False
    return f"usage: {odd!r}"


@action(weight=6)
def put_back(world, chance):
    world.put_back()
    return "settings and input as at the beginning; the endpoint is well"
