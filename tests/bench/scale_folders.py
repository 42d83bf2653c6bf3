"""The folders of a large job in the middle of its run, for ``tests.bench.scale``.

Rank 0 is real: it runs twice, and is killed twice. Between the two, its commit is multiplied: each chunk's gets the
number, the names, and the position at which our reader stands there. The second run resumes after them and is killed in
the next chunk, so its journal, its request cache and whatever else this version writes are real, too. The other ranks
get copies of its files, with their own names in the commits. Output files and the other ranks' input are sparse: they
have names and sizes, and no content.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from datatrove_ckpt.checkpoint.commits import Commit, OutputFile, read_whole_commits
from datatrove_ckpt.checkpoint.layout import CACHE, COMMITS, journal_indices, journal_path, last_chunk_file, rank_folder
from datatrove_ckpt.checkpoint.lines import seal, unseal
from datatrove_ckpt.documents import fingerprint
from datatrove_ckpt.generation.as_read import as_read
from datatrove_ckpt.readers import JsonlReader
from datatrove_ckpt.testing import FakeServer

ROOT = Path(__file__).parents[2]
_LONGEST = 600.0  # seconds until a run of rank 0 must have done what it is killed for
_JOB = """\
executor:
  class_path: LocalPipelineExecutor
  init_args:
    tasks: RANKS
    workers: 1
    local_tasks: 1
    logging_dir: logs
    pipeline:
      - class_path: JsonlReader
        init_args: {data_folder: input}
      - class_path: InferenceRunner
        init_args:
          rollout_fn: {class_path: PromptRollout, init_args: {prompt: "Say {text}"}}
          config: {server_type: endpoint, endpoint_url: "URL", model_name_or_path: fake, max_concurrent_generations: 64}
          output_writer:
            class_path: JsonlWriter
            init_args: {output_folder: output, output_filename: "${rank}_chunk_${chunk_index}.jsonl", compression: null}
          checkpoints_local_dir: checkpoints
          records_per_chunk: PER_CHUNK
"""


@dataclass(frozen=True)
class Plan:
    """The job. Each rank has one input file, and as many documents as the others."""

    ranks: int = 10_000
    documents: int = 10**10
    records_per_chunk: int = 6_000
    done: float = 0.5
    """The share of the documents that is committed."""
    in_journal: int = 30
    """Documents in each rank's open chunk. A real one holds up to ``records_per_chunk``."""
    text_chars: int = 60
    history_minutes: int = 5_000
    """How long each rank has been at work, for its history."""

    @property
    def documents_per_rank(self) -> int:
        return self.documents // self.ranks

    @property
    def chunks(self) -> int:
        """Committed ones, of each rank."""
        return int(self.documents_per_rank * self.done) // self.records_per_chunk


def make(folder: Path, plan: Plan, say: Callable[[str], None] = lambda text: None) -> None:
    """Makes the job's folders. ``folder`` is new."""
    folder.mkdir(parents=True)
    say("input")
    write_input(folder, plan)
    say("rank 0, first run")
    commit = _first_run(folder, plan)
    say("rank 0, its commits")
    _multiply(folder, plan, commit)
    _lengthen_history(rank_folder(folder / "checkpoints", 0) / "history.jsonl", plan)
    say("rank 0, second run")
    _second_run(folder, plan)
    say("the other ranks")
    copies = _Copies(folder, plan)
    for rank in range(1, plan.ranks):
        copies.make(rank)


def write_job(folder: Path, plan: Plan, url: str) -> Path:
    """The YAML file for a server that listens there. The address is no part of a run's identity."""
    text = _JOB.replace("RANKS", str(plan.ranks)).replace("PER_CHUNK", str(plan.records_per_chunk))
    path = folder / "job.yaml"
    path.write_text(text.replace("URL", url))
    return path


def input_name(rank: int) -> str:
    return f"documents-{rank:05d}.jsonl"


def write_input(folder: Path, plan: Plan) -> None:
    """Rank 0's file is whole. All have the same size."""
    (folder / "input").mkdir()
    size = 0
    with (folder / "input" / input_name(0)).open("w") as file:
        for number in range(plan.documents_per_rank):
            text = f"{number:09d}".ljust(plan.text_chars, ".")
            size += file.write(f'{{"id": "{number:09d}", "text": "{text}"}}\n')
    for rank in range(1, plan.ranks):
        _write_sparse(folder / "input" / input_name(rank), size)


def _write_sparse(path: Path, size: int) -> None:
    with path.open("wb") as file:
        file.truncate(size)


# rank 0 --------------------------------------------------------------------------------------------------------------


def _first_run(folder: Path, plan: Plan) -> Commit:
    """Kills rank 0 when its first chunk is committed. Returns that commit."""
    path = rank_folder(folder / "checkpoints", 0) / COMMITS
    with FakeServer(hold_after=plan.records_per_chunk + 1) as server:
        write_job(folder, plan, server.url)
        with started_rank(folder) as process:
            wait_until(lambda: path.exists() and path.read_bytes().endswith(b"\n"), process)
    return read_whole_commits(path)[0]


def _multiply(folder: Path, plan: Plan, first: Commit) -> None:
    """Commits of all chunks that are done, and nothing of the next one."""
    rank = rank_folder(folder / "checkpoints", 0)
    for index in journal_indices(rank):
        journal_path(rank, index).unlink()
    for path in rank.glob(f"{CACHE}*"):
        path.unlink()
    (rank / COMMITS).write_bytes(b"".join(seal(commit.to_json()) for commit in _commits(folder, plan, first)))
    last_chunk_file(rank.parent, 0).write_text(str(plan.chunks - 1))
    _write_outputs(folder, first, 0, range(1, plan.chunks))


def _commits(folder: Path, plan: Plan, first: Commit) -> Iterator[Commit]:
    reader = JsonlReader(str(folder / "input"))
    # Its first document is the first one of the rank, as in the run.
    for number, document in enumerate(reader.run(rank=0, world_size=plan.ranks), 1):
        index, rest = divmod(number, plan.records_per_chunk)
        if rest:
            continue
        yield replace(
            first,
            chunk_index=index - 1,
            first_ordinal=number - plan.records_per_chunk,
            files=[replace(file, path=_output_name(file, 0, index - 1)) for file in first.files],
            position=(first.position or {}) | reader.state_dict(),
            last_input=fingerprint(as_read(document).data),
        )
        if index == plan.chunks:
            return


def _output_name(file: OutputFile, rank: int, chunk: int) -> str:
    return file.path.replace("00000_chunk_00000", f"{rank:05d}_chunk_{chunk:05d}")


def _write_outputs(folder: Path, first: Commit, rank: int, chunks: range) -> None:
    for chunk in chunks:
        for file in first.files:
            _write_sparse(folder / "output" / _output_name(file, rank, chunk), file.size)


def _lengthen_history(path: Path, plan: Plan) -> None:
    """A minute line for each minute: rank 0's first one, with numbers that grow. The second run thins them."""
    if not path.exists():
        return
    records = [json.loads(body) for line in path.read_bytes().splitlines(keepends=True) if (body := unseal(line))]
    (model,) = [record for record in records if record["k"] == "progress"][:1]
    started, lines = model["at"] - 60 * plan.history_minutes, []
    for record in [records[0], *([model] * plan.history_minutes)]:
        share = len(lines) / plan.history_minutes
        numbers = {
            name: [value or round(share * plan.documents_per_rank * plan.done) for value in record[name]]
            for name in ("d", "all", "own", "q")
            if name in record
        }
        lines.append(
            seal(json.dumps(record | numbers | {"at": started + 60 * len(lines)}, separators=(",", ":")).encode())
        )
    path.write_bytes(b"".join(lines))


def _second_run(folder: Path, plan: Plan) -> None:
    """Kills rank 0 in the middle of the chunk after the last committed one."""
    journal = journal_path(rank_folder(folder / "checkpoints", 0), plan.chunks)
    with FakeServer(hold_after=plan.in_journal) as server:
        write_job(folder, plan, server.url)
        with started_rank(folder) as process:
            wait_until(lambda: journal.exists() and journal.read_bytes().count(b"\n") >= plan.in_journal, process)


@contextmanager
def started_rank(folder: Path, rank: int = 0) -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs one rank of job.yaml as a cluster's task does. It is killed at the end."""
    command = [sys.executable, "-m", "tests.bench.scale_rank", str(folder), str(rank)]
    with (folder / "rank.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    """Polls. Fails if the process ends first."""
    deadline = time.monotonic() + _LONGEST
    while not condition():
        if process.poll() is not None:
            raise RuntimeError(f"the process ended with {process.returncode} too early; see rank.log in its folder")
        if time.monotonic() > deadline:
            raise TimeoutError("it took too long")
        time.sleep(0.005)


# the others ----------------------------------------------------------------------------------------------------------


class _Copies:
    """Makes ranks from the files of rank 0, which are read once."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self._folder, self._plan = folder, plan
        self._checkpoints = folder / "checkpoints"
        source = rank_folder(self._checkpoints, 0)
        self._files = {path.name: path.read_bytes() for path in source.iterdir() if path.is_file()}
        self._commits = [commit.to_json() for commit in read_whole_commits(source / COMMITS)]
        self._first = read_whole_commits(source / COMMITS)[0]
        self._last_chunk = last_chunk_file(self._checkpoints, 0).read_bytes()

    def make(self, rank: int) -> None:
        target = rank_folder(self._checkpoints, rank)
        target.mkdir(mode=0o700)
        for name, content in self._files.items():
            (target / name).write_bytes(self._commits_of(rank) if name == COMMITS else content)
        last_chunk_file(self._checkpoints, rank).write_bytes(self._last_chunk)
        _write_outputs(self._folder, self._first, rank, range(self._plan.chunks))

    def _commits_of(self, rank: int) -> bytes:
        names = [(b'"00000_chunk_', b'"%05d_chunk_' % rank), (b'"shard":[0,', b'"shard":[%d,' % rank)]
        names.append((input_name(0).encode(), input_name(rank).encode()))
        lines = []
        for body in self._commits:
            for old, new in names:
                body = body.replace(old, new)
            lines.append(seal(body))
        return b"".join(lines)
