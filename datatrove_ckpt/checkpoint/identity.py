"""The identity of a run (the settings and code that decide its output), and ``run.json``.

If another release describes the user's code differently, the code is not compared before the next
start. ``run.json`` is replaced atomically, so a crash leaves either description, and both are
accepted. Secrets are compared as hashes, because earlier releases wrote some of them in plain text.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import orjson
import xxhash

from datatrove_ckpt import __version__
from datatrove_ckpt.checkpoint import layout
from datatrove_ckpt.checkpoint.checksummed_lines import (
    RESTORE,
    Json,
    explained,
    is_count,
    read_checksummed_json,
)
from datatrove_ckpt.common import redaction
from datatrove_ckpt.common.formatting import number_range
from datatrove_ckpt.errors import CheckpointCorrupt, VersionMismatch

_USERS_FIELDS = (
    "imports",
    "uses",
    "rollout_fn",
    "shared_context",
    "output_writer",
    "default_generation_params",
    "model_kwargs",
)
"""The fields, and beginnings of dotted fields, whose names and values the user has chosen."""
ENDPOINT_MODELS = "endpoint_models"
"""The field with the names of the model at endpoints, except its name in the config."""
_ANSWERING = ("canned_answers", "model_kwargs", "models", "use_chat", ENDPOINT_MODELS)


NOT_ANSWERING = frozenset(
    """
    cache_salt metadata priority prompt_cache_key prompt_cache_retention safety_identifier
    service_tier store user
    """.split()  # noqa: SIM905
)
"""Parameters of requests that change the price, the wait and the records of a provider, but not the
answer. The identity and the keys of answers omit them.
"""


def without_model(name: str) -> str:
    head, _, inner = name.partition(".")
    if head in _USERS_FIELDS:
        return name
    return inner or name


def affects_answers(name: str) -> bool:
    return without_model(name) in _ANSWERING


@dataclass(frozen=True)
class RunIdentity:
    fields: Json
    """Plain JSON values. ``identity_version`` is the version of this description."""
    notes: dict[str, str] = field(default_factory=dict)
    """A note for the error if a field differs, by the name of the field."""
    accepted: list[Json] = field(default_factory=list)
    """Changes that the run accepts at its start: ``records`` of the results that it reuses."""

    @cached_property
    def stored(self) -> Json:
        return as_stored(self.fields)

    @property
    def digest(self) -> str:
        return xxhash.xxh3_64_hexdigest(comparable("", self.stored))


def fields_without_secrets(fields: Json) -> Json:
    secrets = redaction.environment_secrets(redaction.is_surely_secret).values()
    clean = {**fields}
    for name, value in fields.items():
        is_users = without_model(name).partition(".")[0] in _USERS_FIELDS
        if is_users and not name.endswith(" code"):
            clean[name] = redaction.without_secrets(name, value, secrets)
    return clean


def run_without_secrets(fields: Json) -> Json:
    clean = fields_without_secrets(fields)
    if accepted := fields.get("accepted_changes"):
        clean["accepted_changes"] = [{**change} for change in accepted]
        for change in clean["accepted_changes"]:
            field = str(change.get("field"))
            for key in change.keys() & {"old", "new"}:
                change[key] = fields_without_secrets({field: change[key]})[field]
    return clean


def as_stored(fields: Json) -> Json:
    stored: Json = orjson.loads(orjson.dumps(stamped(fields)))
    return fields_without_secrets(stored)


# ``format`` in ``run.json`` and ``job.json`` is the version of everything in a rank's folder. It
# grows with each release that an earlier one could misread. Each start writes the newest format.
#
#     1   0.1.0
#     2   history.jsonl, job.json, shard.json; times, work and hashes of the hub in commits, and
#         checksums of answers
#     3   a checksum in front of run.json, job.json and shard.json
#     4   results without a wrapper in journals (``documents.encode_finished``)

FORMAT = 4
"""The format that this version writes."""
FORMATS = range(4, FORMAT + 1)
"""The formats that this version reads. Other files of a folder may have lines of older formats."""
FORMAT_KEY = "format"
WRITTEN_BY = "written_by"
"""The key for the version of the package that wrote ``run.json`` or ``job.json``.

0.1.0 did not write it.
"""
NO_SETTINGS = frozenset({FORMAT_KEY, WRITTEN_BY, "owner", "accepted_changes", "forked"})
"""The keys of ``run.json`` and ``job.json`` that are no part of the identity.

Earlier builds of 0.2.0 wrote ``forked``.
"""


def stamped(fields: Json) -> Json:
    settings = {
        name: value for name, value in fields.items() if name not in (FORMAT_KEY, WRITTEN_BY)
    }
    return {FORMAT_KEY: FORMAT, WRITTEN_BY: __version__, **settings}


def settings_in(fields: Json) -> Json:
    return {name: value for name, value in fields.items() if name not in NO_SETTINGS}


def check_format(
    location: object, fields: object, supported: range = FORMATS, written_by: object = None
) -> None:
    """Checks that this version can continue the file of another version. A missing format passes.

    Raises:
        VersionMismatch: the format is newer, or too old.
    """
    if not isinstance(fields, dict):
        return
    number = fields.get(FORMAT_KEY)
    if type(number) is not int or number in supported:
        return
    writer = fields.get(WRITTEN_BY, written_by)
    author = "another datatrove-ckpt"
    get = "the version that wrote it"
    if isinstance(writer, str) and writer != __version__:
        author = f"datatrove-ckpt {writer}"
        get = f"{author} or newer"
    if 0 < number < supported.start:
        get = "datatrove-ckpt 0.2.0, which finishes such runs"
    raise VersionMismatch(
        f"{location} was written by {author} (format {number}). This is datatrove-ckpt "
        f"{__version__}, which reads format {number_range(supported.start, supported.stop)}. "
        f"Install {get}, and run again; or start a new run in other folders."
    )


_MAX_BYTES = 64 * 2**20
"""Limit of ``run.json``, which holds names, numbers and a few values of the user."""
IDENTITY_VERSION = "identity_version"
OUTPUT_FOLDER = "output_folder"
"""The key for the output folder of the last start. It is no part of the identity, because files may
be moved, but tasks that run at the same time must agree about it.
"""


def read_run(path: Path) -> Json:
    """Returns the content of ``run.json`` or ``job.json``, with hashes instead of secrets."""
    return run_without_secrets(run_with_secrets(path))


def run_with_secrets(path: Path | str) -> Json:
    with explained("read", path), open(path, "rb") as file:  # noqa: PTH123 (speed)
        data = file.read(_MAX_BYTES + 1)
    return parse_run(path, data)


def parse_run(path: Path | str, data: bytes) -> Json:
    try:
        if len(data) > _MAX_BYTES:
            raise ValueError(f"it has more than {_MAX_BYTES} bytes")
        fields = read_checksummed_json(data, FORMATS)
        check_format(path, fields)  # first, because a newer format may differ in the rest
        return check_run(fields)
    except ValueError as error:
        advice = f"{RESTORE}start this task over: move its folder away."
        if str(path).endswith(layout.JOB):
            advice = "Remove it: the next start makes it again from the tasks' run.json."
        raise CheckpointCorrupt(path, f" does not hold a run ({error}). {advice}") from error


def check_run(fields: Json) -> Json:
    if not is_count(fields.get("format")):
        raise ValueError("it has no format")
    if not isinstance(fields.get("owner", {}), dict):
        raise ValueError("its owner is damaged")
    return fields


# Values of a setting are compared as JSON, with three rules. The order of keys does not matter,
# except in a JSON schema and inside of a parameter of requests: engines answer in the order of a
# schema's properties, and requests keep it. True is not 1, because a request says ``true``; 1 is
# 1.0. Hashes of secrets that were made with two keys of a mirror, or one without, cannot be
# compared, and count as the same.


def comparable(name: str, value: object) -> bytes:
    return orjson.dumps(_comparable(name, value))


def _comparable(name: str, value: object) -> object:
    if isinstance(value, dict):
        left_out: Collection[str] = ()
        if name.endswith(("generation_params", "extra_body")):
            # "(order)" holds the order of the keys: see ``user_code.description.plain``.
            left_out = {*NOT_ANSWERING, "(order)"}
        # Parts of a request that hold a schema. A user's setting may have any name with "schema".
        is_ordered = re.search(r"response_format|structured_outputs|schema|params\.", name)
        keys = value if is_ordered else sorted(value)
        return {
            key: _comparable(f"{name}.{key}", value[key]) for key in keys if key not in left_out
        }
    if isinstance(value, list):
        return [_comparable(name, item) for item in value]
    if value is None and name.endswith("generation_params"):
        return {}
    if value == "float 0x0.0p+0":  # identities write 0.0 so, to separate it from -0.0
        return 0
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value
