"""A small job that several tests give to ``datatrove-ckpt``: job.yaml and its input, in the working
directory.
"""

import json
from pathlib import Path

_YAML = """\
executor:
  class_path: LocalPipelineExecutor
  init_args:
    tasks: TASKS
    workers: 1
    logging_dir: logs
    pipeline:
      - class_path: JsonlReader
        init_args: {data_folder: INPUT}
      - class_path: InferenceRunner
        init_args:
          rollout_fn: ROLLOUT
          config: {CONFIG}
          output_writer:
            class_path: JsonlWriter
            init_args: {output_folder: OUTPUT, output_filename: "${rank}_${chunk_index}.jsonl", compression: null}
          checkpoints_local_dir: checkpoints
"""
PROMPT = '{class_path: PromptRollout, init_args: {prompt: "Say {text}"}}'
ENDPOINT = 'server_type: endpoint, endpoint_url: "URL", model_name_or_path: fake'
"""Settings of ``config`` for a server whose address takes the place of URL."""


def endpoint(server):
    """Settings of ``config`` for the server."""
    return ENDPOINT.replace("URL", server.url)


def job_yaml(config, tasks=1, data="input", output="output", rollout=PROMPT):
    """A job for ``datatrove-ckpt``, with folders in the working directory. The runner's settings
    come last, so that lines with more of them can be added.

    Args:
        config: settings of ``config``, as they stand between its braces.
    """
    text = _YAML.replace("TASKS", str(tasks)).replace("CONFIG", config).replace("ROLLOUT", rollout)
    return text.replace("INPUT", data).replace("OUTPUT", output)


def write_job(folder, text, *files):
    """Writes job.yaml, and the files of its input."""
    (folder / "job.yaml").write_text(text)
    write_input(folder, *files)


def write_rows(path, rows):
    """Writes JSON lines."""
    Path(path).write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def read_rows(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def write_input(folder, *files):
    """Writes input/0.jsonl, 1.jsonl, ... with these texts, whose ids count on from file to file."""
    (folder / "input").mkdir(parents=True)
    number = 0
    for index, texts in enumerate(files):
        rows = [{"id": f"id {n}", "text": text} for n, text in enumerate(texts, number)]
        write_rows(folder / "input" / f"{index}.jsonl", rows)
        number += len(rows)


def write_tasks(folder, tasks, documents):
    """Writes input/0.jsonl, 1.jsonl, ... of so many documents each; ids and texts name task and
    document.
    """
    (folder / "input").mkdir(parents=True, exist_ok=True)
    for task in range(tasks):
        rows = [{"id": f"{task} {n}", "text": f"document {task} {n}"} for n in range(documents)]
        write_rows(folder / "input" / f"{task}.jsonl", rows)


def doctor_lines(said):
    """What ``doctor`` printed: each line's state and message, by what was checked."""
    split = (line.split(": ", 1) for line in said.splitlines()[:-1])
    return {head.split(maxsplit=1)[1]: f"{head.split()[0]}: {text}" for head, text in split}
