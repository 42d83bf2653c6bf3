"""Checks and pickles the settings of an ``InferenceRunner``, whose docstring describes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.writers.disk_base import DiskWriter
from fsspec.utils import get_protocol
from loguru import logger

from datatrove_ckpt.checkpoint.identity import RunIdentity
from datatrove_ckpt.checkpoint.job_file import recorded_settings
from datatrove_ckpt.checkpoint.run_limits import Limits
from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.common.launchers import launcher
from datatrove_ckpt.common.object_store import check_mirror
from datatrove_ckpt.common.redaction import Veiled
from datatrove_ckpt.common.setting_types import Count, IntervalSeconds, NotNegative, Positive, check
from datatrove_ckpt.config import InferenceConfig, MonitoringConfig
from datatrove_ckpt.config.inference_config import NodeGroup, models_of
from datatrove_ckpt.config.paths import expand_path
from datatrove_ckpt.errors import ConfigError, form
from datatrove_ckpt.generation.run_identity import CHAT_TEXTS, run_identity, sent_chats_as_texts
from datatrove_ckpt.generation.user_rollout import SharedContext, check_rollout
from datatrove_ckpt.output.document_codec import RowsOf, exploded, one_row
from datatrove_ckpt.output.hub import CommitPace
from datatrove_ckpt.output.writer_checks import check_output_folder, check_writer, with_our_uploads
from datatrove_ckpt.process.open_files import requests_at_once
from datatrove_ckpt.process.preemption_notices import Setting, check_notice
from datatrove_ckpt.process.shutdown import SIGNALS, check_signals
from datatrove_ckpt.process.task_errors import safe_log
from datatrove_ckpt.rollouts import BatchRollout, EmbedRollout, PromptRollout, Rollout, for_config
from datatrove_ckpt.rollouts.interface import FIELDS
from datatrove_ckpt.user_code import script_names
from datatrove_ckpt.user_code.code_identity import CodeIdentity, code_identity, code_of

if TYPE_CHECKING:
    from datatrove_ckpt.process.preemption import Preemption
    from datatrove_ckpt.readers.shard_record import StepRecord


_ENDPOINT_COLUMN = "endpoint_column"  # the field of runs that began with ``endpoints``


@dataclass(eq=False, repr=False)
class RunnerSettings(PipelineStep):
    """The settings of one ``InferenceRunner``. Other modules do not write to its fields: they take
    a copy (``changed``).
    """

    rollout_fn: Rollout
    config: InferenceConfig | dict[str, InferenceConfig]
    output_writer: DiskWriter
    shared_context: SharedContext = None
    checkpoints_local_dir: str | None = None
    records_per_chunk: Count = 6000
    metadata_key: str = "rollout_results"
    skip_bad_requests: bool = False
    on_document_error: Literal["stop", "dead_letter"] = "stop"
    max_dead_letters: int | None = None
    retry_dead_letters: bool = False
    seek: bool | None = None
    sync_seconds: IntervalSeconds = 1.0
    # Slurm kills 30 s (KillWait) after SIGTERM: 10 s are left to stop the server and requeue.
    drain_seconds: NotNegative = 20.0
    drain_signals: Sequence[str] = SIGNALS
    retry_errors: bool = False
    accept_changes: bool = False
    checkpoints_remote_dir: str | None = None
    mirror_seconds: IntervalSeconds = 60.0
    hub_commit_seconds: NotNegative = 300.0
    hub_commits_per_hour: Count = 112
    monitoring: MonitoringConfig = None  # type: ignore[assignment]  # None until it is checked
    keep_answers: bool = False
    finished_from: str | Sequence[str] | None = None
    answers_from: str | None = None
    preemption_notice: Setting | None = None
    rollout_version: str | None = None
    answer: str | None = None
    card: bool = True
    explode: bool = False
    rollout_results: bool = True
    quality: bool = False
    refusals: Sequence[str] = ()
    until: Count | None = None
    max_cost: Positive | None = None
    max_total_tokens: Count | None = None
    replay_check: bool = True
    hub_pace: CommitPace = field(init=False)
    steps_before: list[StepRecord] | None = field(default=None, init=False)
    form: str = field(default="", init=False)
    no_wait: bool = field(default=False, init=False)
    tells_endpoints: bool = field(default=False, init=False)
    spent_before: tuple[float, int] = field(default=(0.0, 0), init=False)

    named_models = Veiled()  # the models of a ``config`` with names; else missing
    _code_when_made = Veiled()  # a CodeIdentity: executor.json does not even show its hashes

    def __post_init__(self) -> None:
        super().__init__()
        self._ready_process()
        safe_log()
        check(RunnerSettings, vars(self))
        self.form = form()
        models = models_of(self.config)
        if isinstance(self.config, Mapping):
            self.named_models = models
        self.config = next(iter(models.values()))
        self.output_writer = with_our_uploads(self.output_writer)
        if self.checkpoints_local_dir is not None:
            self.checkpoints_local_dir = str(self.checkpoints_local_dir)
        if self.answers_from is not None:
            self.answers_from = str(self.answers_from)
        self.drain_signals = check_signals(self.drain_signals)
        self.checkpoints_remote_dir = (self.checkpoints_remote_dir or "").rstrip("/") or None
        self.hub_pace = CommitPace(self.hub_commit_seconds, self.hub_commits_per_hour)
        self.monitoring = self.monitoring or MonitoringConfig()
        self._check_settings()
        names = self.code().made.not_compared
        if names and self.checkpoints_local_dir is not None:
            logger.warning(
                f"rollout: a resume does not notice when these change: {'; '.join(names)}."
            )

    def _check_settings(self) -> None:
        check_rollout(self.rollout_fn, self.shared_context)
        check_notice(self.preemption_notice, self.drain_signals)
        self.rollout_fn = for_config(self.rollout_fn, self.model)
        if isinstance(self.rollout_fn, BatchRollout) and self.model.rollouts_per_document > 1:
            raise ConfigError("rollouts_per_document: must be 1 for a batch file; see n.")
        self._check_names()
        self._check_limits()
        self.tells_endpoints = any(model.endpoints for model in self.models.values())
        local = self.checkpoints_local_dir
        check_writer(self.output_writer, checkpoints=local is not None)
        if local is None:
            self._check_without_checkpoints()
        else:
            self._check_folders(local)
            self._adopt(self._recorded(None))

    def _check_names(self) -> None:
        key = self.metadata_key
        if isinstance(self.rollout_fn, EmbedRollout) and self.rollout_fn.column == key:
            raise ConfigError(f"column: {key!r} is the step's metadata_key. Give another name.")
        if self.answer_column in (key, "", *FIELDS):
            raise ConfigError(
                f"answer: {self.answer_column!r} is taken, or no name. Give another name, such as "
                "summary."
            )
        if not self.rollout_results and self.answer_column is None:
            raise ConfigError(
                "rollout_results: false leaves no column for the answers. Set answer."
            )
        if key in FIELDS and getattr(self.output_writer, "expand_metadata", False):
            raise ConfigError(
                f"metadata_key: {key!r} would replace the document's own. Give another name."
            )

    def _check_limits(self) -> None:
        prices = [each for model in self.models.values() for each in model.all_prices]
        if self.max_cost is not None and not all(prices):
            raise ConfigError(
                "needs prices of a million tokens, such as prices: {prompt: 2, completion: 8}",
                setting="max_cost",
            )
        generates = self.max_cost is not None and not isinstance(self.rollout_fn, EmbedRollout)
        for each in prices:
            if generates and "completion" not in each:
                shown = ", ".join(f"{name}: {each[name]}" for name in each)
                raise ConfigError(
                    f"needs the price of completion tokens. Write prices: {{{shown}, completion: "
                    "8}, with your provider's price, or 0.",
                    setting="max_cost",
                )
        for name, value in asdict(self.limits).items():
            if value and any(model.provider_batches for model in self.models.values()):
                raise ConfigError(
                    "cannot stop provider_batches. Set the reader's limit.",
                    setting=name,
                )

    def _check_folders(self, local: str) -> None:
        if get_protocol(local) not in ("file", "local"):
            raise ConfigError(
                f"{local!r} must be a local directory.", setting="checkpoints_local_dir"
            )
        check_output_folder(self.output_writer, local)
        folder = Path(local).absolute()
        if self.checkpoints_remote_dir is not None:
            check_mirror(self.checkpoints_remote_dir)
        for name in ("answers_from", "checkpoints_remote_dir"):
            other = str(getattr(self, name)).removeprefix("file://")
            if Path(other).absolute() == folder:
                raise ConfigError("is this run's own checkpoints_local_dir.", setting=name)

    def adopt_recorded_settings(self) -> None:
        """Keeps the form of chats and the output columns of a run that has begun: files with other
        columns would not load together. A new node reads them from the mirror.
        """
        self._adopt(self._recorded(self.checkpoints_remote_dir))

    def _adopt(self, recorded: JsonObject) -> None:
        prompt = self.rollout_fn
        if (
            isinstance(prompt, PromptRollout)
            and prompt.chat_texts
            and sent_chats_as_texts(recorded)
        ):
            self.rollout_fn = prompt.as_before()
        if recorded:
            self.tells_endpoints = _ENDPOINT_COLUMN in recorded
        if self.tells_endpoints and not any(model.endpoints for model in self.models.values()):
            models = {name: model.naming_endpoints() for name, model in self.models.items()}
            if "named_models" in vars(self):
                self.named_models = models
            self.config = next(iter(models.values()))

    def _recorded(self, mirror: str | None) -> JsonObject:
        if self.checkpoints_local_dir is None:
            return {}
        with suppress(ConfigError, OSError):  # the start of the run reports it
            recorded = recorded_settings(self.checkpoints_root)
            if recorded or mirror is None:
                return recorded
            from datatrove_ckpt.mirror.restore import read_job  # slow to import

            return read_job(mirror)
        return {}

    def _check_without_checkpoints(self) -> None:
        dependent = {
            "provider_batches": any(model.provider_batches for model in self.models.values()),
            "on_document_error": self.on_document_error != "stop" or self.retry_dead_letters,
            "answers_from": self.answers_from,
            "checkpoints_remote_dir": self.checkpoints_remote_dir,
            **dict.fromkeys(self.settings_for_letters, True),
            **asdict(self.limits),
        }
        for name, value in dependent.items():
            if value:
                raise ConfigError("needs checkpoints_local_dir: set both.", setting=name)

    @property
    def limits(self) -> Limits:
        until = self.until
        if self.retry_dead_letters:  # all tasks of the run are complete
            until = None
        return Limits(until, self.max_cost, self.max_total_tokens, *self.spent_before)

    @property
    def models(self) -> dict[str, InferenceConfig]:
        """The configs by model name, the model of ``generate`` first; {"": config} for a model
        without a name.
        """
        if "named_models" in vars(self):
            return dict(self.named_models)
        return {"": self.model}

    @property
    def model(self) -> InferenceConfig:
        assert isinstance(self.config, InferenceConfig)
        return self.config

    @property
    def settings_for_letters(self) -> list[str]:
        return [
            name
            for model in self.models.values()
            for name, policy in model.answer_policies.items()
            if policy.fallback == "dead_letter"
        ]

    @property
    def answer_column(self) -> str | None:
        if self.explode:
            return self.answer or "item"
        return self.answer

    @property
    def added_columns(self) -> dict[str, str]:
        endings = []
        if self.quality:
            endings += ["finish_reason", "faults", "tokens"]
        if self.tells_endpoints:
            endings.append("endpoint")
        name = self.answer_column or self.metadata_key
        return {ending: f"{name}_{ending}" for ending in endings}

    @property
    def rows(self) -> RowsOf:
        if self.explode:
            return partial(exploded, column=str(self.answer_column), key=self.metadata_key)
        return one_row

    def requests_and_servers(self) -> tuple[int, int]:
        models = self.models.values()
        requests = sum(
            requests_at_once(model.max_concurrent_generations, model.servers) for model in models
        )
        return requests, sum(model.servers for model in models)

    @property
    def checkpoints_root(self) -> Path:
        """The path of ``checkpoints_local_dir`` on this node.

        Raises:
            ConfigError: a variable in the path is not set here.
        """
        return expand_path("checkpoints_local_dir", self.checkpoints_local_dir or "")

    def preemption(self) -> Preemption:
        """Returns the object that handles a stop. Without a checkpoint there is no drain, because
        nothing is saved.
        """
        seconds = 0.0
        if self.checkpoints_local_dir is not None:
            seconds = self.drain_seconds
        from datatrove_ckpt.process.preemption import Preemption

        return Preemption(self.drain_signals, seconds, self.preemption_notice)

    @property
    def may_share_servers(self) -> bool:
        """True if ranks of this process may share servers. Tasks on several nodes have one rank."""
        return NodeGroup.from_environment().count == 1 and all(
            model.reuse_servers for model in self.models.values()
        )

    def identity(self, world_size: int) -> RunIdentity:
        chunk = self.records_per_chunk
        keys: JsonObject = {"metadata_key": self.metadata_key}
        if self.answer is not None:  # older checkpoints continue
            keys["answer"] = self.answer
        if self.explode:
            keys["explode"] = True
        if not self.rollout_results:
            keys["rollout_results"] = False
        if self.quality:
            keys["quality"] = True
        acts = any("on_refusal" in model.answer_policies for model in self.models.values())
        if self.quality or (acts and self.refusals):
            keys["refusals"] = [*self.refusals]
        if getattr(self.rollout_fn, "chat_texts", None):  # also beside rollout_version
            keys[CHAT_TEXTS] = True
        if self.tells_endpoints:
            keys[_ENDPOINT_COLUMN] = True
        recorded = self._recorded(self.checkpoints_remote_dir)
        return run_identity(
            self.code(), self.models, self.output_writer, chunk, keys, world_size, recorded
        )

    def changed(self, **settings: object) -> Self:
        copied = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__)
        for name, value in settings.items():
            setattr(copied, name, value)
        return copied

    def record_steps_before(self, steps: Sequence[object]) -> None:
        self.steps_before = described(steps)

    @classmethod
    def _ready_process(cls) -> None:
        """Does what every process needs that has a step, and not who only imports its class:
        multiprocess and datatrove's executors are slow to import.
        """
        from multiprocess.reduction import ForkingPickler

        from datatrove_ckpt.process import task_log  # noqa: F401 (for its import)

        ForkingPickler.register(cls, _for_process)

    def code(self) -> CodeIdentity:
        """Returns the code's part of the run's identity. Functions pickled by value are described
        as they were pickled.
        """
        self._code_when_made = code_identity(
            self.rollout_fn,
            self.shared_context,
            getattr(self, "_code_when_made", None),
            self.output_writer,
            self.rollout_version,
        )
        return self._code_when_made

    def __getstate__(self) -> dict[str, Any]:
        """Adds this process's description of the code, and the script's names that it uses.

        Raises:
            ConfigError: a file would hold a secret.
        """
        self.code()
        state = {**self.__dict__}
        described = {**state}
        del described["_code_when_made"]  # hashes, under the names of the hashed values
        names = script_names.collect(described)
        if names is not None:
            state["_script_names"] = names
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._ready_process()
        names = state.pop("_script_names", None)
        self.__dict__.update(state)
        if names is not None:
            script_names.restore(names)

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Copies without the pickle's parts: modules among the script's names cannot be copied."""
        outer = next((copied for copied in memo.values() if launcher(copied).sends_pickle), None)
        if outer is not None:
            # Refuses a submission before datatrove copies it and opens ``executor.pik``.
            names: script_names.ScriptNames | None = self.__getstate__().get("_script_names")
            if names is not None:
                script_names.warn_left_out(names)
            if launcher(outer).has_own_disks and not hasattr(outer, "sends_own_modules"):
                logger.warning(
                    "datatrove's JobsPipelineExecutor resumes only with checkpoints_remote_dir, "
                    "does not drain, and needs this package and keys as dependencies and "
                    "secrets. Use datatrove_ckpt.JobsPipelineExecutor."
                )
        copied = memo[id(self)] = self.changed()
        copied.__dict__.update(deepcopy(self.__dict__, memo))
        return copied


# Only the generated ``__init__`` is needed: datatrove would write a dataclass, secrets included, to
# executor.json.
del RunnerSettings.__dataclass_fields__
# Python's messages about arguments show this name.
RunnerSettings.__init__.__qualname__ = "InferenceRunner.__init__"


def described(steps: Sequence[object]) -> list[StepRecord]:
    from datatrove_ckpt.readers.shard_record import describe_pipeline

    return describe_pipeline(steps, code_of)


def _for_process(step: RunnerSettings) -> object:
    with script_names.nothing_carried():
        return step.__reduce_ex__(2)
