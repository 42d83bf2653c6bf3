"""World: a folder with input, a YAML file, checkpoints, logs and output, and the endpoint: what
people work with.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass, field, fields
from pathlib import Path

from tests.people.endpoint import Endpoint
from tests.people.inputs import LEAVES, UNWRITABLE, InputFile, Row, expected, write_inputs
from tests.people.oracle import Failure, check_end, check_success
from tests.people.settings import BY_LANGUAGE, BY_RANK, NOWHERE, Settings, job_yaml

LIMIT = 300.0  # seconds that a command may take, on a busy machine
_STAGING = ".datatrove-ckpt-staging"
_ROLLOUT = """\
import sys
import threading
from dataclasses import dataclass

from datatrove_ckpt.rollouts import PromptRollout


class Unprintable(Exception):
    def __str__(self):
        raise ValueError("an exception that cannot be printed")


@dataclass
class Picky(PromptRollout):
    async def __call__(self, document, generate, **shared):
        if "LEAVE" in document.text:
            sys.exit(0)
        if "RAISE" in document.text:
            raise Unprintable("\\ud800")
        if "UNWRITABLE" in document.text:
            document.metadata["lock"] = threading.Lock()
        answer = await PromptRollout.__call__(self, document, generate)
        return None if "DROP" in document.text else answer
"""


@dataclass
class Tally:
    """What was tried."""

    sequences: int = 0
    operations: int = 0
    runs: int = 0
    successes: int = 0
    finished_in_order: int = 0


@dataclass
class History:
    """What happened to a job since it was started from nothing.

    Attributes:
        began_with: settings and input at the run that made the checkpoints; None: there are none.
        finished_with: settings and input at the last run, if that ended with exit code 0.
        disturbed: some requests may have been sent more than once since the run began.
        in_order: whether that run, continued with these settings and this input, must be able to
            finish: nobody has touched checkpoints or output, and no run has gone on with anything
                else.
        has_finished: a run has ended with exit code 0.
        mirror_has_all: every run had the mirror, and the last one ended by itself: a lost node
            costs nothing.
        node_lost: the checkpoints are on the mirror only.
        exact_tokens: all answers had counts of tokens.
        older_texts: other texts that documents may have, by id: they were edited in a way that no
            run sees.
        requests_before: requests to the endpoint before.
    """

    began_with: tuple[Settings, dict[str, InputFile]] | None = None
    finished_with: tuple[Settings, dict[str, InputFile]] | None = None
    disturbed: bool = False
    in_order: bool = True
    has_finished: bool = False
    mirror_has_all: bool = True
    node_lost: bool = False
    exact_tokens: bool = True
    older_texts: dict[str, set[str]] = field(default_factory=dict)
    requests_before: int = 0


class World:
    """A job as people have it, and what they may do with it.

    Attributes:
        settings, inputs: what the YAML file and the input folder hold at the next run.
        away: the YAML file names an address where nobody serves.
        history: what happened to the job so far.
    """

    def __init__(self, folder, commands, chance, tally=None):
        self.folder = folder
        self.output, self.checkpoints = folder / "output", folder / "checkpoints"
        self.logs, self.mirror = folder / "logs", folder / "mirror"
        self.kept = folder / "copy of checkpoints"  # made by hand
        self.endpoint = Endpoint()
        self.tally = tally or Tally()
        self.away = False
        self.runs = False  # a run is at work while something else is done
        self.history = History()
        self.last_terminal = ""
        self._commands = commands
        self._next_id = 0
        self.settings = Settings(
            tasks=chance.choice((1, 1, 2, 3)),
            on_document_error=chance.choice(("stop", "dead_letter")),
            records_per_chunk=chance.randint(1, 4),
            max_concurrent_generations=chance.randint(1, 4),
            output_filename=chance.choice((*[BY_RANK] * 3, BY_LANGUAGE)),
            rollouts=chance.choice((1, 1, 1, 2)),
            workers=chance.choice((*[1] * 15, 2)),
            mirror=chance.random() < 0.25,
        )
        self.inputs = {}
        for name in "abcd"[: chance.randint(1, 4)]:
            self.add_file(f"{name}.jsonl", self.rows(chance, chance.randint(1, 7)))
        (folder / "terminals").mkdir(parents=True)
        (folder / "picky.py").write_text(_ROLLOUT)

    def __enter__(self):
        self.endpoint.server.__enter__()
        return self

    def __exit__(self, kind, error, trace):
        self.endpoint.server.__exit__(kind, error, trace)
        shutil.rmtree(self.folder, ignore_errors=True)

    def __str__(self):
        changed = [
            f"{item.name} {getattr(self.settings, item.name)!r}"
            for item in fields(Settings)
            if getattr(self.settings, item.name) != item.default
        ]
        files = [
            f"{file.file_name} with {len(file.rows)} documents" for file in self.inputs.values()
        ]
        return f"a job: {', '.join([*changed, *files])}"

    # The folder ----------------------------------------------------------------------------------

    def output_files(self):
        files = (Path(folder) / name for folder, _, names in os.walk(self.output) for name in names)
        found = sorted(
            path for path in files if path.suffix == ".jsonl" and _STAGING not in path.parts
        )
        if self.runs:
            # Between the appearance of a file and the look at its time of change, nobody is fast
            # enough to change it.
            logs = b"".join(path.read_bytes() for path in self.checkpoints.rglob("commits.jsonl"))
            found = [path for path in found if path.name.encode() in logs]
        return found

    def rows(self, chance, number):
        """New documents. Lengths vary widely, so that no two files have one size by chance."""
        rows = []
        for _ in range(number):
            self._next_id += 1
            text = f"text {self._next_id} " + "x" * chance.randrange(1000)
            rows.append(Row(f"doc-{self._next_id}", text, {"lang": chance.choice(("de", "en"))}))
        return tuple(rows)

    def add_file(self, name, rows):
        self.inputs[name] = InputFile(name, rows)

    def start_over(self):
        """What people do when they want a new run: all that the old one wrote is removed."""
        for path in self.folder.iterdir():
            if path.name not in ("input", "picky.py", "terminals"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        self.history = History(
            exact_tokens=self.endpoint.server.usage is None, requests_before=self.endpoint.requests
        )

    def put_back(self):
        """Settings and input as at the beginning of the run; the endpoint is there and well."""
        if self.history.began_with is not None:
            self.settings, inputs = self.history.began_with
            self.inputs = dict(inputs)
        self.away, self.endpoint.outage, self.endpoint.server.usage = False, None, None

    def touched(self):
        """Somebody touched checkpoints or output: the run may have to be refused from now on."""
        self.history.in_order = False

    # Runs ----------------------------------------------------------------------------------------

    def run(self, *, at=0, trap=None, file_size=None, also=None, options=()):
        """Runs the job, and holds every end against the oracle.

        Args:
            at: number of the request before whose answer ``trap`` is called with the commands under
                way.
            file_size: the largest file that can be written, in bytes.
            also: settings of a second command to start at once.
            options: further arguments of the command.
        """
        write_inputs(self.folder / "input", self.inputs)
        jobs = {"job.yaml": self.settings} | ({"job2.yaml": also} if also is not None else {})
        now = self.settings, dict(self.inputs)
        had_begun = self.history.node_lost or any(self.checkpoints.glob("*/run.json"))
        requests = self.endpoint.requests
        running = []
        self.endpoint.set_trap(at, (lambda: trap(running)) if trap is not None else None)
        url = NOWHERE if self.away else self.endpoint.server.url
        for name, settings in jobs.items():
            (self.folder / name).write_text(json.dumps(job_yaml(settings, url)))
            running.append(self._start(["run", name, *options], file_size))
        ended = [command.wait(LIMIT) for command in running]
        self.endpoint.set_trap(0, None)
        self.tally.runs += len(running)
        self.last_terminal = "\n".join(end.terminal for end in ended)
        history, codes = self.history, [end.code for end in ended]
        if options or any(codes):
            history.disturbed = True
        if not had_begun and any(self.checkpoints.glob("*/run.json")):
            history.began_with = now
        elif history.began_with not in (None, now) and (
            0 in codes or self.endpoint.requests > requests
        ):
            history.in_order = False  # it went on with what is new
        if also not in (None, self.settings):
            history.in_order = False  # either may have begun
        history.mirror_has_all &= (
            self.settings.mirror
            and file_size is None
            and all(code is not None and code >= 0 for code in codes)
        )
        self._check(list(jobs.values()), ended, may_be_killed=trap is not None)
        history.finished_with = None if any(codes) else now
        history.has_finished |= 0 in codes
        return ended

    def command(self, argv):
        """Another command of ``datatrove-ckpt``."""
        self.history.disturbed = True
        ended = self._start(argv).wait(LIMIT)
        check_end(ended)
        return ended

    @property
    def is_finished(self):
        """The last run has finished the job as it is now, and nobody has touched what it wrote."""
        return self.history.in_order and self.history.finished_with == (self.settings, self.inputs)

    def truth(self, settings=None):
        settings = settings or self.settings
        impossible = ""
        if settings.text_key != "text" and any(file.rows for file in self.inputs.values()):
            impossible = f"no line has the key {settings.text_key!r}"
        elif settings.tasks < 1:
            impossible = f"there are {settings.tasks} tasks"
        elif not self.inputs:
            impossible = "there is no input"
        return expected(
            self.inputs,
            settings.model,
            settings.prompt,
            impossible,
            rollouts=settings.rollouts,
            older_texts=self.history.older_texts,
        )

    def must_finish(self):
        """Whether a run in order can reach its end: nothing in settings or input forbids it."""
        if self.history.began_with is None or not self.history.in_order:
            return False
        settings, inputs = self.history.began_with
        rows = [row for file in inputs.values() for row in file.rows]
        return (
            settings.tasks > 0
            and settings.text_key == "text"
            and all(
                file.is_readable and (file.rows or not file.damaged) for file in inputs.values()
            )
            and any(rows)
            and not any(LEAVES in row.text for row in rows)
            and not any(UNWRITABLE in row.text for row in rows)
            and (
                settings.on_document_error != "stop"
                or not any(row.outcome == "dead" for row in rows)
            )
            and not any("/" in row.extra["lang"] for row in rows)
        )

    def _check(self, jobs, ended, may_be_killed):
        for end in ended:
            check_end(end)
        for settings, end in zip(jobs, ended, strict=True):
            if end.code == 0 and not end.is_cut:
                self.tally.successes += 1
                truth = self.truth(settings)
                least, most = truth.requests
                if self.history.disturbed:
                    most = self.endpoint.requests - self.history.requests_before
                check_success(
                    truth,
                    self.output,
                    self.checkpoints,
                    end.terminal,
                    (min(least, most), most),
                    self.history.exact_tokens,
                )
            elif end.code is not None and end.code < 0 and not may_be_killed:
                raise Failure("died", f"signal {-end.code} ended it")

    def _start(self, argv, file_size=None):
        home = {"HOME": str(self.folder), "JOB": str(self.folder)}
        return self._commands.start(argv, self.folder, self.folder / "terminals", file_size, home)
