"""``run --sample N`` sends documents of a job as the job would, and writes them elsewhere. By them
it estimates what a whole run takes: requests, tokens, time and money.

The answers stay with the checkpoints, and the job's ranks take them for equal requests (see
``checkpoint/old_answers.py``). This fixes no identity: the prompt may still change.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import fmean

import orjson
from datatrove.pipeline.writers import JsonlWriter, ParquetWriter

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.checksummed_lines import explained
from datatrove_ckpt.checkpoint.layout import SAMPLED, SAMPLES
from datatrove_ckpt.common import BATCH
from datatrove_ckpt.common.formatting import duration, figure, short
from datatrove_ckpt.config import MonitoringConfig
from datatrove_ckpt.errors import ConfigError, InputError, StorageFailed
from datatrove_ckpt.generation.recorded_requests import NotedRequests, RecordedRequest, noting
from datatrove_ckpt.generation.run_identity import servers_digest
from datatrove_ckpt.generation.runner_settings import RunnerSettings
from datatrove_ckpt.run_folder.counted_input import DrawnInput, SampledDocument, count_input
from datatrove_ckpt.run_folder.estimate import Estimate, Population, quantile
from datatrove_ckpt.run_folder.run_plan import RunnerPlan, RunPlan


@dataclass
class SentSample:
    """The documents that were sent.

    Attributes:
        is_kept: the run finds the answers.
        places: rank and ordinal of each document in the run.
        documents: the documents with their requests; without requests, the text is the question.
        whole: the whole input; None if its size is not known.
    """

    checkpoints: Path
    is_kept: bool
    places: list[tuple[int, int]]
    documents: list[tuple[SampledDocument, list[RecordedRequest]]]
    whole: Population | None


def draw_input(plan: RunPlan, number: int) -> DrawnInput:
    """Draws documents from the input of the first runner.

    Raises:
        ConfigError, InputError: there is no runner, or no document.
    """
    if not plan.runners:
        raise ConfigError("--sample: the pipeline has no InferenceRunner.")
    drawn = count_input(plan.runners[0], number)
    if not drawn.documents:
        raise InputError(
            "no document reaches the InferenceRunner from the input or the steps before."
        )
    return drawn


def take_sample(
    runner: RunnerPlan,
    drawn: DrawnInput,
    folder: Path,
    writes_rows: bool = False,
    ordinals: Sequence[int] | None = None,
    seconds: float = math.inf,
) -> SentSample:
    """Sends documents to a runner.

    Args:
        folder: a folder for the output, and for checkpoints that cannot lie beside the run's.
        writes_rows: the output has the run's rows, as Parquet; else whole documents, to be shown.
        ordinals: those that the documents have in the run, if it has another input. Without one
            for each document, the run does not find the answers.
        seconds: time after the first answer at which the rest is given up.

    Raises:
        CkptError: no document could be sent: see ``InferenceRunner.run``.
    """
    documents = drawn.documents
    texts = [document.text for document in documents]
    recorded_requests: NotedRequests = {}
    checkpoints = _folder_beside(runner.root) or folder / "checkpoints"
    places = [(document.rank, document.ordinal) for document in documents]
    are_known = ordinals is None or len(ordinals) == len(places)
    if ordinals is not None and are_known:
        places = [(0, ordinal) for ordinal in ordinals]
    record = {
        "servers": servers_digest(runner.step.models),
        "documents": [places] if are_known else [],
    }
    files.disk.make_dir(checkpoints)
    files.disk.replace(checkpoints / SAMPLED, orjson.dumps(record))
    output = str(folder / "output")
    if writes_rows:
        writer = ParquetWriter(output, "${rank}_${chunk_index}.parquet", expand_metadata=True)
    else:
        writer = JsonlWriter(output, "${rank}_${chunk_index}.jsonl", compression=None)
    step = runner.step.changed(
        rollout_fn=noting(runner.step.rollout_fn, recorded_requests, seconds),
        output_writer=writer,
        checkpoints_local_dir=str(checkpoints),
        checkpoints_remote_dir=None,
        records_per_chunk=len(documents),
        explode=writes_rows and runner.step.explode,
        rollout_results=True,
        on_document_error="dead_letter",
        skip_bad_requests=True,
        max_dead_letters=None,
        retry_dead_letters=False,
        monitoring=MonitoringConfig(),
        drain_seconds=0.0,
        keep_answers=True,
        replay_check=False,
        until=None,
    )
    step.run(documents)
    if checkpoints.parent != folder:
        Path(folder, "checkpoints").symlink_to(checkpoints.absolute())
    sent = [
        (document, recorded_requests.get(id(document)) or [RecordedRequest(text)])
        for document, text in zip(documents, texts, strict=True)
    ]
    is_kept = are_known and checkpoints.parent != folder
    return SentSample(checkpoints, is_kept, places, sent, drawn.whole)


def _folder_beside(root: Path | None) -> Path | None:
    if root is None:
        return None
    with suppress(StorageFailed):
        files.disk.make_dirs(root)
        for number in count(1):
            folder = root / f"{SAMPLES}{number:05d}"
            with explained("make the folder", folder), suppress(FileExistsError):
                folder.mkdir(files.PRIVATE_FOLDER)
                return folder
    return None


_ROUND_NUMBER = 1000
"""Number of documents that an estimate is for, if the size of the input is not known."""


def estimate_lines(sample: SentSample, step: RunnerSettings) -> Iterator[str]:
    sizes = [document.size for document, _ in sample.documents]
    population = sample.whole or Population(Estimate.exact(_ROUND_NUMBER), fmean(sizes))
    sent = [requests for _, requests in sample.documents]
    answers = [request for requests in sent for request in requests if request.ended]
    if not answers:
        return

    def whole(amount: Callable[[RecordedRequest], float]) -> tuple[list[float], Estimate]:
        amounts = [sum(map(amount, requests)) for requests in sent]
        return amounts, population.total(amounts, sizes)

    documents = population.number.text(_counted)
    if sample.whole is None:
        yield "The size of the input is not known."
    elif population.number.low < population.number.high:
        yield (
            "The input was read for 10 s, each task from its start. The sample is of what was "
            "read; the estimates take the rest to be like it."
        )
    yield f"Median and 95th percentile of a document, and estimate for {documents} documents:"
    kinds: dict[str, Callable[[RecordedRequest], float]] = {
        "requests": lambda request: request.ended > 0,
        "prompt tokens": lambda request: request.tokens.prompt,
        "completion tokens": lambda request: request.tokens.completion,
    }
    for kind, amount in kinds.items():
        amounts, estimated = whole(amount)
        middle, high = (short(quantile(amounts, share)) for share in (0.5, 0.95))
        yield f"  {kind:<17} {middle:>8} {high:>8}   {estimated.text(_counted)}"
    _, waited = whole(lambda request: request.ended - request.started)
    span = max(request.ended for request in answers) - min(request.started for request in answers)
    at_once = sum(request.ended - request.started for request in answers) / max(span, 1e-6)
    yield (
        f"  time              {waited.text(duration, 1 / at_once)} with {figure(at_once)} requests "
        "in flight, as here"
    )
    models = step.models
    if not any(config.prices_at("") for config in models.values()):
        return
    for tier in dict.fromkeys(("", BATCH, *step.model.prices_at("").get("tiers", {}))):

        def cost(request: RecordedRequest, tier: str = tier) -> float:
            model = models.get(request.model, step.model)
            return model.cost(request.tokens, tier, request.endpoint) / 1e9

        _, estimated = whole(cost)
        name = f"cost, {tier}" if tier else "cost"
        yield f"  {name:<17} {estimated.text(figure)}"


def _counted(number: float) -> str:
    if math.isfinite(number):  # one document shows no bound
        number = round(number)
    return short(number)
