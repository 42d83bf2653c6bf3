"""Looks up one document's saved answers, counts its answers, and parks it for a batch."""

import asyncio

from datatrove_ckpt.checkpoint.batch_log import fields_of_batch
from datatrove_ckpt.checkpoint.chunks import ChunkSlot
from datatrove_ckpt.checkpoint.journal import FinishedDocument
from datatrove_ckpt.checkpoint.request_cache import AnswerKey, CachedAnswer
from datatrove_ckpt.common.counts import ENDINGS, USUAL, DocumentCounts, DocumentWork, Outcome
from datatrove_ckpt.common.redaction import redact
from datatrove_ckpt.common.warnings import warn_once
from datatrove_ckpt.errors import CkptError, RequestRejected
from datatrove_ckpt.generation.quality import INVALID, REPEATING, choices_of, text_of
from datatrove_ckpt.generation.rank_requests import RankContext
from datatrove_ckpt.inference.client.responses import Api, token_counts
from datatrove_ckpt.output.document_codec import Result
from datatrove_ckpt.rollouts import Payload
from datatrove_ckpt.rollouts.settings import ends_in_blanks, is_cut_off

_PARKED_SECONDS = 0.05


class DocumentParked(Exception):
    """The document ends unrecorded: its requests are parked for a batch."""


class DocumentAnswers:
    """One document's answers, and the counts of its rollouts.

    Attributes:
        parked: number of its requests that wait for a batch.
        batch_answers: number of batch answers that the rollout has received.
        rejections: its requests that the server has rejected.
        failure: error that stops the rank.
        hashes, payloads: hash and payload of the last request of each rollout.
        requests: number of ended requests of each rollout.
        reused: number of requests and calls of each rollout that earlier attempts have saved.
        tokens: prompt and completion tokens of each answer in turn.
        failed: number of requests without an answer.
        order, is_suspect: the fields of ``routing.Request``.
        cut_off, empty: number of answers that ended at max_tokens, and of answers without a text,
            or with a vector of zeros.
        reasons: number of answers by finish_reason, and by fault.
        results: all answers except those that a retry has replaced. A rollout may have marked them
            as invalid.
    """

    failure: CkptError | None = None
    failed = cut_off = empty = 0
    parked = batch_answers = 0
    is_suspect = False
    _cached: asyncio.Future[dict[AnswerKey, CachedAnswer]] | None = None
    _pending = 0

    def __init__(self, rank: RankContext, slot: ChunkSlot, doc_id: str, rollouts: int) -> None:
        self.slot = slot
        self.order = slot.ordinal
        self.doc_id = doc_id
        self.rejections: list[RequestRejected] = []
        self.occurrences: dict[tuple[int, str], int] = {}
        self.hashes = [""] * rollouts
        self.payloads: list[Payload] = [{}] * rollouts
        self.requests = [0] * rollouts
        self.reused = [0] * rollouts
        self.tokens: list[int] = []
        self.reasons: dict[str, int] = {}
        self.results: list[Result] = []
        self._rank = rank

    async def cached(self) -> dict[AnswerKey, CachedAnswer]:
        """Returns the answers that earlier attempts have saved."""
        if self._cached is None:
            self._cached = asyncio.wrap_future(self._rank.checkpoint.lookup(self.slot))
        return await asyncio.shield(self._cached)

    async def saved(self, key: AnswerKey) -> CachedAnswer | None:
        """Returns the saved answer of one request or call; None if there is none."""
        if not self.slot.cached:
            return None
        answer = (await self.cached()).get(key)
        self.reused[key.rollout_idx] += answer is not None
        return answer

    def fail(self, failure: CkptError) -> None:
        """Stops the rank, after a drain. The document ends unrecorded."""
        self.failure = failure
        self._rank.shutdown.fail(failure)

    @property
    def have_ended(self) -> bool:
        """True once this document may send no more requests.

        A rollout that swallows its cancellation must not keep the loop busy, and tasks that it left
        behind must not send requests.
        """
        return self.failure is not None or self._rank.has_ended or self._rank.shutdown.aborted

    def finished(
        self, outcome: Outcome, fingerprint: str, document: bytes, valid: int = 0
    ) -> FinishedDocument:
        """Returns the document's journal line. ``valid``: number of rollouts with a result."""
        requests = self.requests
        tokens = self.tokens
        work = None  # the usual case is a shorter line: see FinishedDocument.work
        usual = 1 if outcome == "written" else 0
        is_usual = len(requests) == 1 and requests[0] <= 1 and not self.failed and valid == usual
        if not is_usual:  # copies, because cancelled rollouts may still count
            work = DocumentWork(valid, self.failed, requests.copy(), tokens.copy())
        return FinishedDocument(
            self.slot.ordinal,
            outcome,
            fingerprint,
            document,
            sum(requests),
            sum(tokens[::2]),
            sum(tokens[1::2]),
            work,
            ends=(len(tokens) // 2, self.cut_off, self.empty),
            reasons=self.counted_reasons(),
        )

    def counted_reasons(self) -> dict[str, int]:
        """Returns ``reasons`` with the invalid answers."""
        reasons = self.reasons.copy()  # cancelled rollouts may still count
        invalid = [str(result.text) for result in self.results if result.is_invalid]
        if invalid:
            reasons[INVALID] = len(invalid)
            self._rank.observer.example(INVALID, self.doc_id, invalid[0])
        return reasons

    def count_cached(self, result: Result) -> None:
        self._rank.observer.own.cached += 1
        self.tokens += token_counts(result.usage or {})[:2]

    def count(self, rollout_idx: int, result: Result, api: Api, question: str = "") -> None:
        """Counts an answer and its faults. ``question``: the last message."""
        choices = choices_of(result)
        self.results.append(result)
        reasons = [choice["finish_reason"] for choice in choices]
        if USUAL.issuperset(reasons):
            result.reasons = reasons
        else:
            result.reasons = [
                reason if reason in USUAL else redact(reason)[:60]  # characters
                for reason in filter(None, reasons)
            ]
        is_cut = self._count_reasons(result, reasons)
        faults: list[str] = []
        result.faults = faults
        is_empty = False
        if api.generates:
            quality = self._rank.quality
            for choice in choices:
                text = text_of(choice)
                # An answer that calls a tool has no text; other contents are a list.
                has_parts = isinstance(choice["text"], list) and choice["text"]
                calls_tool = choice["finish_reason"] in ("tool_calls", "function_call")
                if not (text or has_parts or calls_tool):
                    is_empty = True
                faults += quality.faults(choice, text, question)
            for fault in faults:
                self.reasons[fault] = self.reasons.get(fault, 0) + 1
            if is_cut:
                faults.append("cut_off")
        elif api.is_shared and result.answer is not None:
            is_empty = not result.answer["embeddings"][0].strip("A=")  # zeros in base64
        self.empty += is_empty
        if is_empty:
            faults.append("empty")
        if api.generates:
            for fault in faults:
                self._rank.observer.example(fault, self.doc_id, str(result.text))
            quality.note(bool(faults))
        self.requests[rollout_idx] += 1

    def _count_reasons(self, result: Result, reasons: list[str | None]) -> bool:
        """Counts the finish reasons. Returns whether the answer is cut off."""
        for name in result.reasons:
            self.reasons[name] = self.reasons.get(name, 0) + 1
        if ENDINGS.issuperset(reasons) or not any(map(is_cut_off, reasons)):
            return False
        self.cut_off += 1
        if ends_in_blanks(str(result.text)):
            warn_once(
                "An answer ended in blanks until max_tokens cut it off. More tokens do not help: "
                'see "Answers of a given form" in docs/rollouts.md.'
            )
        return True

    def added(self) -> dict[str, str | int]:
        """Returns the values of ``RunnerSettings.added_columns``, without answers that a retry has
        replaced.

        They depend only on the document's own answers, in any order: not on whether another
        document has the same answer.
        """
        results = self.results
        reasons = {reason for result in results for reason in result.reasons}
        fault_names = {fault for result in results for fault in result.faults}
        if any(result.is_invalid for result in results):
            fault_names.add(INVALID)
        faults = [
            name for name in DocumentCounts().bad if name in fault_names and name != REPEATING
        ]
        tokens = sum(token_counts(result.usage or {})[1] for result in results)
        endpoints = {getattr(result, "endpoint", "") for result in results} - {""}
        return {
            "finish_reason": ", ".join(sorted(reasons)),
            "faults": ", ".join(faults),
            "tokens": tokens,
            "endpoint": ", ".join(sorted(endpoints)),
        }

    def next_key(self, rollout_idx: int, digest: str) -> AnswerKey:
        """Returns the key of the next request of a rollout with this hash."""
        request = rollout_idx, digest
        key = AnswerKey(rollout_idx, digest, self.occurrences.get(request, 0))
        self.occurrences[request] = key.occurrence + 1
        return key

    def count_failed(self, rollout_idx: int) -> None:
        self.failed += 1
        self.requests[rollout_idx] += 1

    def park(self) -> None:
        """Counts a parked request. The document is dropped once it has nothing else to do: the
        rollout may still send other requests.
        """
        loop = asyncio.get_running_loop()
        self._parked_at = loop.time()
        self.parked += 1
        if self.parked == 1:
            loop.call_later(_PARKED_SECONDS, self._drop)

    def _drop(self) -> None:
        task = self._rank.documents.get(self.slot.ordinal)
        if task is None or task.done():
            return
        loop = asyncio.get_running_loop()
        seconds = _PARKED_SECONDS
        if loop.time() >= self._parked_at + _PARKED_SECONDS and not self._pending:
            task.cancel()
            seconds = 1.0
        loop.call_later(seconds, self._drop)

    @property
    def is_repeatable(self) -> bool:
        """False if the rollout did not repeat its answered request of the last pass."""
        run = self._rank.checkpoint.run  # the same code has parked the request
        if self.batch_answers or self._cached is None or not self._cached.done():
            return True
        cached = self._cached.result().values()
        return all(fields_of_batch(answer).get("run") != run for answer in cached)

    def request_started(self) -> None:
        self._pending += 1
        if self._pending == 1:
            self._rank.waiting += 1

    def request_finished(self) -> None:
        self._pending -= 1
        if not self._pending:
            self._rank.waiting -= 1
