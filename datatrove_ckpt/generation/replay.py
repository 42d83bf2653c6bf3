"""The replay check: runs the current rollout on recorded documents of a run, with their answers.

Another request or another result shows that the code, or a file, a package or a variable that it
uses, has changed. It is the ordinary rollout (``DocumentRollouts``): its answers are those of the
record, and nothing is sent.

    the code's text   a replay    what happens
    same              same        the run goes on
    same              differs     refused, with the difference. Only in times, ids, addresses or, in
                                  this process, the order of words: the run goes on with a warning
    changed           differs     refused: the difference, then what changed
    changed           same        refused, with the number of documents that are the same

A rollout that does not repeat itself ends the recording of its run for good, without a refusal: a
document is replayed once when it is recorded, and a difference is looked for in a new process
before it refuses a run. What is slow decides nothing.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import dill  # type: ignore[import-untyped]
from loguru import logger

from datatrove_ckpt.checkpoint.chunks import Chunk, ChunkSlot
from datatrove_ckpt.checkpoint.compare import SettingChange, is_of_code
from datatrove_ckpt.checkpoint.history import ReplayResult
from datatrove_ckpt.checkpoint.job_file import record_change
from datatrove_ckpt.checkpoint.journal import FinishedDocument
from datatrove_ckpt.checkpoint.open_checkpoint import OpenCheckpoint
from datatrove_ckpt.checkpoint.request_cache import AnswerKey, CachedAnswer
from datatrove_ckpt.common.counts import WorkCounts
from datatrove_ckpt.common.formatting import plural, safe_text
from datatrove_ckpt.common.redaction import masked, redact
from datatrove_ckpt.common.threads import in_threads
from datatrove_ckpt.errors import CheckpointMismatch
from datatrove_ckpt.generation.document_runs import DocumentRollouts
from datatrove_ckpt.generation.prefetch import SourceDocument
from datatrove_ckpt.generation.quality import AnswerQuality
from datatrove_ckpt.generation.recorded_documents import (
    RecordedDocument,
    RecordedDocuments,
    RecordingAnswers,
    process_names,
)
from datatrove_ckpt.generation.requests import RankContext
from datatrove_ckpt.generation.results import ResultEncoder
from datatrove_ckpt.generation.runner_settings import RunnerSettings
from datatrove_ckpt.generation.side_effects import ROLLOUTS, EffectWatch, ReplayWatch, rollouts_run
from datatrove_ckpt.generation.user_rollout import bind_shared, shared_arguments
from datatrove_ckpt.output.document_codec import decode
from datatrove_ckpt.output.file_names import FileNames
from datatrove_ckpt.process import event_loop
from datatrove_ckpt.process.event_loop import in_own_thread
from datatrove_ckpt.process.host_loop import host_loop
from datatrove_ckpt.process.preemption import Preemption
from datatrove_ckpt.process.shutdown import Shutdown, wait_until_cancelled
from datatrove_ckpt.rollouts import Rollout

SECONDS = 1.0  # of a check at a start, and of the replay of a document that is recorded
_FRESH_SECONDS = 60.0
_RECORDING_SECONDS = 5.0  # of all replays of an attempt
_FIRST_RECORD_AFTER = 0.5  # seconds
_RECORD_EVERY = 8.0  # seconds, at most: a kill loses what they would have recorded
_EXCERPT = 60  # characters
_CHANGING = re.compile(
    r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}|\b[0-9a-f]{32,64}\b|\b0x[0-9a-f]{6,}"
    r"|\b\d{4}[-/.]\d\d?[-/.]\d\d?|\b\d\d?[./]\d\d?[./]\d{2,4}\b"
    r"|\b20[2-9]\d[01]\d[0-3]\d\b(?:[-_T]\d{4,6}\b)?|\b1[5-9]\d{8}(?:\d{3})?(?:\.\d+)?\b"
    r"|(?:\b|T)\d\d?:\d\d(?::\d\d(?:\.\d+)?)?(?:Z| ?[AP]M|[+-]\d\d:?\d\d)?\b|/tmp/\S+"
    r"|\b(?:Mon|Tues?|Wed(?:nes)?|Thur?s?|Fri|Sat(?:ur)?|Sun)(?:day)?\b"
    r"|(?:\b\d\d?(?:st|nd|rd|th)?\.?(?: of)? )?\b(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?"
    r"|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sept?(?:ember)?|Oct(?:ober)?|Nov(?:ember)?|Dec(?:ember)?)\b"
    r"(?: \d\d?(?:st|nd|rd|th)?\b,?)?(?: \d{4})?"
)
"""What differs at each start: ids, hashes, addresses, times, dates, temporary paths."""


@contextmanager
def replays_of(
    step: RunnerSettings, preemption: Preemption, root: Path, rank: int = -1, share: float = 1.0
) -> Iterator[Replays]:
    """Args:
    share: the rank's part of the run's documents.
    """
    recorded = RecordedDocuments(root, rank, share)
    if why_not_replayed(step) or not event_loop.is_audited(asyncio.get_running_loop()):
        recorded.is_stopped = True
    with shared_arguments(step.shared_context, preemption) as shared, rollouts_run():
        yield Replays(step, bind_shared(step.rollout_fn, shared), recorded)
        effect = recorded.waits.effect or ROLLOUTS.effect
        if effect and not recorded.is_stopped:
            recorded.end(f"it was seen to {effect}")


def why_not_replayed(step: RunnerSettings) -> str:
    if step.checkpoints_local_dir is None:
        return "there is no checkpoint"
    if not step.replay_check:
        return "replay_check is false"
    if step.rollout_version is not None:
        return "rollout_version takes its place"
    if str(getattr(step.rollout_fn, "__module__", "")).startswith("datatrove_ckpt.rollouts"):
        return "a ready-made rollout is compared by its settings"
    if step.retry_dead_letters:
        return "dead letters are retried with any settings"
    return ""


@dataclass
class Difference:
    """A part of a request or result of a replay that differs."""

    document: RecordedDocument
    path: str
    old: object
    new: object

    @property
    def kind(self) -> str:
        """Is "changing" if it differs at each start, "order" if only the order of words differs,
        or "real".
        """
        old = self.old
        new = self.new
        before = _words(old, self.document.process)
        after = _words(new, process_names())
        is_close = (
            isinstance(old, float)
            and isinstance(new, float)
            and math.isclose(old, new, rel_tol=1e-5)  # numbers that another processor computes
        )
        if before == after or is_close:
            return "changing"
        return "order" if sorted(before) == sorted(after) else "real"

    @property
    def new_words(self) -> list[str]:
        """The words for another process, whose order may differ: an edit comes beside it."""
        words = _words(self.new, process_names())
        return words if self.kind == "order" else sorted(words)

    @property
    def excerpts(self) -> list[str]:
        texts = [redact(_text(self.old)), redact(_text(self.new))]
        same = len(os.path.commonprefix(texts))  # noqa: RUF071 (of characters)
        start = max(0, same - _EXCERPT // 3)
        dots = "..." if start else ""
        return [dots + text[start : start + _EXCERPT] for text in texts]

    def __str__(self) -> str:
        old, new = self.excerpts
        return f"document {redact(self.document.id)!r}: {self.path}: {old!r} -> {new!r}"


def _words(value: object, process: list[str]) -> list[str]:
    text = _text(value)
    for name in filter(None, process):
        text = re.sub(rf"\b{re.escape(name)}\b", "#", text)
    return re.findall(r"\w+|[^\w\s]", _CHANGING.sub("#", text))


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


class NotReplayable(Exception):
    """No start may run the rollout again for documents that are done."""


def _raise_if_seen(*watches: EffectWatch) -> None:
    for watch in watches:
        if watch.effect:
            raise NotReplayable(f"it was seen to {watch.effect}")


class ReplayedAnswers(RecordingAnswers):
    """A recorded document's answers.

    Attributes:
        unknown: done once the rollout has sent a request that the record lacks. This request waits:
            a rollout may swallow an error.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.random = self.each_step = _OwnRandom(self.document.draws)
        self.unknown = asyncio.get_running_loop().create_future()

    async def cached(self) -> dict[AnswerKey, CachedAnswer]:
        return self.known

    async def saved(self, key: AnswerKey) -> CachedAnswer | None:
        answer = await super().saved(key)
        if answer is None:
            self.unknown.cancel()
            await wait_until_cancelled()
        await asyncio.sleep(0)
        return answer


class _OwnRandom:
    """The state of ``random`` of a replay, from which other documents draw.

    Attributes:
        seconds: for which the replay has kept the event loop.
    """

    seconds = 0.0

    def __init__(self, draws: list[int]) -> None:
        own = random.Random(0)  # an edit that begins to draw numbers draws the same at each start
        if draws:
            own.setstate((own.VERSION, tuple(draws), None))
        self._state = own.getstate()

    def __enter__(self) -> None:
        self._started = time.monotonic()
        self._outer = random.getstate()
        random.setstate(self._state)

    def __exit__(self, *error: object) -> None:
        self._state = random.getstate()
        random.setstate(self._outer)
        self.seconds += time.monotonic() - self._started


@dataclass
class _Reporter:
    own: WorkCounts = field(default_factory=WorkCounts)

    def example(self, *example: str) -> None:
        pass


@dataclass
class Verdict:
    """What the replays have shown.

    Attributes:
        same: number of documents with the same requests and results.
        undecided: why other documents were not replayed.
    """

    same: int = 0
    differences: list[Difference] = field(default_factory=list)
    undecided: str = ""

    @property
    def real(self) -> list[Difference]:
        return [difference for difference in self.differences if difference.kind != "changing"]

    @property
    def is_same(self) -> bool:
        return not (self.differences or self.undecided)

    def __str__(self) -> str:
        if self.real:
            number = plural(len(self.differences) + self.same, "recorded document")
            return f"{self.real[0]} ({len(self.real)} of {number})"
        if self.undecided:
            return f"nothing is decided, because {self.undecided}"
        if self.differences:
            return (
                "requests or results differ, but only in what differs at each start (times, ids, "
                f"addresses): {self.differences[0]}"
            )
        verb = "gets" if self.same == 1 else "get"
        return f"{plural(self.same, 'recorded document')} {verb} the same requests and results"


@dataclass(eq=False)
class Replays:
    step: RunnerSettings
    rollout_fn: Rollout
    recorded: RecordedDocuments

    def __post_init__(self) -> None:
        self._spent = 0.0  # seconds
        self._recording = asyncio.Lock()
        step = self.step
        names = FileNames(step.output_writer, 0, "", self.recorded.folder)
        self._results = ResultEncoder(step, names, None)
        self._requests = RankContext(
            step.models,
            cast(Any, SimpleNamespace(raise_failure=lambda: None)),
            cast(Any, _Reporter()),
            Shutdown(),
            AnswerQuality(step.refusals),
            cast(Any, None),
            "",
        )

    # one document --------------------------------------------------------------------------------

    async def replay(self, document: RecordedDocument, seconds: float) -> Difference | None:
        """Returns the difference, or None.

        Raises:
            TimeoutError: it took longer than ``seconds``.
            NotReplayable: a rollout acts outside of this process (here, it was refused), or waits
                for other documents.
        """
        watch = ReplayWatch()
        watches = (watch, self.recorded.waits, ROLLOUTS)
        _raise_if_seen(*watches)
        requests = copy(self._requests)
        requests.code = document.code
        requests.shutdown = Shutdown()
        slot = ChunkSlot(document.ordinal, Chunk(document.chunk, 0), True)
        rollouts = self.step.model.rollouts_per_document
        answers = ReplayedAnswers(requests, slot, document, rollouts, watch)
        source = SimpleNamespace(
            document=decode(document.read.encode()), finished=None, fingerprint="", id=document.id
        )
        runs = DocumentRollouts(requests, self.rollout_fn, self._results, watch)
        finished = runs.finished(cast(SourceDocument, source), slot, answers)
        deadline = time.monotonic() + seconds
        task = asyncio.create_task(_outcome(answers.observed(finished)))
        try:
            ended, _ = await asyncio.wait(
                [task, answers.unknown], timeout=seconds, return_when=asyncio.FIRST_COMPLETED
            )
            _raise_if_seen(*watches)
            # A loop's clock may be coarser than this clock, and a rollout may block the loop.
            if not ended or time.monotonic() > deadline:
                self._spent += seconds
                raise TimeoutError("it takes longer than a replay may")
            return _difference(answers, task.result() if task.done() else None)
        finally:
            self._spent += answers.random.seconds
            # No start has time for more.
            self.recorded.is_stopped |= self._spent > _RECORDING_SECONDS
            requests.has_ended = True
            watch.has_ended = True
            task.cancel()
            await asyncio.wait([task], timeout=0.2)

    # all documents, at a start -------------------------------------------------------------------

    async def check(self, seconds: float = SECONDS) -> Verdict:
        """Raises NotReplayable if no document may be replayed."""
        verdict = Verdict()
        deadline = time.monotonic() + seconds
        try:
            for document in await in_own_thread(self.recorded.read):
                difference = await self.replay(document, deadline - time.monotonic())
                if difference is None:
                    verdict.same += 1
                else:
                    verdict.differences.append(difference)
        except NotReplayable:
            raise
        except Exception as error:  # a defect of this check, too, ends no run
            verdict.undecided = redact(safe_text(error))
        return verdict

    async def refuse_changes(self, checkpoint: OpenCheckpoint) -> None:
        """Checks the rollout before the first request of a start whose code has the same text, or
        whose change is accepted. What is noteworthy goes into the history.

        Raises:
            CheckpointMismatch: it sends other requests, or gives other results.
            CheckpointError: an accepted difference cannot be written to ``job.json``.
        """
        recorded = self.recorded
        if recorded.is_stopped or not recorded.names():
            return
        root = recorded.folder.parent
        shown = ""
        try:
            verdict = await self.check()
            if self.step.accept_changes:
                shown = f"accepted: {verdict}"
                for difference in verdict.real[:1]:
                    old, new = difference.excerpts
                    await in_own_thread(record_change, root, difference.path, old, new)
                if verdict.real or verdict.undecided:
                    # Without the flag, the next start would refuse what there was no time for; and
                    # the rollout may depend on its process.
                    raise NotReplayable(f"accept_changes is set ({verdict})")
            elif verdict.real:
                repeats = await in_own_thread(repeats_itself, self.step, root)
                is_edited = any(difference.kind == "real" for difference in verdict.real)
                if repeats or (repeats is None and is_edited):
                    raise mismatch(verdict)
                raise NotReplayable(f"it sends other requests in each process ({verdict})")
            elif not verdict.is_same:
                logger.warning(f"replay check: {verdict}. The text of the code is compared, too.")
        except NotReplayable as error:
            await in_own_thread(recorded.end, str(error))
            shown = shown or f"ended: {error}"
        if shown:
            checkpoint.note(ReplayResult(what=shown))

    # while documents run -------------------------------------------------------------------------

    async def record_regularly(self) -> None:
        seconds = _FIRST_RECORD_AFTER
        while not self.recorded.is_stopped:
            await asyncio.sleep(seconds)
            if self.recorded.finished:  # the first answers may come after minutes
                await self.record()
                seconds = min(2 * seconds, _RECORD_EVERY)

    async def record(self) -> None:
        """Records what has finished: a few documents together, which costs less than one by one."""
        recorded = self.recorded
        async with self._recording:
            kept = []
            try:
                for document in recorded.taken():
                    with suppress(TimeoutError):
                        if not recorded.is_stopped:
                            difference = await self.replay(document, SECONDS)
                            if difference is not None:
                                why = f"it does not repeat itself for equal answers ({difference})"
                                raise NotReplayable(why)
                            kept.append(document)
                if kept:
                    await in_own_thread(recorded.put, kept)
            except NotReplayable as error:
                await in_own_thread(recorded.end, str(error))
            except Exception as error:  # a full disk, or a defect of this check
                logger.warning(f"replay check: no more documents are recorded: {error!r}")
                recorded.is_stopped = True


def mismatch(verdict: Verdict) -> CheckpointMismatch:
    return CheckpointMismatch(
        f"The rollout now gives finished documents other requests or results:\n  {verdict}\nIts "
        "code, or a file, package or variable that it uses, has changed. Restore that, or set "
        "accept_changes.",
        changes=[{"accept_changes": True}],
        starts_over="anew",
    )


# differences --------------------------------------------------------------------------------------


async def _outcome(finished: Awaitable[FinishedDocument]) -> bytes | str:
    """Returns the document, or the rollout's error."""
    try:
        return (await finished).document
    except (Exception, asyncio.CancelledError) as error:
        return f"{type(error).__name__}: {safe_text(error)}"


def _difference(answers: ReplayedAnswers, outcome: bytes | str | None) -> Difference | None:
    document = answers.document
    unused = [
        payload for key, payload, _ in document.requests if AnswerKey(*key) not in answers.sent
    ]
    unknown = [json.loads(sent) for key, sent in answers.sent.items() if key not in answers.known]
    if isinstance(outcome, str) and not unknown:
        return compared(document, "error", None, outcome)
    if unused or unknown or outcome is None:
        old, new = (masked("payload", next(iter(side), None)) for side in (unused, unknown))
        return compared(document, "", old, new)
    if outcome == document.result.encode():
        return None
    return compared(document, "result", json.loads(document.result), json.loads(outcome))


def compared(document: RecordedDocument, path: str, old: object, new: object) -> Difference:
    parts = [*_differing(path, old, new)] or [("what is hidden", "", "")]
    differences = [
        Difference(document, place.lstrip(".") or "request", before, after)
        for place, before, after in parts
    ]
    return max(differences, key=attrgetter("kind"))  # "real" comes last


def _differing(path: str, old: object, new: object) -> Iterator[tuple[str, object, object]]:
    """Yields the parts of two JSON values that differ, each after its path."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in old | new:
            yield from _differing(f"{path}.{name}", old.get(name), new.get(name))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, pair in enumerate(zip(old, new, strict=True)):
            yield from _differing(f"{path}[{index}]", *pair)
    elif _text(old) != _text(new):
        yield path, old, new


# other processes, and commands --------------------------------------------------------------------


def replay_all(step: RunnerSettings, root: Path, seconds: float = SECONDS) -> Verdict:
    preemption = step.preemption()

    async def check() -> Verdict:
        with replays_of(step, preemption, root) as replays:
            return await replays.check(seconds)

    host = host_loop()
    try:
        return (event_loop if host is None else host).run(check())
    except Exception as error:  # also of the user's shared_context
        return Verdict(undecided=redact(safe_text(error)))


def evidence(step: RunnerSettings, root: Path, changes: Sequence[SettingChange]) -> str:
    """Returns what recorded documents show about a change of code alone, in a line; "" if nothing.

    The user's rollout and ``shared_context`` run for it.
    """
    if not is_of_code(changes) or why_not_replayed(step):
        return ""
    verdict = replay_all(step, root)
    if verdict.real:
        return f"The changed code gives finished documents other requests or results: {verdict}\n"
    if not (verdict.is_same and verdict.same):
        return ""
    places = [change.note.partition(": ")[0] for change in changes if change.note]
    changed = ", ".join([*dict.fromkeys(places)][:3]) or "The code"
    return f"{changed} changed; {verdict}. If that is all, set accept_changes.\n"


def repeats_itself(step: RunnerSettings, root: Path) -> bool | None:
    """Returns whether three new processes find the same differences; None if there can be none.

    They differ in hash seed, time and process id; a set of few words has the same order in two of
    them by chance. None is compared with this process, which may have more than a pickle holds.
    """
    try:
        data = dill.dumps((step, root))
        return len({*in_threads(_differences_elsewhere, [data] * 3)}) == 1
    except Exception as error:  # of any object that the step holds, or of a process
        logger.debug(f"replay check: no new process can repeat it: {error!r}")
        return None


def _differences_elsewhere(data: bytes) -> bytes:
    code = "from datatrove_ckpt.generation import replay; replay.answer_parent()"
    variables = {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "random"}
    return subprocess.check_output(
        [sys.executable, "-c", code],
        input=data,
        stderr=subprocess.DEVNULL,
        env=os.environ | variables,
        timeout=_FRESH_SECONDS,
    )


def answer_parent() -> None:
    answer = os.dup(sys.stdout.fileno())
    # The user's code, its programs and its last words at exit may print what differs.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    step, root = dill.load(sys.stdin.buffer)
    verdict = replay_all(step, root, _FRESH_SECONDS)
    if verdict.undecided:
        sys.exit(verdict.undecided)
    differences = [[found.document.name, found.path, found.new_words] for found in verdict.real]
    with os.fdopen(answer, "w") as stream:
        json.dump(differences, stream)
