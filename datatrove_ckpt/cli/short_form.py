r"""The short form of a job, written out as the long form, which everything else reads.

    run_folder: runs/summaries            holds output/, checkpoints/ and logs/
    input: documents/*.jsonl
    prompt: "Summarise in one sentence:\n\n{text}"
    model: HuggingFaceTB/SmolLM2-1.7B-Instruct

Every setting of the reader, of ``InferenceRunner``, of ``InferenceConfig`` and of an answer can
stand beside these by its name.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from dataclasses import fields, replace
from functools import cache
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import yaml  # type: ignore[import-untyped]

from datatrove_ckpt.checkpoint import layout
from datatrove_ckpt.checkpoint.job_file import recorded_settings
from datatrove_ckpt.cli import yaml_config
from datatrove_ckpt.cli.job_input import JobInput, SavedInput, class_of, node
from datatrove_ckpt.cli.job_settings import ShortJob
from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.common.formatting import did_you_mean
from datatrove_ckpt.common.launchers import default_mirror
from datatrove_ckpt.common.setting_types import parameters_of
from datatrove_ckpt.config.templates import parse
from datatrove_ckpt.errors import (
    CheckpointMismatch,
    ConfigError,
    form,
    named,
    start_over,
    use_form,
)
from datatrove_ckpt.output.formats import BY_NAME
from datatrove_ckpt.readers import READERS

if TYPE_CHECKING:
    from datatrove_ckpt.run_folder.queries import Query

Node = JsonObject
_READERS = [reader.__name__ for reader in READERS]

# As configs/slurm.yaml explains them.
_SLURM: Node = {
    "time": "20:00:00",
    "qos": "",
    "cpus_per_task": 8,
    "mem_per_cpu_gb": 8,
    "requeue_signals": ["SIGUSR1"],
    "sbatch_args": {"signal": "USR1@180", "open-mode": "append"},
}
_CHUNK = 1000  # documents
_FILENAME = "${rank}_chunk_${chunk_index}."
_TASKS: dict[str, tuple[str, Node]] = {
    "embed": ("EmbedRollout", {"column": "embedding"}),
    "classify": ("ClassifyRollout", {}),
    "batch": ("BatchRollout", {}),
}
# Settings that become ``default_generation_params``.
_SAMPLING = ("max_tokens", "temperature", "top_p", "stop", "service_tier")
NAMES = [field.name for field in fields(ShortJob)]
_ROLLOUTS = [name for name in yaml_config.SHORT_NAMES if name.endswith("Rollout")]
_BY_FORM = (
    "config",
    "rollout_fn",
    "output_writer",
    "checkpoints_local_dir",
    "data_folder",
    "dataset",
)
"""Settings of the long form that the short form sets."""


@cache
def settings() -> dict[str, list[str]]:
    """Returns the settings that a job may have, each with the classes that take it. The first of
    these classes in a job gets the value.
    """
    by_class = {"ShortJob": parameters_of(ShortJob)[0]}
    for name in (*_READERS, "InferenceConfig", "InferenceRunner", *_ROLLOUTS):
        by_class[name] = parameters_of(yaml_config.import_name(name, ""))[0]
    owners: dict[str, list[str]] = {}
    for cls, parameters in by_class.items():
        for name in parameters:
            if name not in _BY_FORM:
                owners.setdefault(name, []).append(cls)
    return owners


def read_config(path: str | None, overrides: list[str], inspect_only: bool = False) -> Node:
    """Returns the job of a file in the long form, with the overrides (``path=value``) applied.

    Args:
        path: the file; None: the overrides are the whole job, in the short form.

    Raises:
        ConfigError: see ``read_job`` and ``expand``; or the job has steps.
    """
    config = read_job(path, overrides)
    if "executor" not in config:
        use_form(path or "the command line")
        if "steps" in config:
            raise ConfigError(
                f"{form()}: steps: a pod has no place for the queries between them, and tune "
                "takes one run."
            )
        if "dead_letters" in config:
            raise ConfigError(f"{form()}: dead_letters: is for a job with steps.")
        config = expand(config, inspect_only)
    for override in filter(_is_long, overrides):
        yaml_config.set_at_path(config, override)
    return config


def read_job(path: str | None, overrides: list[str]) -> Node:
    """Returns the job of a file in the form that it has, with the overrides of the short form.

    Raises:
        ConfigError: see ``load``; or an override does not fit the file.
    """
    sys.path.insert(0, str(Path.cwd()))  # rollout_fn: my_module.my_rollout
    config = {}
    if path is not None:
        config = yaml_config.load(path)
    short = [override for override in overrides if not _is_long(override)]
    for name, times in Counter(
        override.partition("=")[0].replace("_", "-") for override in short
    ).items():
        if times > 1:
            raise ConfigError(
                f"{name}: given {times} times. Give it once; for several files, a pattern or a "
                "folder."
            )
    if "executor" not in config:
        for override in short:
            yaml_config.set_at_path(config, override, ShortJob)
    elif short:
        raise ConfigError(
            f"{short[0].partition('=')[0]}: {path} is in the long form: write "
            "--pipeline.1.config.max_concurrent_generations, for example."
        )
    return config


def _is_long(override: str) -> bool:
    return re.match(r"(--)?(executor|pipeline|kubernetes)\.", override) is not None


def make_executor(path: str | None, overrides: list[str]) -> tuple[Node, Any]:
    config = read_config(path, overrides)
    return config, yaml_config.build(config)


def expand(short: Node, inspect_only: bool = False, rows: object = None) -> Node:
    """Returns the long form of a job.

    Args:
        inspect_only: the input and prompt file may be gone. The input is not listed, so its reader
            may have no class.

    Raises:
        ConfigError: a setting is missing, unknown, or cannot be derived from the input.
    """
    try:
        yaml_config.refuse_unknown(short, [*settings()], form())
        short = {name: _text(name, value, inspect_only) for name, value in short.items()}
        form_settings = {name: short[name] for name in NAMES if short.get(name) is not None}
        job = yaml_config.construct(ShortJob, form_settings, form())
        elsewhere = job.elsewhere
        if len(elsewhere) > 1 and elsewhere != ["slurm", "kubernetes"]:
            raise ConfigError(f"{', '.join(elsewhere)}: give only one.")
        if job.workers != 1 and elsewhere:
            raise ConfigError(f"workers: write them inside `{elsewhere[0]}`.")
        if job.is_remote and job.jobs is None:
            raise ConfigError(
                f"run_folder: must be a folder of this machine; it is {job.run_folder}. For "
                "Hugging Face Jobs, add `jobs: {}`. For a remote output alone, change "
                "output_folder in the long form (--print-config)."
            )
        recorded = _recorded(job, short)
        mirror = short.get("checkpoints_remote_dir")
        saved = SavedInput(job.root / layout.KEPT_INPUT, recorded != {}, mirror)
        job_input = JobInput(_input(job, inspect_only, rows, saved), inspect_only)
        reader = job_input.reader()
        job = _as_batch(job, job_input, reader, short)
        tasks = recorded.get("tasks") if job.tasks is None else job.tasks
        if tasks is None:
            tasks = job_input.count_tasks(reader, bool(job.elsewhere))
        rollout = _rollout(job, short)
        if isinstance(rollout, dict) and reader["class_path"] == "PageReader":
            parameters = parameters_of(yaml_config.import_name(rollout["class_path"], form()))[0]
            if "images" in parameters:
                rollout["init_args"]["images"] = "media"
        configs = _models(job, short, inspect_only)
        chunk = _CHUNK
        if isinstance(short.get("until"), int):
            chunk = min(_CHUNK, max(1, short["until"] // 10))
        runner: Node = {
            "rollout_fn": rollout,
            "config": configs.get("", configs),
            "answer": recorded.get("answer"),
            "records_per_chunk": recorded.get("records_per_chunk", chunk),
        }
        owners = {"InferenceRunner": runner}
        for name in [reader["class_path"]] if reader["class_path"] else _READERS:
            owners[name] = reader["init_args"]
        if isinstance(rollout, dict):
            owners[rollout["class_path"]] = rollout["init_args"]
        for name, value in short.items():
            if not (name in NAMES or "InferenceConfig" in settings()[name]):
                _place(name, value, owners)
        # This machine cannot see how a run elsewhere began, nor its files.
        if not job.is_remote:
            _allow_no_text(job, recorded, reader, rollout, job_input)
            if not (recorded or job.task == "batch" or "answer" in short):
                key = str(runner.get("metadata_key", "rollout_results"))
                runner["answer"] = _answer(job_input, reader, rollout, key)
        runner["checkpoints_local_dir"] = (
            "checkpoints" if job.is_remote else f"{job.root}/checkpoints"
        )
        runner["output_writer"] = _writer(job, reader, recorded, runner["answer"])
        executor = {"tasks": tasks, "logging_dir": f"{job.below}/logs"}
        executor["pipeline"] = [reader, node("InferenceRunner", **runner)]
        long: Node = {"executor": _executor(job, executor, configs)}
        if job.kubernetes is not None:
            long["kubernetes"] = form_settings["kubernetes"]
        return long
    except ConfigError as error:
        named(error, form())
        raise


def _recorded(job: ShortJob, short: Node) -> Node:
    """Returns the settings with which the run began: on a new node, or for jobs elsewhere, those on
    the mirror.
    """
    recorded = recorded_settings(job.root / "checkpoints")
    mirror = short.get("checkpoints_remote_dir")
    if job.is_remote:
        mirror = mirror or default_mirror(f"{job.below}/logs")
    if recorded or not isinstance(mirror, str):
        return recorded
    from datatrove_ckpt.mirror.restore import read_job

    with suppress(ConfigError, OSError):  # the start of the run reports it
        recorded = read_job(mirror)
    return recorded


def _place(name: str, value: object, by_class: dict[str, Node]) -> None:
    """Puts a setting into the arguments of its class. A mapping joins the form's own mapping.

    Args:
        by_class: the arguments of the job's classes, the rollout's last.
    """
    owners = [owner for owner in settings()[name] if owner in by_class]
    if not owners and value is None:
        return
    if not owners:
        hint = did_you_mean(yaml_config.OTHER_NAMES.get(name, ""), settings()) or (
            ". Remove it, or change the input or the rollout."
        )
        owner = settings()[name][0]
        raise ConfigError(f"{name}: is a setting of {owner}, which this job has not{hint}")
    arguments = by_class[owners[0]]
    if isinstance(value, dict) and isinstance(arguments.get(name), dict):
        value = {**arguments[name], **value}
    arguments[name] = value


def _as_batch(job: ShortJob, job_input: JobInput, reader: Node, short: Node) -> ShortJob:
    is_told = job.task == "batch"
    if not is_told and (job.prompt or job.rollout or job.task or short.get("prompt_column")):
        return job
    if is_told and reader["class_path"] not in ("JsonlReader", ""):
        raise ConfigError("task: batch is for JSON lines.")
    model = job.model
    first: Node = {}
    if job_input.inspect_only:
        model = model or "(of the input)"
    elif not (is_told and model):
        first = job_input.first_request(reader)
    if not (is_told or job_input.inspect_only or first):
        return job
    if (job.endpoint or short.get("endpoints")) and isinstance(first.get("body"), dict):
        model = model or first["body"].get("model")
    if job.output_format is not None and not job.output_format.startswith("jsonl"):
        raise ConfigError("output_format: answers to a batch file are JSON lines.")
    reader["class_path"] = "BatchReader"
    return replace(job, task="batch", model=model)


def _allow_no_text(
    job: ShortJob, recorded: Node, reader: Node, rollout: object, job_input: JobInput
) -> None:
    """Lets the reader keep rows without a text, if the prompt does not name it, or a user's rollout
    gets a first row without a text; and the last start did not skip such rows.
    """
    if not class_of(reader).has_rows:
        return
    if recorded:
        with suppress(OSError, LookupError, TypeError, ValueError):
            executor = orjson.loads((job.root / "logs" / "executor.json").read_bytes())
            if executor["pipeline"][0]["text_key"] is not None:
                return
    if not isinstance(rollout, dict):
        first = "text_key" not in reader["init_args"] and job_input.first_document(reader, True)
        if first and not first.text and "text" not in first.metadata:
            reader["init_args"]["text_key"] = None
            from loguru import logger

            logger.info(
                "The first row has no text, so none is needed. If one of "
                f"{', '.join(first.metadata)} is the text, set text_key."
            )
        return
    arguments = rollout["init_args"]
    templates = [arguments[name] for name in ("prompt", "judge_prompt") if arguments.get(name)]
    keys = set()
    with suppress(ConfigError):  # the rollout names what is wrong with its template
        for template in templates:
            keys |= {key or name for _, name, key in parse(str(template))}
    text_key = reader["init_args"].get("text_key")
    is_by_column = arguments.get("prompt_column") is not None and text_key is None
    if is_by_column or (templates and "text" not in keys and text_key in (None, *keys)):
        reader["init_args"]["text_key"] = None


def _executor(job: ShortJob, executor: Node, configs: dict[str, Node]) -> Node:
    user_arguments = job.slurm or job.jobs or {}
    for name in user_arguments.keys() & executor.keys():
        raise ConfigError(f"{name}: is set beside `slurm` and `jobs`, and not inside.")
    if job.slurm is not None:
        slurm = {**_SLURM, "job_name": job.root.name, "slurm_logs_folder": f"{job.root}/logs/slurm"}
        if any(config["server_type"] != "endpoint" for config in configs.values()):
            slurm["gpus_per_task"] = 1
        return node("SlurmPipelineExecutor", **{**slurm, **user_arguments}, **executor)
    if job.jobs is not None:
        return node(
            "JobsPipelineExecutor", **{"job_name": job.root.name, **user_arguments}, **executor
        )
    return node("LocalPipelineExecutor", workers=job.workers, **executor)


def _text(name: str, value: object, inspect_only: bool) -> object:
    """Replaces a prompt or schema ``@FILE`` by the content of the file."""
    if value == "" and name in NAMES:
        raise ConfigError(f"{name}: is empty. Leave it out, or write null.")
    is_schema = name == "json_schema"
    if not (is_schema or name.endswith("prompt")):
        return value
    if re.fullmatch(r"[^\s@{]+\.(txt|md|json|ya?ml)", str(value)):
        raise ConfigError(f'{name}: is a file\'s name. For its content, write "@{value}".')
    if not str(value).startswith("@"):
        return value
    path = Path(str(value)[1:]).expanduser()
    try:
        text = path.read_text(encoding="utf-8-sig")
        if not is_schema:
            return text
        if path.suffix in (".yaml", ".yml"):
            return yaml.load(text, yaml_config.Loader)
        return json.loads(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        if inspect_only:
            return value
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{name}: {path.absolute()} cannot be read: {reason}.") from None


def _writer(job: ShortJob, reader: Node, recorded: Node, answer: str | None) -> Node:
    kind = job.output_format
    if kind is None:
        kind = str(recorded.get("output_filename")).removeprefix(_FILENAME)
    if kind not in BY_NAME:
        is_table = not recorded and (job.task == "embed" or class_of(reader).has_types)
        kind = "parquet" if is_table else "jsonl"
    output_format = BY_NAME[kind]
    arguments = output_format.settings(answer is not None)
    if job.task == "batch":
        arguments["adapter"] = "batch_line"
    name = f"{_FILENAME}{kind}"
    folder = f"{job.below}/output"
    return node(output_format.writer, output_folder=folder, output_filename=name, **arguments)


def _rollout(job: ShortJob, short: Node) -> object:
    name = job.rollout
    prompts = {}
    if job.prompt is not None:
        prompts["prompt"] = job.prompt
    if job.task is not None:
        if name is not None:
            raise ConfigError("task: give it or rollout, not both.")
        class_path, arguments = _TASKS[job.task]
        return node(class_path, **arguments, **prompts)
    if name is None and (prompts or short.get("prompt_column") is not None):
        name = "PromptRollout"
    if name in _ROLLOUTS:
        return node(str(name), **prompts)
    if name is None:
        raise ConfigError(
            "prompt: is missing; give it, rollout (my_module.my_function), or prompt_column for "
            "lists of messages."
        )
    if prompts:
        raise ConfigError("prompt: give it or rollout, not both.")
    if isinstance(name, str) and not re.fullmatch(r"\w+(\.\w+)+", name):
        yaml_config.import_name(name, form(), "rollout")
    return name


def _server(job: ShortJob, short: Node, inspect_only: bool) -> Node:
    if job.model is None:
        hint = "a name on the hub, or a GGUF file"
        if job.endpoint or short.get("endpoints"):
            hint = "the name that the endpoint knows"
        raise ConfigError(f"model: is missing; give {hint}.")
    config: Node = {"server_type": "endpoint", "model_name_or_path": job.model}
    sampling = {name: getattr(job, name) for name in _SAMPLING if getattr(job, name) is not None}
    for group in ("generation_params", "default_generation_params"):
        params = short.get(group)
        if isinstance(params, dict) and sampling.keys() & params:
            name = min(sampling.keys() & params)
            raise ConfigError(f'{name}: is also in "{group}". Give it once.')
    if sampling:
        config["default_generation_params"] = sampling
    if sampling and job.task in ("embed", "classify"):
        name = next(iter(sampling))
        raise ConfigError(f"{name}: is not for task: {job.task}. Remove it.")
    if short.get("endpoints") is not None:
        if job.endpoint is not None:
            raise ConfigError("endpoint: give it or endpoints, not both.")
        return config
    if job.endpoint is not None:
        return config | {"endpoint_url": job.endpoint}
    config["server_log_folder"] = "server_logs"
    if not job.jobs:
        config["server_log_folder"] = str(Path(job.run_folder, "logs", "server"))
    from datatrove_ckpt.config.inference_config import ENGINES, visible_gpus

    gpus = visible_gpus()
    sharing = {"tp", "dp", "pp"} & short.keys()
    # A login node without GPUs may look at the run.
    if sharing and not (gpus or inspect_only or job.elsewhere or "server_type" in short):
        raise ConfigError(
            f"{min(sharing)}: this machine shows no GPU (nvidia-smi, CUDA_VISIBLE_DEVICES)."
        )
    is_gguf = job.model.startswith(("package://", "hf://")) or job.model.endswith(".gguf")
    if is_gguf or (not gpus and not job.elsewhere):
        config["server_type"] = "llamacpp"
        config |= {"model_max_context": 4096, "max_concurrent_generations": 4}
        # A quantised model has another name, because the same run must not continue on GPUs.
        is_name = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*(?<!\.gguf)", job.model)
        if is_name and not Path(job.model).exists():
            config["model_name_or_path"] = f"hf://{job.model}"
    else:
        on_gpus = [engine for engine in ENGINES.values() if engine.leases_gpus]
        installed = [engine for engine in on_gpus if find_spec(engine.package)]
        config["server_type"] = (installed or on_gpus)[0].name
        is_decided = job.elsewhere or sharing
        if len(gpus) > job.workers > 0 and not is_decided:
            config["replicas"] = len(gpus) // job.workers
    engine = ENGINES.get(str(short.get("server_type", config["server_type"])))
    if engine and job.task in engine.task_flags:
        config["model_kwargs"] = dict(engine.task_flags[str(job.task)])
    return config


def _models(job: ShortJob, short: Node, inspect_only: bool) -> dict[str, Node]:
    """Returns the settings of each model by its name; "" for the only one. Those of the job hold
    where a model has none of its own.
    """
    of_model = ["model", "endpoint", *_SAMPLING]
    of_config = [name for name, owners in settings().items() if "InferenceConfig" in owners]
    configs = {}
    for name, own in (job.models or {"": {}}).items():
        yaml_config.refuse_unknown(own, [*of_model, *of_config], f"{form()}: models.{name}")
        given = {**short, **own}
        chosen = {key: own[key] for key in of_model if key in own}
        config = configs[name] = _server(replace(job, **chosen), given, inspect_only)
        for key, value in given.items():
            if key in of_config and key not in NAMES:
                _place(key, value, {"InferenceConfig": config})
    return configs


def _input(job: ShortJob, inspect_only: bool, rows: object, saved: SavedInput) -> str:
    if rows is None and isinstance(job.input, str) and job.input != "-":
        return job.input
    if job.is_remote:
        raise ConfigError(
            "input: standard input, queries and Python rows need a local run_folder; it is "
            f"{job.run_folder}. Give a file."
        )
    if isinstance(job.input, dict):
        return _query(job.input, inspect_only, saved)
    data = b""
    if rows is None and not (inspect_only or sys.stdin.isatty()):
        data = sys.stdin.buffer.read()
    path = saved.folder / "stdin.jsonl"
    if rows is not None:
        path = saved.save_rows(rows)
    elif data:
        if not data.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
            raise ConfigError("input: standard input is no JSON lines. Name a file.")
        saved.save_lines([data], "stdin")
    elif not (inspect_only or path.exists()):
        raise ConfigError("input: standard input is empty.")
    if not inspect_only:
        saved.record_folder()
    return str(path)


def _query(given: Node, inspect_only: bool, saved: SavedInput) -> str:
    if not inspect_only:
        query = read_query(given, "input")
        try:
            saved.save_query(query, {}, {"sql": query.sql, "steps": {}})
        except CheckpointMismatch as error:
            error.advice = f" Undo the change. {start_over(keeps_results=True)}"
            raise
    return f"{saved.folder}/*.parquet"


def read_query(given: Node, label: str) -> "Query":
    """Reads ``{sql: ...}``.

    Raises:
        ConfigError: see ``queries.parse``.
    """
    from datatrove_ckpt.run_folder import queries

    yaml_config.refuse_unknown(given, ["sql"], label)
    return queries.parse(str(given.get("sql", "")), label)


def free_answer(columns: Collection[str]) -> str:
    names = (f"answer_{number}" for number in count(2))
    return next(name for name in names if name not in columns)


def _answer(job_input: JobInput, reader: Node, rollout: object, metadata_key: str) -> object:
    if isinstance(rollout, dict) and rollout["class_path"] == "EmbedRollout":
        return rollout["init_args"].get("column")
    first = job_input.first_document(reader)
    columns = first.metadata if first else ()
    if "answer" not in columns or metadata_key in columns:
        return "answer"
    free = free_answer(columns)
    from loguru import logger

    logger.info(f"The input has a column 'answer', so answers are in {free!r}.")
    return free
