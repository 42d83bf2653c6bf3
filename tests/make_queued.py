"""Makes the fixture of a queue: each executor.pik that this version's jobs leave for their tasks,
as tests/data/queued/NAME. Tasks that a version has queued may start after the package was updated.

    python -m tests.make_queued NAME

    paths.pik     of `datatrove-ckpt run` with a YAML file that names classes by their modules
    script.pik    of a script: functions of a module (tests/data/queued/site), shared context,
                  monitoring, a key
    yaml.pik      of `datatrove-ckpt run` with a YAML file and a ready-made rollout
    parts.pik     every other reader, rollout and writer that may be in such a file; its tasks need
                  not run
    made.json     what each runner's settings and identity were

No path in them is absolute, no function is pickled by value, and no test may need another Python
for them.
"""

import dataclasses
import inspect
import json
import os
import sys
import tempfile
from contextlib import chdir
from pathlib import Path

import dill

from tests.yaml_jobs import write_rows

QUEUED = Path(__file__).parent / "data" / "queued"
SITE = QUEUED / "site"
TASKS = 2
TEXTS = (("a0", "no", "a1"), ("b0",))
"""Of the documents of each task."""
NAME = "${rank}_${chunk_index}.jsonl"
YAML = f"""\
executor:
  class_path: SlurmPipelineExecutor
  init_args:
    tasks: {TASKS}
    time: "1:00:00"
    partition: p
    logging_dir: logs
    pipeline:
      - class_path: JsonlReader
        init_args: {{data_folder: input}}
      - class_path: InferenceRunner
        init_args:
          rollout_fn: {{class_path: PromptRollout, init_args: {{prompt: "Say {{text}}", system_prompt: Briefly.}}}}
          config: {{server_type: dummy, model_name_or_path: m, rollouts_per_document: 2, seed: 1}}
          output_writer:
            class_path: JsonlWriter
            init_args: {{output_folder: output, output_filename: "{NAME}", compression: null}}
          checkpoints_local_dir: checkpoints
          sync_seconds: auto
"""

CLASS_PATHS = f"""\
executor:
  class_path: datatrove_ckpt.executors.slurm.SlurmPipelineExecutor
  init_args:
    tasks: {TASKS}
    time: "1:00:00"
    partition: p
    logging_dir: logs
    pipeline:
      - class_path: datatrove_ckpt.readers.batch_files.BatchReader
        init_args: {{data_folder: input}}
      - class_path: datatrove_ckpt.runner.InferenceRunner
        init_args:
          rollout_fn: {{class_path: datatrove_ckpt.rollouts.batch_rollout.BatchRollout}}
          config: {{server_type: dummy, model_name_or_path: m}}
          output_writer:
            class_path: datatrove.pipeline.writers.JsonlWriter
            init_args: {{output_folder: output, output_filename: "{NAME}", compression: null}}
          checkpoints_local_dir: checkpoints
"""
"""Names classes by the modules that define them, as files of users may."""


def row(name, text):
    return {"text": text, "id": name}


def request(name, text):
    """A line of a batch file."""
    body = {"messages": [{"role": "user", "content": text}]}
    return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}


def write_input(folder, line=row):
    """One file for each task."""
    (folder / "input").mkdir(parents=True)
    for number, texts in enumerate(TEXTS):
        lines = [line(f"{number}/{index}", text) for index, text in enumerate(texts)]
        write_rows(folder / "input" / f"{number}.jsonl", lines)


def script():
    import queued_job
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.writers import JsonlWriter

    from datatrove_ckpt import InferenceConfig, InferenceRunner, MonitoringConfig

    runner = InferenceRunner(
        queued_job.rollout,
        InferenceConfig(
            "endpoint",
            "m",
            endpoint_url="${QUEUED_URL}",
            api_key_env="QUEUED_KEY",
            max_concurrent_generations=1,
        ),
        JsonlWriter("output", NAME, compression=None),
        shared_context=queued_job.shared,
        checkpoints_local_dir="checkpoints",
        checkpoints_remote_dir="mirror",
        records_per_chunk=1,
        on_document_error="dead_letter",
        max_dead_letters=3,
        drain_seconds=5.0,
        drain_signals=("SIGTERM",),
        monitoring=MonitoringConfig(run_name="queued", metrics_port=9464),
    )
    return [JsonlReader("input"), queued_job.keep, runner]


def parts():
    import queued_job
    from datatrove.pipeline.writers import (
        HuggingFaceBucketWriter,
        HuggingFaceDatasetWriter,
        ParquetWriter,
    )

    from datatrove_ckpt import InferenceConfig, InferenceRunner
    from datatrove_ckpt.readers import (
        BatchReader,
        CSVReader,
        HuggingFaceDatasetReader,
        IpcReader,
        JsonlReader,
        PageReader,
        ParquetReader,
        TextReader,
    )
    from datatrove_ckpt.rollouts import (
        BatchRollout,
        ChunkedRollout,
        ClassifyRollout,
        CompletionRollout,
        EmbedRollout,
        JudgeRollout,
        chat,
    )

    parquet = "${rank}_${chunk_index}.parquet"
    servers = [
        InferenceConfig("vllm", "m", tp=2, model_kwargs={"enforce-eager": True, "revision": "v1"}),
        InferenceConfig(
            "sglang",
            "m",
            default_generation_params={"temperature": 0.5},
            max_concurrent_generations="auto",
        ),
        InferenceConfig("custom", "m", model_kwargs={"server_script": "serve.py"}, replicas=2),
        InferenceConfig("llamacpp", "m.gguf"),
        InferenceConfig(
            "endpoint",
            "m",
            endpoint_url=["http://a:1", "http://b:1"],
            use_chat=False,
            api_key="k3y",
        ),
        *(InferenceConfig("dummy", "m") for _ in range(3)),
    ]
    rollouts = [
        queued_job.Asker(2),
        JudgeRollout("Say {text}", judge_prompt="Rate {answer}"),
        ChunkedRollout("Say {text}", carry="conversation"),
        chat,
        CompletionRollout("Say {text}"),
        BatchRollout(),
        EmbedRollout(),
        ClassifyRollout(),
    ]
    writers = [
        HuggingFaceDatasetWriter(
            "owner/name", private=True, output_filename=parquet, local_working_dir="work"
        ),
        HuggingFaceBucketWriter("owner/name", output_filename=parquet, local_working_dir="work"),
        *(ParquetWriter(f"output{number}", parquet) for number in range(6)),
    ]
    steps = [
        InferenceRunner(
            rollout,
            config,
            writer,
            checkpoints_local_dir=f"checkpoints{number}",
            keep_answers=number == 1,
        )
        for number, (rollout, config, writer) in enumerate(
            zip(rollouts, servers, writers, strict=True)
        )
    ]
    readers = [
        JsonlReader("input", shuffle_seed=1),
        ParquetReader("input"),
        IpcReader("input"),
        HuggingFaceDatasetReader("owner/name", {"split": "train"}),
        BatchReader("input"),
        CSVReader("input"),
        TextReader("input"),
        PageReader("input"),
    ]
    return [*readers, *steps]


def settings(step):
    """Of a runner, and of its config: what its attributes say, as plain JSON."""
    names = [
        name for name in inspect.signature(type(step).__init__).parameters if hasattr(step, name)
    ]
    return json.loads(json.dumps({name: getattr(step, name) for name in names}, default=_shown))


def _shown(value):
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
    return (value if inspect.isroutine(value) else type(value)).__qualname__


def identity(step):
    """What a task compares with the checkpoint that it continues, as plain JSON."""
    return json.loads(json.dumps(step.identity(TASKS).fields).replace(str(Path.cwd()), "."))


def runners(executor):
    return [step for step in executor.pipeline if hasattr(step, "rollout_fn")]


def submit(pipeline):
    from datatrove.executor import SlurmPipelineExecutor

    SlurmPipelineExecutor(pipeline, TASKS, "1:00:00", "p", logging_dir="logs").run()


def queue(name, folder):
    """Submits a job in the working directory ``folder``.

    Returns:
        its executor.pik, and what each of its runners is
    """
    from datatrove.io import DataFolder

    from datatrove_ckpt.cli.main import main

    # It would keep the working directory of the job before.
    DataFolder.clear_instance_cache()
    write_input(folder, request if name == "paths" else row)
    (folder / "bin").mkdir()
    (folder / "bin" / "sbatch").write_text("#!/bin/sh\necho Submitted batch job 7\n")
    (folder / "bin" / "sbatch").chmod(0o755)
    os.environ["PATH"] = f"{folder / 'bin'}:{os.environ['PATH']}"
    if name in ("yaml", "paths"):
        (folder / "job.yaml").write_text(YAML if name == "yaml" else CLASS_PATHS)
        assert main(["run", "job.yaml"]) == 0
    else:
        submit(script() if name == "script" else parts())
    pickled = (folder / "logs" / "executor.pik").read_bytes()
    steps = runners(dill.loads(pickled))
    return pickled, [{"settings": settings(step), "identity": identity(step)} for step in steps]


def make(target):
    from datatrove_ckpt import __version__

    made = {"version": __version__}
    target.mkdir(parents=True)
    for name in ("script", "yaml", "paths", "parts"):
        with tempfile.TemporaryDirectory(prefix="queued-") as temporary, chdir(temporary):
            pickled, made[name] = queue(name, Path(temporary))
        (target / f"{name}.pik").write_bytes(pickled)
    (target / "made.json").write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(SITE))
    make(QUEUED / sys.argv[1])
