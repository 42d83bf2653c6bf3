"""Runs the rollouts of one document, and decides how it ends: written, dropped, as a dead letter,
unrecorded, or with the rank.

A failing document or server stops the rank with a drain (``Shutdown.fail``), even if a rollout
swallows the error, which must not turn an outage into dropped documents. If nothing can be saved,
all work ends at once (``Shutdown.abort``).
"""

import asyncio
import os
from dataclasses import dataclass

from datatrove.data import Document
from loguru import logger

from datatrove_ckpt.checkpoint.chunks import ChunkSlot
from datatrove_ckpt.checkpoint.journal import FinishedDocument
from datatrove_ckpt.common.counts import WHY_DROPPED
from datatrove_ckpt.common.redaction import remember_sent
from datatrove_ckpt.errors import (
    CheckpointError,
    ConfigError,
    DocumentNotSerializable,
    causes,
)
from datatrove_ckpt.generation.document_limit import DocumentLimit
from datatrove_ckpt.generation.failures import FailurePolicy, drops
from datatrove_ckpt.generation.generate import BoundGenerate
from datatrove_ckpt.generation.prefetch import SourceDocument
from datatrove_ckpt.generation.recorded_documents import RecordedDocuments
from datatrove_ckpt.generation.requests import (
    DocumentAnswers,
    DocumentParked,
    RankContext,
    RolloutRequests,
)
from datatrove_ckpt.generation.results import DROPPED, ResultEncoder
from datatrove_ckpt.generation.side_effects import OURS, EffectWatch, current, watched
from datatrove_ckpt.generation.user_rollout import name_of
from datatrove_ckpt.process.event_loop import end_fork
from datatrove_ckpt.process.shutdown import exit_error
from datatrove_ckpt.rollouts import Rollout

_SUSPICIOUS_DROPS = 100  # a rollout that drops its first documents is logged at this number


@dataclass(eq=False)
class DocumentRollouts:
    requests: RankContext
    rollout_fn: Rollout
    results: ResultEncoder
    watch: EffectWatch

    def __post_init__(self) -> None:
        requests = self.requests
        self._checkpoint = requests.checkpoint
        self._shutdown = requests.shutdown
        self._rollouts = range(requests.model.config.rollouts_per_document)
        self._dropped = 0
        self._pid = os.getpid()

    async def finished(
        self, source: SourceDocument, slot: ChunkSlot, answers: DocumentAnswers
    ) -> FinishedDocument:
        document = source.document
        self.results.check(document)
        requests = []
        for index in self._rollouts:  # a comprehension would be a call for each document
            requests.append(RolloutRequests(self.requests, answers, index, self.requests.model))
        results: list[object]
        if source.finished is not None:
            document.metadata, results = source.finished
            # An old output may hold fewer results than rollouts.
            for request, result in zip(requests, results, strict=False):
                request.count_finished(result)
        elif len(requests) == 1:
            results = [await self._run_rollout(document, requests[0])]
        else:
            results = await self._run_rollouts(document, requests)
        self._raise_if_stopping(answers)
        if answers.parked:
            raise DocumentParked
        if source.finished is None:
            self.results.check_returned(document, results)
            results = [result for result in results if result is not None]
        data = self.results.encode(document, results, answers)
        if self.results.is_doubtful(data):
            with watched(OURS):
                await self.results.try_writer(data, source.id)
            self._raise_if_stopping(answers)
        is_dropped = data == DROPPED
        self._dropped += is_dropped
        return answers.finished(
            "dropped" if is_dropped else "written", source.fingerprint, data, len(results)
        )

    def _raise_if_stopping(self, answers: DocumentAnswers) -> None:
        """Raises if the document must end unrecorded: the failure of the checkpoint or of the
        document, CancelledError after a stop of the rank, or DocumentParked.

        Any other CancelledError is the document's failure. ``Task.cancelling`` cannot tell: in
        Python 3.11 a TaskGroup in the rollout leaves it raised.
        """
        self._checkpoint.raise_failure()
        if self._shutdown.aborted:
            raise asyncio.CancelledError
        if answers.failure is not None:
            raise answers.failure
        if answers.parked and answers.is_repeatable:
            raise DocumentParked

    async def _run_rollouts(
        self, document: Document, requests: list[RolloutRequests]
    ) -> list[object]:
        # The first rollout that raises cancels the others, whose further requests would be wasted.
        tasks = [
            asyncio.ensure_future(self._run_rollout(document, request)) for request in requests
        ]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _run_rollout(self, document: Document, request: RolloutRequests) -> object:
        # Until the end of the task, which is the document's: a reset would cost as much again.
        current.set(self.watch)
        try:
            result = await self.rollout_fn(document, BoundGenerate(request))
        except BaseException as error:
            end_fork(self._pid, error)
            if drops(error):
                return None
            if isinstance(error, Exception | asyncio.CancelledError):
                raise
            if self._shutdown.aborted or self._shutdown.raised(error):
                raise
            raise exit_error(f"the rollout {name_of(self.rollout_fn)}", error) from error
        end_fork(self._pid)
        if document is result:
            raise DocumentNotSerializable(
                f"The rollout {name_of(self.rollout_fn)} returned the document itself. Return "
                "what is added to it, such as answer.text."
            )
        return result


@dataclass(eq=False)
class DocumentRuns(DocumentRollouts):
    """Runs the rollouts of a rank. ``run`` releases a document's place in ``limit``."""

    failures: FailurePolicy
    limit: DocumentLimit
    recorded: RecordedDocuments

    def __post_init__(self) -> None:
        super().__post_init__()
        self._counts = self.requests.observer.own
        self.parked = 0

    async def run(self, source: SourceDocument, slot: ChunkSlot) -> None:
        try:
            answers = self.recorded.answers(self.requests, source, slot, len(self._rollouts))
            answers.ordinal_in_run = getattr(source.document, "ordinal", slot.ordinal)
            letter = self.failures.retried_letter(source, slot.ordinal)
            if letter is not None:
                finished = answers.finished("dead", source.fingerprint, letter)
            else:
                try:
                    finished = await answers.observed(self.finished(source, slot, answers))
                except (Exception, asyncio.CancelledError) as error:
                    finished = self._dead(source, slot, answers, error)
            self._checkpoint.finish(slot, finished)
            self.recorded.finish(answers, finished)
            self._counts.documents += 1
            limits = self.requests.limits
            if limits.is_paid:
                limits.end(finished, answers.paid > 0, answers.cost)
            if self._dropped == _SUSPICIOUS_DROPS == self._counts.documents:
                logger.warning(
                    f"The rollout dropped all of {_SUSPICIOUS_DROPS} documents. {WHY_DROPPED}"
                )
        except DocumentParked:
            self.parked += 1
        except (asyncio.CancelledError, KeyboardInterrupt):
            self._shutdown.abort()
            raise
        except CheckpointError as error:
            self._shutdown.abort(error)
        except BaseException as error:
            self._shutdown.fail(error)
        finally:
            # A callback of the task would take a further turn of the event loop.
            self.requests.documents.pop(slot.ordinal, None)
            self.limit.release(source.size)

    def _dead(
        self,
        source: SourceDocument,
        slot: ChunkSlot,
        answers: DocumentAnswers,
        error: BaseException,
    ) -> FinishedDocument:
        self._raise_if_stopping(answers)
        if answers.parked:
            error = ConfigError(
                f"{name_of(self.rollout_fn)} sent other requests than in its last pass. With "
                "provider_batches, requests must repeat: no time or random numbers in prompts (a "
                "seed may come from document.id)",
                setting="rollout_fn",
            )
        sent = [getattr(cause, "payload", None) for cause in causes(error)]
        remember_sent(answers.payloads + sent)
        letter = self.failures.dead_letter_or_raise(
            source, slot.ordinal, error, answers.hashes, answers.rejections
        )
        return answers.finished("dead", source.fingerprint, letter)
