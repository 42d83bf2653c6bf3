"""``datatrove-ckpt tune`` measures settings of a model's servers with rows of the job itself.

A candidate is a sample (``run --sample``) whose servers have other settings. Its folder keeps what
was measured, so a tune that was killed goes on; and the run takes the answers of candidates that
answer as its own servers do.

The walk goes uphill: a candidate is the best so far with one change. Layouts come first, that with
most copies at their head, because a candidate ends as soon as it is clearly slower than the best.
"""

import argparse
import math
from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

import orjson
import xxhash

from datatrove_ckpt.checkpoint import files, layout
from datatrove_ckpt.checkpoint.rank_summary import Include, read_ranks
from datatrove_ckpt.cli import yaml_config
from datatrove_ckpt.cli.printing import say
from datatrove_ckpt.cli.short_form import Node, make_executor
from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.common.formatting import figure
from datatrove_ckpt.config.inference_config import dashed_names
from datatrove_ckpt.errors import ConfigError, InputError, ServerError
from datatrove_ckpt.process import signals
from datatrove_ckpt.process.task_errors import log_disabled
from datatrove_ckpt.run_folder.counted_input import DrawnInput
from datatrove_ckpt.run_folder.gpu_layout import layouts
from datatrove_ckpt.run_folder.run_plan import RunnerPlan, RunPlan
from datatrove_ckpt.run_folder.sample import SentSample, draw_input, take_sample

_BETTER = 1.05  # less may be chance
_CLEARLY_WORSE = 1.3
# Guesses from the prompt pay where this share of an answer's groups of words stands there.
_REPEATED = 0.3
_GROUP = 4


@dataclass
class Measured:
    """What a candidate did.

    Attributes:
        settings: those that differ from the job's.
        gpus: of its servers; 1 if none are known.
        seconds: time in which servers were ready.
        repeated: share of the answers that stands in their prompts.
    """

    settings: JsonObject
    gpus: int
    rows: int
    tokens: int
    seconds: float
    repeated: float

    @property
    def rate(self) -> float:
        return self.tokens / self.gpu_seconds

    @property
    def gpu_seconds(self) -> float:
        return self.seconds * self.gpus

    def line(self, price: float) -> str:
        """``price``: of an hour of a GPU."""
        cost = price * self.gpu_seconds / 3600 / self.rows * 1e6
        return _row(figure(self.rate), figure(cost), orjson.dumps(self.settings).decode())


def _row(rate: str, cost: str, settings: str) -> str:
    return f"{rate:>18}  {cost:>24}  {settings}"


def tune(arguments: argparse.Namespace) -> int:
    config, executor = make_executor(arguments.config, arguments.overrides)
    plan = RunPlan(executor)
    if not plan.is_local or len(plan.with_checkpoints) != 1:
        raise ConfigError("tune: is for a job of this machine, with one runner and checkpoints.")
    runner, root = plan.with_checkpoints[0]
    model = runner.step.model
    if len(runner.step.models) > 1 or model.server_type == "endpoint":
        raise ConfigError("tune: is for one model, whose servers the run starts.")
    bench = _Bench(config, plan, runner.index, root, arguments.sample)
    settings: JsonObject = {}
    if model.model_kwargs:
        settings["model_kwargs"] = model.model_kwargs
    given: list[JsonObject] = []
    for text in arguments.tried:
        change = yaml_config.read_value(text)
        if not isinstance(change, dict):
            raise ConfigError(f"--try: {text!r} is no mapping of settings, such as '{{tp: 2}}'.")
        bench.job(_merged(settings, change))
        given.append(change)
    price = arguments.gpu_hour or 1.0
    noun = "GPU" if model.gpus_of_task else "machine"
    unit = "cost" if arguments.gpu_hour else f"{noun} hours"
    say(_row(f"tokens/s a {noun}", f"{unit} of 1M rows", "settings of the model"))
    with signals.Interruption(signals.STOP_SIGNALS), log_disabled("datatrove_ckpt.generation.rank"):
        best = start = bench.measure(settings, math.inf)
        say(start.line(price))
        for change in given or _changes(runner, root, start):
            candidate = _merged(start.settings if given else best.settings, change)
            try:
                measured = bench.measure(candidate, best.gpu_seconds * _CLEARLY_WORSE)
            except (ConfigError, InputError, ServerError) as error:
                cause = str(error).partition("\n")[0]
                say(_row("", "", f"{orjson.dumps(candidate).decode()} fails: {cause}"))
                continue
            say(measured.line(price))
            if measured.rate > best.rate * _BETTER:
                best = measured
    if best is start:
        say("No other settings are better.")
    else:
        say(f"The best settings of the model:\n{yaml_config.dump(best.settings).rstrip()}")
    return 0


def _changes(runner: RunnerPlan, root: Path, start: Measured) -> Iterator[JsonObject]:
    yield from layouts(runner)
    for flags in runner.step.model.engine.tuning:
        is_refused = "kv-cache-dtype" in flags and layout.rank_numbers(root)
        is_vain = "speculative-config" in flags and start.repeated < _REPEATED
        if not is_refused and not is_vain:
            yield {"model_kwargs": flags}


def _merged(settings: JsonObject, change: JsonObject) -> JsonObject:
    flags = change.get("model_kwargs") or {}
    replaced = dashed_names(flags).keys()
    kept = {
        name: value
        for name, value in settings.get("model_kwargs", {}).items()
        if name.replace("_", "-") not in replaced
    }
    merged = {**settings, **change}
    if kept or flags:
        merged["model_kwargs"] = {**kept, **flags}
    return merged


@dataclass(frozen=True)
class _Bench:
    config: Node
    plan: RunPlan
    index: int
    root: Path
    rows: int

    @cached_property
    def drawn(self) -> DrawnInput:
        """The rows that all candidates answer. Reading the input takes seconds."""
        return draw_input(self.plan, self.rows)

    def job(self, settings: JsonObject) -> tuple[RunPlan, str]:
        """Returns the job with other settings of the model, and what names it.

        Raises:
            ConfigError: a setting cannot work.
        """
        config = deepcopy(self.config)
        step = config["executor"]["init_args"]["pipeline"][self.index]
        of_model = step["init_args"]["config"]
        of_model.get("init_args", of_model).update(settings)
        plan = RunPlan(yaml_config.build(config))
        text = repr((config, plan.identities[0].digest, self.rows))
        return plan, xxhash.xxh3_128_hexdigest(text.encode())

    def measure(self, settings: JsonObject, gpu_seconds: float) -> Measured:
        """Measures a candidate, or returns what an earlier call did.

        Args:
            gpu_seconds: those after which it ends before its last row.

        Raises:
            ConfigError, ServerError: its servers cannot start, or die.
            InputError: it answers no row.
        """
        plan, candidate = self.job(settings)
        for folder in layout.sample_folders(self.root):
            path = folder / layout.TUNED
            with suppress(FileNotFoundError, LookupError, TypeError, ValueError):  # damaged
                earlier = orjson.loads(path.read_bytes())
                if earlier["candidate"] == candidate:
                    return Measured(**earlier["measured"])
        gpus = max(1, plan.runners[0].step.model.gpus_of_task)
        with TemporaryDirectory(prefix="datatrove-ckpt-") as output:
            drawn = replace(self.drawn, documents=deepcopy(self.drawn.documents))
            seconds = gpu_seconds / gpus
            sent = take_sample(plan.runners[0], drawn, Path(output), seconds=seconds)
        measured = Measured(settings, gpus, 0, 0, 0.001, _repeated(sent))
        for rank in read_ranks(sent.checkpoints, Include.HISTORY):
            if rank.history.last is not None:
                counts = rank.history.last.documents
                measured.rows += counts.written + counts.dropped
                measured.tokens += counts.prompt_tokens + counts.completion_tokens
                measured.seconds += rank.history.last.seconds.inference
        if not measured.rows:
            raise InputError(
                f"no row was answered. `datatrove-ckpt show --dead {sent.checkpoints}` has the "
                "causes."
            )
        record = {"candidate": candidate, "measured": asdict(measured)}
        files.disk.replace(sent.checkpoints / layout.TUNED, orjson.dumps(record))
        return measured


def _repeated(sent: SentSample) -> float:
    groups = 0
    found = 0
    for _, requests in sent.documents:
        for request in requests:
            words = request.answer_text.split()
            for start in range(len(words) - _GROUP + 1):
                groups += 1
                found += " ".join(words[start : start + _GROUP]) in request.prompt
    return found / max(1, groups)
