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
import math
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, cast

import dill  # type: ignore[import-untyped]
import orjson
from loguru import logger

from datatrove_ckpt.checkpoint.chunks import Chunk, ChunkSlot
from datatrove_ckpt.checkpoint.compare import SettingChange, is_of_code
from datatrove_ckpt.checkpoint.job_file import record_change
from datatrove_ckpt.checkpoint.journal import FinishedDocument
from datatrove_ckpt.checkpoint.request_cache import AnswerKey, CachedAnswer
from datatrove_ckpt.common.counts import WorkCounts
from datatrove_ckpt.common.formatting import plural, safe_text
from datatrove_ckpt.common.redaction import masked, redact
from datatrove_ckpt.common.threads import in_threads
from datatrove_ckpt.errors import CheckpointMismatch, CkptError
from datatrove_ckpt.generation.document_runs import DocumentRollouts
from datatrove_ckpt.generation.prefetch import SourceDocument
from datatrove_ckpt.generation.quality import AnswerQuality
from datatrove_ckpt.generation.recorded_documents import (
    RecordedDocument,
    RecordedDocuments,
    Stepped,
    process_names,
)
from datatrove_ckpt.generation.requests import DocumentAnswers, RankContext
from datatrove_ckpt.generation.results import ResultEncoder
from datatrove_ckpt.generation.runner_settings import RunnerSettings
from datatrove_ckpt.generation.side_effects import ROLLOUTS, ReplayWatch, rollouts_run
from datatrove_ckpt.generation.user_rollout import bind_shared, shared_arguments
from datatrove_ckpt.output.document_codec import decode
from datatrove_ckpt.output.file_names import FileNames
from datatrove_ckpt.process import event_loop
from datatrove_ckpt.process.event_loop import in_own_thread
from datatrove_ckpt.process.host_loop import host_loop
from datatrove_ckpt.process.preemption import Preemption
from datatrove_ckpt.process.shutdown import Shutdown
from datatrove_ckpt.rollouts import Rollout

SECONDS = 1.0  # of a check at a start, and of the replay of a document that is recorded
_FRESH_SECONDS = 60.0
_RECORDING_SECONDS = 5.0  # of all replays of an attempt
_BATCH = 16  # documents that are recorded together
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
    step: RunnerSettings,
    preemption: Preemption,
    names: FileNames,
    recorded: RecordedDocuments,
    run: str = "",
) -> Iterator[Replays]:
    if why_not_replayed(step) or not event_loop.is_audited(asyncio.get_running_loop()):
        recorded.stop()
    with shared_arguments(step.shared_context, preemption) as shared, rollouts_run():
        yield Replays(step, bind_shared(step.rollout_fn, shared), names, recorded, run)
        if ROLLOUTS.effect and not recorded.is_stopped:
            end_recording(recorded, f"it was seen to {ROLLOUTS.effect}")


def end_recording(recorded: RecordedDocuments, why: str) -> None:
    try:
        recorded.end(why)
    except CkptError as error:  # of the disk: the journal decides whether the rank goes on
        logger.warning(f"replay check: its end cannot be recorded: {error}")
    logger.warning(
        "replay check: the rollout is not run again for documents that are done, because "
        f"{redact(why)}. A resume compares the text of its code only."
    )


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


class Difference(NamedTuple):
    """The first difference of a replay.

    Attributes:
        kind: "changing": only what differs at each start; "order": only the order of words.
    """

    document: RecordedDocument
    path: str
    old: str
    new: str
    kind: Literal["real", "order", "changing"]

    @property
    def new_words(self) -> list[str]:
        """The words for another process, whose order may differ: an edit comes beside it."""
        words = _words(self.new, process_names())
        return words if self.kind == "order" else sorted(words)

    @property
    def excerpts(self) -> tuple[str, str]:
        old = redact(self.old)
        new = redact(self.new)
        same = len(os.path.commonprefix([old, new]))  # noqa: RUF071 (of characters)
        start = max(0, same - _EXCERPT // 3)
        shown = slice(start, start + _EXCERPT)
        dots = "..." if start else ""
        return dots + old[shown], dots + new[shown]

    def __str__(self) -> str:
        old, new = self.excerpts
        return f"document {redact(self.document.id)!r}: {self.path}: {old!r} -> {new!r}"


def _json(value: object) -> str:
    if isinstance(value, str):
        return value
    return orjson.dumps(value, default=repr, option=orjson.OPT_NON_STR_KEYS).decode()


class SeenToAct(Exception):
    """The rollout does something outside of this process."""


class ReplayedAnswers(DocumentAnswers):
    """The answers of a recorded document.

    Attributes:
        unknown: the first payload that the record lacks. Its request, and others like it, wait: a
            rollout may swallow an error.
    """

    def __init__(
        self, rank: RankContext, slot: ChunkSlot, document: RecordedDocument, rollouts: int
    ) -> None:
        super().__init__(rank, slot, document.id, rollouts)
        self.unused: dict[AnswerKey, object] = {}
        self._known: dict[AnswerKey, CachedAnswer] = {}
        for fields, payload, answer in document.requests:
            key = AnswerKey(*fields)
            self.unused[key] = payload
            self._known[key] = CachedAnswer(answer.encode(), None)
        self.unknown: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def cached(self) -> dict[AnswerKey, CachedAnswer]:
        return self._known

    async def saved(self, key: AnswerKey) -> CachedAnswer:
        if key not in self._known:
            if not self.unknown.done():
                self.unknown.set_result(masked("payload", self.payloads[key.rollout_idx]))
            await self.ended  # is cancelled
        await asyncio.sleep(0)
        self.unused.pop(key, None)
        self.reused[key.rollout_idx] += 1
        return self._known[key]


class _Drawing(Stepped):
    """Runs a coroutine with its own state of ``random``, from which other documents draw.

    Attributes:
        seconds: for which it has kept the event loop.
    """

    seconds = 0.0

    def __init__(self, coroutine: object, draws: list[int]) -> None:
        super().__init__(coroutine)
        self._state: tuple[object, ...] = (random.getstate()[0], tuple(draws), None)

    def _take(self, step: Callable[[], object]) -> object:
        started = time.monotonic()
        outer = random.getstate()
        random.setstate(self._state)
        try:
            awaited = step()
            self._state = random.getstate()
            return awaited
        finally:
            random.setstate(outer)
            self.seconds += time.monotonic() - started


@dataclass
class _Reporter:
    own: WorkCounts = field(default_factory=WorkCounts)

    def example(self, *example: str) -> None:
        pass


@dataclass
class Verdict:
    """What the replays have shown."""

    same: list[RecordedDocument] = field(default_factory=list)
    accepts: bool = False
    differences: list[Difference] = field(default_factory=list)
    acts: str = ""
    undecided: str = ""

    @property
    def real(self) -> list[Difference]:
        return [difference for difference in self.differences if difference.kind != "changing"]

    def __str__(self) -> str:
        if self.real:
            number = plural(len(self.differences) + len(self.same), "recorded document")
            return f"{self.real[0]} ({len(self.real)} of {number})"
        if self.acts or self.undecided:
            return ""
        verb = "gets" if len(self.same) == 1 else "get"
        number = plural(len(self.same), "recorded document")
        return f"{number} {verb} the same requests and results"


@dataclass(eq=False)
class Replays:
    step: RunnerSettings
    rollout_fn: Rollout
    names: FileNames
    recorded: RecordedDocuments
    run: str = ""

    def __post_init__(self) -> None:
        step = self.step
        self._spent = 0.0  # seconds
        self._results = ResultEncoder(step, self.names, None)
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
            SeenToAct: it tried to do something outside of this process, which did not happen.
        """
        step = self.step
        requests = copy(self._requests)
        requests.code = document.code
        requests.shutdown = Shutdown()
        watch = ReplayWatch()
        runs = DocumentRollouts(requests, self.rollout_fn, self._results, watch)
        slot = ChunkSlot(document.ordinal, Chunk(document.chunk, 0), True)
        answers = ReplayedAnswers(requests, slot, document, step.model.rollouts_per_document)
        source = SimpleNamespace(
            document=decode(document.read.encode()), finished=None, fingerprint="", id=document.id
        )
        finished = runs.finished(cast(SourceDocument, source), slot, answers)
        deadline = time.monotonic() + seconds
        drawing = _Drawing(finished, document.draws)
        task = asyncio.ensure_future(drawing)
        try:
            waited: list[asyncio.Future[object]] = [task, answers.unknown]
            await asyncio.wait(waited, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if watch.effect:
                raise SeenToAct(watch.effect)
            is_ended = task.done() or answers.unknown.done()
            if not is_ended or time.monotonic() > deadline:  # it may block the loop
                raise TimeoutError
            return _difference(document, answers, task)
        finally:
            self._spent += drawing.seconds
            requests.has_ended = True
            watch.has_ended = True
            answers.ended.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait([task], timeout=0.2)
            if task.done() and not task.cancelled():
                task.exception()  # else asyncio logs that nothing has read it

    # all documents, at a start -------------------------------------------------------------------

    async def check(self, seconds: float = SECONDS) -> Verdict:
        verdict = Verdict(acts=ROLLOUTS.effect)
        deadline = time.monotonic() + seconds
        try:
            documents = await in_own_thread(lambda: [*self.recorded.read()])
            for document in documents if not verdict.acts else ():
                verdict.accepts |= document.run != self.run
                left = max(0.001, deadline - time.monotonic())
                difference = await self.replay(document, left)
                if difference is None:
                    verdict.same.append(document)
                else:
                    verdict.differences.append(difference)
        except TimeoutError:
            verdict.undecided = f"it takes longer than {seconds:g} s"
        except SeenToAct as error:
            verdict.acts = str(error)
        except Exception as error:  # a defect of this check ends no run
            verdict.undecided = redact(repr(error))
        return verdict

    async def refuse_changes(self) -> str:
        """Checks the rollout before the first request of a start whose code has the same text, or
        whose change is accepted. Returns what is noteworthy, or "".

        Raises:
            CheckpointMismatch: it sends other requests, or gives other results.
            CheckpointError: an accepted difference cannot be written to ``job.json``.
        """
        step = self.step
        recorded = self.recorded
        if recorded.is_stopped:
            return ""
        verdict = await self.check()
        if verdict.acts:
            return await self._end(f"it was seen to {verdict.acts}")
        if verdict.real and step.accept_changes:
            await self._accept(verdict)
        elif verdict.real:
            is_real = any(difference.kind == "real" for difference in verdict.real)
            repeats = await in_own_thread(repeats_itself, step, recorded.folder.parent)
            if repeats or (repeats is None and is_real):
                raise mismatch(verdict)
            if is_real:
                return await self._end(
                    f"it sends other requests in each process ({verdict.real[0]})"
                )
        if verdict.undecided:
            logger.warning(
                "The replay check of recorded documents decides nothing for this start, because "
                f"{verdict.undecided}: only the text of the code is compared."
            )
        elif verdict.differences and not verdict.real:
            logger.warning(
                "The rollout sends other requests than before, but only in what differs at each "
                f"start (times, ids, addresses): {verdict.differences[0]}"
            )
        shown = ""
        removed = [f"{difference.document.name}.json" for difference in verdict.differences]
        if step.accept_changes and (verdict.accepts or verdict.real):
            # Also those that there was no time for: without the flag, the next start would refuse
            # them.
            removed = recorded.names()
            shown = f"accepted: {verdict}"
        try:
            await in_own_thread(recorded.remove, removed)
            if shown:
                for document in verdict.same:
                    document.run = self.run
                await in_own_thread(recorded.put, verdict.same)
        except CkptError as error:
            self._stop(error)
        return shown

    async def _accept(self, verdict: Verdict) -> None:
        """Accepts differences, which are the last ones if the code's text is the same: the rollout
        may depend on its process.
        """
        first = verdict.real[0]
        root = self.recorded.folder.parent
        old, new = first.excerpts
        await in_own_thread(record_change, root, first.path, old, new)
        if not verdict.accepts:
            await self._end("its differences are accepted")

    async def _end(self, why: str) -> str:
        await in_own_thread(end_recording, self.recorded, why)
        return f"ended: {why}"

    # while documents run -------------------------------------------------------------------------

    async def record(self) -> None:
        recorded = self.recorded
        queue = recorded.finished
        while True:
            batch = [await queue.get()]
            while len(batch) < _BATCH and not queue.empty():
                batch.append(queue.get_nowait())
            try:
                # Searching 200 kB for secrets takes 50 ms.
                documents = await in_own_thread(recorded.taken, batch)
                repeated = [document for document in documents if await self._repeats(document)]
                if repeated:
                    await in_own_thread(recorded.put, repeated)
            except Exception as error:  # a full disk, or a defect of this check
                self._stop(error)
            finally:
                for _ in batch:
                    queue.task_done()

    def _stop(self, error: Exception) -> None:
        logger.warning(f"replay check: no more documents are recorded: {error!r}")
        self.recorded.stop()

    async def _repeats(self, document: RecordedDocument) -> bool:
        if self._spent > _RECORDING_SECONDS:  # no start has the time for more
            self.recorded.stop()
        if self.recorded.is_stopped:
            return False
        if ROLLOUTS.effect:
            why = f"it was seen to {ROLLOUTS.effect}"
        elif self.recorded.waits:
            why = "it waits for other documents"
        else:
            try:
                difference = await self.replay(document, SECONDS)
                if difference is None:
                    return True
                why = f"it does not repeat itself for equal answers ({difference})"
            except TimeoutError:
                return False
            except SeenToAct as error:
                why = f"it was seen to {error}"
        await self._end(why)
        return False


def mismatch(verdict: Verdict) -> CheckpointMismatch:
    return CheckpointMismatch(
        "The rollout now sends other requests, or gives other results, for documents that are "
        f"done:\n  {verdict}\nIts code, or a file, a package or a variable that it uses, has "
        "changed. Restore that, or set accept_changes: what is done stays as it is.",
        changes=[{"accept_changes": True}],
        starts_over="anew",
    )


# differences --------------------------------------------------------------------------------------


def _difference(
    document: RecordedDocument, answers: ReplayedAnswers, task: asyncio.Task[FinishedDocument]
) -> Difference | None:
    old = next(iter(answers.unused.values()), None)
    if answers.unknown.done():
        return compared(document, "", old, answers.unknown.result())
    try:
        result = task.result().document.decode()
    except (Exception, asyncio.CancelledError) as error:
        return compared(document, "error", None, f"{type(error).__name__}: {safe_text(error)}")
    if old is not None:
        return compared(document, "", old, None)
    if result == document.result:
        return None
    return compared(document, "result", orjson.loads(document.result), orjson.loads(result))


def _found(document: RecordedDocument, path: str, old: object, new: object) -> Difference:
    kind: Literal["real", "order", "changing"] = "real"
    texts = (_json(old), _json(new))
    before = _words(texts[0], document.process)
    after = _words(texts[1], process_names())
    if before == after or _are_close(old, new):
        kind = "changing"
    elif sorted(before) == sorted(after):
        kind = "order"
    return Difference(document, path.lstrip(".") or "request", *texts, kind)


def _are_close(old: object, new: object) -> bool:
    """Whether two numbers differ as much as those that another processor computes."""
    return (
        isinstance(old, float) and isinstance(new, float) and math.isclose(old, new, rel_tol=1e-5)
    )


def _words(text: str, process: list[str]) -> list[str]:
    for name in filter(None, process):
        text = re.sub(rf"\b{re.escape(name)}\b", "#", text)
    return re.findall(r"\w+|[^\w\s]", _CHANGING.sub("#", text))


def compared(document: RecordedDocument, path: str, old: object, new: object) -> Difference:
    pairs = _pairs(path, old, new) or [("what is hidden", old, new)]
    differences = [_found(document, *pair) for pair in pairs]
    order = ("real", "order", "changing")
    return min(differences, key=lambda difference: order.index(difference.kind))


def _pairs(path: str, old: object, new: object) -> list[tuple[str, object, object]]:
    before = _parts(old)
    after = _parts(new)
    if not (before and after):
        return [] if _json(old) == _json(new) else [(path, old, new)]
    return [
        pair
        for place in dict.fromkeys([*before, *after])
        for pair in _pairs(path + place, before.get(place), after.get(place))
    ]


def _parts(value: object) -> dict[str, object]:
    if isinstance(value, dict):
        return {f".{name}": part for name, part in value.items()}
    if isinstance(value, list):
        return {f"[{index}]": part for index, part in enumerate(value)}
    return {}


# other processes, and commands --------------------------------------------------------------------


def replay_all(step: RunnerSettings, root: Path, seconds: float = SECONDS) -> Verdict:
    preemption = step.preemption()

    async def check() -> Verdict:
        names = FileNames(step.output_writer, 0, "", root)
        with replays_of(step, preemption, names, RecordedDocuments(root)) as replays:
            return await replays.check(seconds)

    host = host_loop()
    try:
        return (event_loop if host is None else host).run(check())
    except Exception as error:  # of the user's shared_context
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
    if verdict.differences or not verdict.same or not str(verdict):
        return ""
    places = [change.note.partition(": ")[0] for change in changes if change.note]
    changed = ", ".join([*dict.fromkeys(places)][:3]) or "The code"
    return f"{changed} changed; {verdict}. If that is all, set accept_changes.\n"


_MARK = b"replayed "
_CHILD = "from datatrove_ckpt.generation import replay; replay.answer_parent()"


def repeats_itself(step: RunnerSettings, root: Path) -> bool | None:
    """Returns whether two new processes find the same differences; None if there can be none.

    They differ in hash seed, time and process id. Neither is compared with this process, which may
    have more than a pickle holds.
    """
    try:
        data = dill.dumps(sys.path) + dill.dumps((step, root))
    except Exception as error:  # of any object that the step holds
        logger.debug(f"replay check: no new process can repeat it: {error!r}")
        return None
    first, second = in_threads(_differences_elsewhere, [data, data])
    if first is None or second is None:
        return None
    return bool(first == second)


def _differences_elsewhere(data: bytes) -> bytes | None:
    with suppress(subprocess.TimeoutExpired):
        child = subprocess.run(
            [sys.executable, "-c", _CHILD],
            input=data,
            capture_output=True,
            env={**os.environ, "PYTHONHASHSEED": "random"},
            timeout=_FRESH_SECONDS,
        )
        _, mark, found = child.stdout.rpartition(_MARK)
        if mark:
            return found
    return None


def answer_parent() -> None:
    sys.path[:] = dill.load(sys.stdin.buffer)
    step, root = dill.load(sys.stdin.buffer)
    verdict = replay_all(step, root, _FRESH_SECONDS)
    if not verdict.undecided:
        fields = [
            [difference.document.name, difference.path, difference.new_words]
            for difference in verdict.real
        ]
        print(_MARK.decode() + orjson.dumps(fields).decode())
