"""What a start costs: ``python -m tests.bench.start [--repeat 7] [--tasks 100]``.

CPU seconds of processes of their own, in turn, the least of each: other programs on the machine only add to them. Then
the wall seconds of many tasks of one document with two workers, ours and datatrove's.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.bench import tables
from tests.bench.measure import ROOT, mock_server, table
from tests.bench.systems import ask, cpu_seconds

_MISTAKE = """\
executor:
  class_path: LocalPipelineExecutor
  init_args:
    pipeline:
      - class_path: JsonlReader
        init_args: {data_folder: input}
      - class_path: InferenceRunner
        init_args:
          rollout_fn: {class_path: PromptRollout, init_args: {prompt: "{text}"}}
          config: {server_type: endpoint, endpoint_url: "http://127.0.0.1:9", model_name_or_path: mock}
          output_writer: {class_path: JsonlWriter, init_args: {output_folder: output}}
          checkpoints_local_dir: checkpoints
"""
"""The output's name has no chunk_index. So all is built, and nothing is done."""
_COMMAND = "import sys; from datatrove_ckpt.__main__ import main; sys.argv = ['datatrove-ckpt', {}]; main()"
_DATATROVE = "import datatrove.executor.local, datatrove.pipeline.{}"
STARTS = {
    "datatrove's step, writer and executor": _DATATROVE.format("writers.disk_base"),
    "datatrove's InferenceRunner": _DATATROVE.format("inference.run_inference"),
    "our InferenceRunner": "from datatrove_ckpt import InferenceRunner",
    "run": _COMMAND.format("'run', 'job.yaml'"),
    "doctor": _COMMAND.format("'doctor', 'job.yaml'"),
    "schema": _COMMAND.format("'schema'"),
}
SYSTEMS = ("ours", "datatrove")


def cpu(code: str, folder: str) -> float:
    """CPU seconds of a Python program."""
    before = cpu_seconds(resource.RUSAGE_CHILDREN)
    path = f"import sys; sys.path.insert(0, {str(ROOT)!r}); "
    subprocess.run([sys.executable, "-c", path + code], cwd=folder, capture_output=True, check=False)
    return cpu_seconds(resource.RUSAGE_CHILDREN) - before


def run_tasks(system: str, url: str, tasks: int) -> None:
    """The job, in a folder of its own."""
    from datatrove.pipeline.writers import JsonlWriter

    if system == "ours":
        from datatrove_ckpt import InferenceConfig, InferenceRunner, LocalPipelineExecutor
        from datatrove_ckpt.readers import JsonlReader
    else:
        from datatrove.executor import LocalPipelineExecutor
        from datatrove.pipeline.inference.run_inference import InferenceConfig, InferenceRunner
        from datatrove.pipeline.readers import JsonlReader
    Path("input").mkdir()
    for task in range(tasks):
        Path(f"input/{task:05d}.jsonl").write_text(json.dumps({"id": str(task), "text": f"#{task}#"}))
    config = InferenceConfig(server_type="endpoint", endpoint_url=url, model_name_or_path="mock")
    writer = JsonlWriter("output", "${rank}_chunk_${chunk_index}.jsonl", compression=None)
    step = InferenceRunner(ask, config, writer, checkpoints_local_dir="checkpoints", records_per_chunk=100)
    LocalPipelineExecutor([JsonlReader("input"), step], tasks=tasks, workers=2, logging_dir="logs").run()


def seconds(system: str, url: str, tasks: int) -> float:
    """Wall seconds of the job."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    options = f"--system={system}", f"--url={url}", f"--tasks={tasks}"
    command = [sys.executable, "-m", "tests.bench.start", *options]
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=True)
        took = time.monotonic() - started
        found = len(list(Path(folder, "output").glob("*.jsonl")))
        assert found == tasks, f"{system}: {found} of {tasks} files"
    return took


def main() -> None:
    parser = tables.parser(__doc__)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--tasks", type=int, default=100)
    parser.add_argument("--system", choices=SYSTEMS)
    parser.add_argument("--url")
    arguments = parser.parse_args()
    if arguments.system:
        return run_tasks(arguments.system, arguments.url, arguments.tasks)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "job.yaml").write_text(_MISTAKE)
        rounds = [{name: cpu(code, folder) for name, code in STARTS.items()} for _ in range(arguments.repeat)]
    table(["CPU s, least", ""], [[name, min(one[name] for one in rounds)] for name in STARTS])
    with mock_server() as server:
        walls = [{name: seconds(name, server.url, arguments.tasks) for name in SYSTEMS} for _ in range(3)]
    head = f"{arguments.tasks} tasks of one document, 2 workers: wall s, least"
    table([head, ""], [[name, min(one[name] for one in walls)] for name in SYSTEMS])
    return None


if __name__ == "__main__":
    main()
