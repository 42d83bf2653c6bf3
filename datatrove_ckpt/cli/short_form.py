r"""The short form of a job, written out as the long form, which everything else reads.

    run_folder: runs/summaries            holds output/, checkpoints/ and logs/
    input: documents/*.jsonl
    prompt: "Summarise in one sentence:\n\n{text}"
    model: HuggingFaceTB/SmolLM2-1.7B-Instruct

Every setting of the reader, of ``InferenceRunner``, of ``InferenceConfig`` and of an answer can
stand beside these by its name.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import fields, replace
from functools import cache
from glob import escape, has_magic
from importlib.util import find_spec
from itertools import count, islice
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import orjson

from datatrove_ckpt.checkpoint.identity import recorded_settings
from datatrove_ckpt.checkpoint.layout import is_input
from datatrove_ckpt.cli import kept_input
from datatrove_ckpt.cli.job_settings import SAMPLING, ShortJob
from datatrove_ckpt.cli.yaml_config import (
    OTHER_NAMES,
    SHORT_NAMES,
    build,
    construct,
    import_name,
    load,
    refuse_unknown,
    set_at_path,
)
from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.common.declared import parameters_of
from datatrove_ckpt.common.formatting import did_you_mean
from datatrove_ckpt.common.redaction import HIDDEN
from datatrove_ckpt.common.retrying import failure_line
from datatrove_ckpt.config.templates import parse
from datatrove_ckpt.errors import CkptError, ConfigError
from datatrove_ckpt.errors.names import form, use, written_in
from datatrove_ckpt.output.formats import BY_NAME, JSONL
from datatrove_ckpt.readers import READERS, JsonlReader, SeekingReader
from datatrove_ckpt.readers.compressed import open_content, uncompressed

if TYPE_CHECKING:
    from datatrove_ckpt.run_folder.run_output import OutputPath, OutputUrl


Node = JsonObject

_READERS = {reader.__name__: reader for reader in READERS}
_SUFFIXES = {suffix: reader.__name__ for reader in READERS for suffix in reader.suffixes.split()}
_MOST_TASKS = 100
_LOOKED_AT = 100  # lines
_LEAST_BYTES = 1 << 22  # of a task on this machine, which takes far longer than its start


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
NAMES = [field.name for field in fields(ShortJob)]
_ROLLOUTS = [name for name in SHORT_NAMES if name.endswith("Rollout")]
_BY_FORM = (
    "config",
    "rollout_fn",
    "output_writer",
    "checkpoints_local_dir",
    "data_folder",
    "dataset",
)
"""Settings of the long form that the form sets."""
_BY_RUN_FOLDER = ("checkpoints_local_dir", "checkpoints_dir", "checkpoint_dir", "logging_dir")


@cache
def settings() -> dict[str, dict[str, object]]:
    """Returns the settings that a job may have: of each the types of its value, by the classes that
    have it, in the order in which they get it.
    """
    known = {"ShortJob": parameters_of(ShortJob)[0]}
    for name in (*_READERS, "InferenceConfig", "InferenceRunner", *_ROLLOUTS):
        known[name] = parameters_of(import_name(name, ""))[0]
    found: dict[str, dict[str, object]] = {}
    for cls, parameters in known.items():
        for name in parameters:
            if name not in _BY_FORM:
                found.setdefault(name, {})[cls] = parameters[name].annotation
    return found


def read_config(path: str | None, overrides: list[str], only_look: bool = False) -> Node:
    """Returns the job of a file in the long form, with the overrides (``path=value``) applied.

    Args:
        path: None: the overrides are the whole job, in the short form.
        only_look: see ``expand``.

    Raises:
        ConfigError: see ``load`` and ``expand``; or an override does not fit the file.
    """
    content = {}
    if path is not None:
        content = load(path)
    named = [
        one for one in overrides if not re.match(r"(--)?(executor|pipeline|kubernetes)\.", one)
    ]
    for name, times in Counter(one.partition("=")[0].replace("_", "-") for one in named).items():
        if times > 1:
            raise ConfigError(
                f"{name}: given {times} times. Give it once; several files are a pattern or a "
                "folder."
            )
    if "executor" not in content:
        use(path or "the command line")
        for override in named:
            set_at_path(content, override, ShortJob)
        content = expand(content, only_look)
    elif named:
        raise ConfigError(
            f"{named[0].partition('=')[0]}: {path} is in the long form, where a setting has a "
            "path, such as --pipeline.1.config.max_concurrent_generations."
        )
    for override in overrides:
        if override not in named:
            set_at_path(content, override)
    return content


def make_executor(path: str | None, overrides: list[str]) -> tuple[Node, Any]:
    """Returns what the file and the overrides say, and the executor that it describes.

    Raises:
        ConfigError: the first mistake in it.
    """
    sys.path.insert(0, str(Path.cwd()))  # rollout_fn: my_module.my_rollout
    content = read_config(path, overrides)
    return content, build(content)


def expand(content: Node, only_look: bool = False) -> Node:
    """Returns the long form.

    Args:
        only_look: the input and prompt file may be gone. The input is not listed, so its reader may
            have no class.

    Raises:
        ConfigError: a setting is missing, unknown, or cannot be told from the input.
    """
    for name in content:
        if name in _BY_RUN_FOLDER:
            raise _mistake(
                f"{name}: is set by run_folder, which holds output, checkpoints and logs."
            )
    refuse_unknown(content, [*settings()], form())
    content = {name: _text(name, value, only_look) for name, value in content.items()}
    own = {name: content[name] for name in NAMES if content.get(name) is not None}
    job = construct(ShortJob, own, form())
    _check_place(job)
    url = "://" in job.run_folder
    root = Path(job.run_folder).expanduser()
    begun = recorded_settings(root / "checkpoints")
    reader = _reader(_input(job, root, only_look), only_look)
    job = _as_batch(job, reader, only_look, content)
    tasks = begun.get("tasks") if job.tasks is None else job.tasks
    if tasks is None:
        tasks = 1 if only_look else _count_tasks(reader["init_args"], job)
    rollout = _rollout(job, content)
    if isinstance(rollout, dict) and reader["class_path"] == "PageReader":
        known = parameters_of(import_name(rollout["class_path"], form()))[0]
        if "images" in known:
            rollout["init_args"]["images"] = "media"
    answer = begun.get("answer")
    # This machine cannot see the files of a run that began elsewhere.
    if not begun and not url and job.task != "batch":
        answer = "answer"
        if isinstance(rollout, dict) and rollout["class_path"] == "EmbedRollout":
            answer = content.get("column", rollout["init_args"].get("column"))
    config = _server(job, content, only_look)
    runner: Node = {"rollout_fn": rollout, "config": config, "answer": answer}
    runner["records_per_chunk"] = _chunk(begun, content)
    places = {"InferenceConfig": config, "InferenceRunner": runner}
    for name in [reader["class_path"]] if reader["class_path"] else _READERS:
        places[name] = reader["init_args"]
    if isinstance(rollout, dict):
        places[rollout["class_path"]] = rollout["init_args"]
    for name, value in content.items():
        if name not in NAMES:
            _place(name, value, places)
    # This machine cannot see how a run elsewhere began.
    if not url and not (begun and _began_with_texts(root)):
        _allow_no_text(reader, rollout)
    if not (begun or only_look or "answer" in content):
        runner["answer"] = _free_name(runner["answer"], job.input, reader)
    below = str(root)
    if url:
        below = job.run_folder.rstrip("/")
    runner["checkpoints_local_dir"] = "checkpoints" if url else f"{below}/checkpoints"
    runner["output_writer"] = _writer(job, reader, begun, runner["answer"], f"{below}/output")
    executor = {"tasks": tasks, "logging_dir": f"{below}/logs"}
    executor["pipeline"] = [reader, _node("InferenceRunner", **runner)]
    long: Node = {"executor": _executor(job, root, executor, config)}
    if job.kubernetes is not None:
        long["kubernetes"] = own["kubernetes"]
    return long


def _chunk(begun: Node, content: Node) -> int:
    """Returns how many documents an output file has: fewer if the run ends after few documents."""
    until = content.get("until")
    usual = _CHUNK
    if isinstance(until, int):
        usual = min(_CHUNK, max(1, until // 10))
    return int(begun.get("records_per_chunk", usual))


def _mistake(text: str) -> ConfigError:
    return ConfigError(f"{form()}: {text}")


def _place(name: str, value: object, places: dict[str, Node]) -> None:
    """Puts a setting where it belongs. A mapping joins the one that the form has there.

    Args:
        places: the arguments of the job's classes. The rollout's come last.

    Raises:
        ConfigError: no class of the job has it.
    """
    owners = [owner for owner in settings()[name] if owner in places]
    if not owners:
        owner = next(iter(settings()[name]))
        kinds = _ROLLOUTS
        other = "a function as its rollout"
        if owner in _READERS:
            kinds = [*_READERS]
            other = "another reader"
        other = next((place for place in places if place in kinds), other)
        hint = did_you_mean(OTHER_NAMES.get(name, ""), settings()) or (
            ". Remove it, or change the input or the rollout."
        )
        raise _mistake(f"{name}: is a setting of {owner}, and this job has {other}{hint}")
    node = places[owners[0]]
    if isinstance(value, dict) and isinstance(node.get(name), dict):
        value = {**node[name], **value}
    node[name] = value


def _as_batch(job: ShortJob, reader: Node, only_look: bool, content: Node) -> ShortJob:
    """Returns the job with task, model and reader, where the input is a batch file."""
    is_told = job.task == "batch"
    if not is_told and (job.prompt or job.rollout or job.task or content.get("prompt_column")):
        return job
    if is_told and reader["class_path"] not in ("JsonlReader", ""):
        raise _mistake("task: batch is for JSON lines, and the input has none.")
    model = job.model
    first: Node = {}
    if only_look:
        model = model or "(of the input)"
    elif not (is_told and model):
        first = _first_request(reader)
    if not (is_told or only_look or first):
        return job
    if (job.endpoint or content.get("endpoints")) and isinstance(first.get("body"), dict):
        model = model or first["body"].get("model")
    if job.output_format is not None and BY_NAME[job.output_format] is not JSONL:
        raise _mistake("output_format: answers to a batch file are JSON lines.")
    reader["class_path"] = "BatchReader"
    return replace(job, task="batch", model=model)


def _first_request(reader: Node) -> Node:
    """Returns it from the first lines, of which some may be blank or damaged."""
    if reader["class_path"] == "JsonlReader":
        lines = import_name("JsonlReader", form())(**reader["init_args"])
        lines.max_skipped = None
        with suppress(CkptError, OSError):  # the checks before a start name what is wrong
            for name in _list(lines.data_folder, lines.glob_pattern)[:1]:
                with open_content(lines.data_folder, name, lines.compression) as file:
                    for line in islice(file, _LOOKED_AT):
                        row: Node = lines.parse_row(line, name, 0)
                        if isinstance(row, dict) and {"custom_id", "body"} <= row.keys():
                            return row
    return {}


def _class_of(reader: Node) -> type[SeekingReader]:
    """Returns its class; JsonlReader if its files were not listed."""
    return _READERS.get(reader["class_path"], JsonlReader)


def _allow_no_text(reader: Node, rollout: object) -> None:
    """Lets the reader keep rows without a text, if the prompt names neither the text nor the column
    that was given as ``text_key`` alone.
    """
    if not isinstance(rollout, dict) or not _class_of(reader).has_rows:
        return
    given = rollout["init_args"]
    templates = [given[name] for name in ("prompt", "judge_prompt") if given.get(name)]
    named: set[str] = set()
    with suppress(ConfigError):  # the rollout names what is wrong with its template
        for template in templates:
            named |= {key or name for _, name, key in parse(str(template))}
    text_key = reader["init_args"].get("text_key")
    is_by_column = given.get("prompt_column") is not None and text_key is None
    if is_by_column or (templates and "text" not in named and text_key in (None, *named)):
        reader["init_args"]["text_key"] = None


def _began_with_texts(root: Path) -> bool:
    """Returns whether the last start of a run skipped rows without a text."""
    with suppress(OSError, LookupError, TypeError, ValueError):
        executor = orjson.loads(Path(root, "logs", "executor.json").read_bytes())
        return executor["pipeline"][0]["text_key"] is not None
    return False


def _check_place(job: ShortJob) -> None:
    places = [name for name in ("slurm", "kubernetes", "jobs") if getattr(job, name) is not None]
    if "jobs" in places and len(places) > 1:
        raise _mistake(f"{', '.join(places)}: are different places to run. Give one of them.")
    if job.workers != 1 and places:
        raise _mistake(f"workers: are processes of this machine. Write them inside `{places[0]}`.")
    if "://" in job.run_folder and job.jobs is None:
        raise _mistake(
            f"run_folder: must be a folder of this machine; it is {job.run_folder}. For "
            "Hugging Face Jobs, add `jobs: {}`. For the output alone, give a folder here: "
            '--print-config then writes the long form, in which a URL can replace "output_folder".'
        )


def _executor(job: ShortJob, root: Path, executor: Node, config: Node) -> Node:
    given = job.slurm or job.jobs or {}
    for name in given.keys() & executor.keys():
        raise _mistake(f"{name}: is set beside `slurm` and `jobs`, and not inside.")
    if job.slurm is not None:
        slurm = {**_SLURM, "job_name": root.name, "slurm_logs_folder": str(root / "logs" / "slurm")}
        if config["server_type"] != "endpoint":
            slurm["gpus_per_task"] = 1
        return _node("SlurmPipelineExecutor", **{**slurm, **given}, **executor)
    if job.jobs is not None:
        return _node("JobsPipelineExecutor", **{"job_name": root.name, **given}, **executor)
    return _node("LocalPipelineExecutor", workers=job.workers, **executor)


def run(
    *,
    run_folder: str | Path,
    input: object,
    prompt: str | None = None,
    rollout: Callable[..., Awaitable[object]] | None = None,
    model: str | None = None,
    endpoint: str | list[str] | None = None,
    **settings: object,
) -> OutputPath | OutputUrl:
    """Runs a job, or what is left of it. The arguments are those of ``ShortJob``; ``settings`` any
    others, by name.

    Args:
        input: as in ``ShortJob``; or rows, which are written to the run folder: see ``keep_rows``.

    Returns:
        The folder of the output, as a path; of a ``run_folder`` that is a URL, a URL. Both read
        what is there: see ``RunOutput``.

    Raises:
        ConfigError: a mistake in the arguments; nothing was started.
        CkptError: see ``LocalPipelineExecutor.run``. The same call resumes.
    """
    if not isinstance(input, str | Path):
        input = kept_input.keep_rows(input, run_folder)
    content: Node = {"run_folder": run_folder, "input": input, "prompt": prompt, "rollout": rollout}
    content |= {"model": model, "endpoint": endpoint, **settings}
    for name, value in [*content.items()]:
        if isinstance(value, Path):
            content[name] = str(value)
        if value is None and name != "answer":
            del content[name]
    from datatrove_ckpt.cli.what_helps import advise  # slow to import
    from datatrove_ckpt.run_folder.run_output import OutputPath, OutputUrl
    from datatrove_ckpt.run_folder.run_plan import RunPlan

    with written_in("run()"):
        executor = build(expand(content))
        try:
            executor.run()
        except CkptError as error:
            advise(error, RunPlan(executor))
            raise
    if "://" in str(run_folder):
        return OutputUrl(f"{str(run_folder).rstrip('/')}/output")
    return OutputPath(Path(run_folder, "output").expanduser())


def _node(class_path: str, **arguments: object) -> Node:
    return {"class_path": class_path, "init_args": arguments}


def _text(name: str, value: object, only_look: bool) -> object:
    """Returns the value of a setting; of a prompt ``@FILE``, the file's text, or of a schema."""
    is_schema = name == "json_schema"
    if not (is_schema or name.endswith("prompt")):
        return value
    if re.fullmatch(r"[^\s@{]+\.(txt|md|json)", str(value)):
        raise _mistake(f'{name}: is the name of a file. For what it holds, write "@{value}".')
    if not str(value).startswith("@"):
        return value
    path = Path(str(value)[1:]).expanduser()
    try:
        text = path.read_text(encoding="utf-8-sig")
        return json.loads(text) if is_schema else text
    except (OSError, ValueError) as error:
        if only_look:
            return value
        why = getattr(error, "strerror", None) or error
        raise _mistake(f"{name}: {path.absolute()} cannot be read: {why}.") from None


def _free_name(name: str | None, given: str, reader: Node) -> str | None:
    """Returns a name for the answers that no column of the first document has.

    Looks at one file; folders are not listed for it.
    """
    columns: Node = {}
    if name == "answer" and Path(given).is_file():
        with suppress(Exception):  # the checks before a start name what is wrong
            rows = import_name(reader["class_path"], form())(**reader["init_args"])
            columns = next(iter(rows.read_file(Path(given).name))).metadata
    if name not in columns or "rollout_results" in columns:
        return name
    free = next(other for number in count(2) if (other := f"{name}_{number}") not in columns)
    from loguru import logger  # slow to import

    logger.info(f"The input has a column {name!r}, so the column of the answers is {free!r}.")
    return free


def _writer(job: ShortJob, reader: Node, begun: Node, answer: str | None, folder: str) -> Node:
    kind = job.output_format
    if kind is None:
        kind = str(begun.get("output_filename")).removeprefix(_FILENAME)
    if kind not in BY_NAME:
        is_table = not begun and (job.task == "embed" or _class_of(reader).has_types)
        kind = "parquet" if is_table else "jsonl"
    known = BY_NAME[kind]
    given = known.settings(answer is not None)
    if job.task == "batch":
        given["adapter"] = "batch_line"
    name = f"{_FILENAME}{kind}"
    return _node(known.writer, output_folder=folder, output_filename=name, **given)


def _rollout(job: ShortJob, content: Node) -> object:
    name = job.rollout
    given = {}
    if job.prompt is not None:
        given["prompt"] = job.prompt
    if job.task is not None:
        if name is not None:
            raise _mistake("task: is a rollout of its own. Give it or rollout, not both.")
        class_path, arguments = _TASKS[job.task]
        return _node(class_path, **arguments, **given)
    if name is None and (given or content.get("prompt_column") is not None):
        name = "PromptRollout"
    if name in _ROLLOUTS:
        return _node(str(name), **given)
    if name is None:
        raise _mistake(
            "prompt: is missing; give it, or rollout (my_module.my_function), or for rows with a "
            "list of messages prompt_column."
        )
    if given:
        raise _mistake("prompt: give it or rollout, not both.")
    return name


def _server(job: ShortJob, content: Node, only_look: bool) -> Node:
    """Returns the settings of the endpoint, or of the engine that fits this machine."""
    if job.model is None:
        what = "a name on the hub, or the path of a GGUF file"
        if job.endpoint or content.get("endpoints"):
            what = "the name that the endpoint knows"
        raise _mistake(f"model: is missing; give {what}.")
    config: Node = {"server_type": "endpoint", "model_name_or_path": job.model}
    given = {name: getattr(job, name) for name in SAMPLING if getattr(job, name) is not None}
    for other in ("generation_params", "default_generation_params"):
        others = content.get(other)
        if isinstance(others, dict) and given.keys() & others:
            name = min(given.keys() & others)
            raise _mistake(f'{name}: is in "{other}", too. Give it once.')
    if given:
        config["default_generation_params"] = given
    if given and job.task in ("embed", "classify"):
        name = next(iter(given))
        raise _mistake(f"{name}: nothing is generated by task: {job.task}. Remove it.")
    if content.get("endpoints") is not None:
        if job.endpoint is not None:
            raise _mistake("endpoint: give it or endpoints, not both.")
        return config
    if job.endpoint is not None:
        return config | {"endpoint_url": job.endpoint}
    config["server_log_folder"] = "server_logs"
    if not job.jobs:
        config["server_log_folder"] = str(Path(job.run_folder, "logs", "server"))
    from datatrove_ckpt.config.inference_config import ENGINES, visible_gpus  # slow to import

    gpus = visible_gpus()
    sharing = {"tp", "dp", "pp"} & content.keys()
    # A login node without GPUs may look at the run.
    if sharing and not (gpus or only_look or job.is_elsewhere or "server_type" in content):
        raise _mistake(
            f"{min(sharing)}: divides a model among GPUs, and this machine shows none (nvidia-smi, "
            "CUDA_VISIBLE_DEVICES)."
        )
    is_gguf = job.model.startswith(("package://", "hf://")) or job.model.endswith(".gguf")
    if is_gguf or (not gpus and not job.is_elsewhere):
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
        is_decided = job.is_elsewhere or sharing
        if len(gpus) > job.workers > 0 and not is_decided:
            config["replicas"] = len(gpus) // job.workers
    engine = ENGINES.get(str(content.get("server_type", config["server_type"])))
    if engine and job.task in engine.task_flags:
        config["model_kwargs"] = dict(engine.task_flags[str(job.task)])
    return config


_DATASET = re.compile(r"hf://datasets/([^/@*]+/[^/@*]+)/?")


def _reader(given: str, only_look: bool) -> Node:
    """Returns the reader of an input.

    Lists the input only if its name does not show its format.
    """
    found = _DATASET.fullmatch(given)
    if found is not None:
        options = {"split": "train"}
        return _node(
            "HuggingFaceDatasetReader", dataset=found[1], dataset_options=options, streaming=True
        )
    is_here = "://" not in given
    folder, pattern = _split(given)
    # Text before an "@" may be a password, which is refused below.
    kind = ""
    if pattern and "@" not in given:
        kind = _kind(given)
    is_told = kind and (has_magic(given) or not is_here or Path(given).is_file())
    if is_told or only_look:
        return _node(kind, data_folder=folder, glob_pattern=pattern)
    if is_here and pattern and not has_magic(given) and not Path(given).exists():
        raise _is_absent(given)
    if Path(given, "dataset_info.json").is_file():
        return _node("HuggingFaceDatasetReader", dataset=given, load_from_disk=True)
    has_splits = Path(given, "dataset_dict.json").is_file()
    names = _list(folder, pattern or None)
    below = os.walk(folder) if is_here and not pattern else iter(())
    linked = [
        Path(at, name)
        for at, folders, _ in below
        for name in folders
        if Path(at, name).is_symlink() and is_input(f"{at.removeprefix(folder)}/{name}", None)
    ]
    input_names = [one for one in names if pattern or PurePosixPath(one).stem != "README"]
    kinds = {_suffix(name): _kind(name) for name in input_names if _kind(name)}
    known = sorted(kinds)
    rows = [suffix for suffix in known if _READERS[kinds[suffix]].has_rows]
    texts = [suffix for suffix in known if kinds[suffix] == "TextReader"]
    if ".pdf" not in known:  # texts may have pictures beside them
        known = texts or known
    known = rows or known
    others = [name for name in names if _suffix(name) not in known]
    like = "|".join(map(re.escape, known)) or "/"  # b.jsonl.bak resembles input
    odd = [one for one in others if pattern or re.search(f"(?i){like}", posixpath.basename(one))]
    twice = [name for name, times in Counter(map(uncompressed, names)).items() if times > 1]
    problem = ""
    advice = "Name files of one kind, such as documents/*.jsonl"
    if linked:
        problem = f"a link to a folder, {linked[0]}, which readers do not follow"
    elif has_splits:
        problem = f"several splits, such as {Path(given, 'train')}"
    elif not known:
        problem = f"none of {', '.join(_SUFFIXES)}{'' if names else ', and no file at all'}"
        is_tsv = ".tsv" in map(_suffix, [given, *names])
        advice = 'Rename .tsv files to .csv, and set delimiter: "\\t"' if is_tsv else advice
    elif len({kinds[suffix] for suffix in known}) > 1 or (len(known) > 1 and not pattern and rows):
        problem = " and ".join(known)
    elif len(known) > 1 and not pattern and others:
        problem = f"{others[0]} beside {' and '.join(known)}"
    elif odd:
        problem = f"{odd[0]}, too"
    elif twice:
        problem = f"{twice[0]} twice, compressed and not"
    if problem:
        raise _mistake(f"input: {given} holds {problem}. {advice}.")
    if len(known) == 1:
        pattern = pattern or f"**/*{known[0]}*"
    return _node(kinds[known[0]], data_folder=folder, glob_pattern=pattern or "**/*")


def _input(job: ShortJob, root: Path, only_look: bool) -> str:
    """Returns the input; of standard input, the file that keeps it for each start."""
    if job.input != "-":
        return job.input
    content = b""
    if not (only_look or "://" in job.run_folder or sys.stdin.isatty()):
        content = sys.stdin.buffer.read()
    if content:
        if not content.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
            raise _mistake("input: standard input holds no JSON lines. Save it, and name the file.")
        return str(kept_input.keep_lines([content], root, "stdin"))
    path = root / "input" / "stdin.jsonl"
    if not (only_look or path.exists()):
        raise _mistake("input: standard input is empty, or run_folder is a URL.")
    return str(path)


def _list(folder: str, pattern: str | None) -> list[str]:
    from datatrove_ckpt.run_folder.input_checks import input_names  # slow to import

    try:
        names = input_names(folder, pattern)
    except Exception as error:  # botocore's errors have no common base
        shown = re.sub(r"//[^/@]*@", f"//{HIDDEN}@", folder)
        raise _mistake(f"input: {shown} cannot be listed: {failure_line(error)}.") from None
    if not names and "://" not in folder and not Path(folder).is_dir():
        raise _is_absent(folder)
    return names


def _is_absent(given: str) -> ConfigError:
    hint = ""
    if "," in given:
        hint = " Several files are a folder or a pattern, such as documents/*.jsonl."
    return _mistake(f"input: {Path(given).absolute()} does not exist.{hint}")


def _count_tasks(reader: Node, job: ShortJob) -> int:
    """Returns how many tasks have work."""
    if "glob_pattern" not in reader:  # a dataset
        return _MOST_TASKS if job.is_elsewhere else 1
    folder = reader["data_folder"]
    try:
        names = _list(folder, reader["glob_pattern"])
        tasks = min(len(names), _MOST_TASKS)
        if not (job.is_elsewhere or "://" in folder):
            size = sum(Path(folder, name).stat().st_size for name in names)
            tasks = min(tasks, size // _LEAST_BYTES)
    except (ConfigError, OSError):
        if job.is_elsewhere:
            raise
        tasks = 1  # the checks before a start name what is wrong
    return max(1, tasks)


def _suffix(name: str) -> str:
    return uncompressed(name).suffix


def _kind(name: str) -> str:
    """Returns the reader of a file; "": none."""
    return _SUFFIXES.get(_suffix(name).lower(), "")


def _split(given: str) -> tuple[str, str]:
    """Returns the folder of an input, and the pattern of its files; "": all."""
    top = "."
    if given.startswith("/"):
        top = "/"
    if has_magic(given) and not Path(given).exists():
        parts = given.split("/")
        for first, part in enumerate(parts):
            if has_magic(part) and not Path("/".join(parts[: first + 1])).is_dir():
                return "/".join(parts[:first]) or top, "/".join(parts[first:])
    folder, _, name = given.rstrip("/").rpartition("/")
    if not given.endswith("/") and _kind(name) and not Path(given).is_dir():
        # The name itself would match all names with this end.
        exactly = f"{escape(name[:-1])}[{name[-1]}]"
        return folder or top, exactly
    return given, ""
