"""A chain of jobs as datatrove's examples submit it: inference, a monitor beside it, and a dataset card after it.

    python chain_job.py FOLDER ENDPOINT_URL INPUT_REPOSITORY OUTPUT_REPOSITORY

Prints the three job ids. The rollout is defined here, so it travels by value.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from datatrove.executor import SlurmPipelineExecutor
from datatrove.pipeline.inference.dataset_card_generator import (
    InferenceDatasetCardGenerator,
    InferenceDatasetCardParams,
)
from datatrove.pipeline.inference.progress_monitor import InferenceProgressMonitor
from datatrove.pipeline.writers import ParquetWriter

from datatrove_ckpt import InferenceConfig, InferenceRunner
from datatrove_ckpt.readers import HuggingFaceDatasetReader

TEMPLATE_NAME = "faq"
TEMPLATE = "Ask questions about this text: [[DOCUMENT]]"
TASKS = 2


async def rewrite(document: Any, generate: Any) -> Any:
    return await generate({"messages": [{"role": "user", "content": TEMPLATE.replace("[[DOCUMENT]]", document.text)}]})


def inference(endpoint: str, source: str, target: str, checkpoints: Path) -> list[Any]:
    return [
        HuggingFaceDatasetReader(source, {"split": "train"}, streaming=True),
        InferenceRunner(
            rewrite,
            InferenceConfig("endpoint", "fake", endpoint_url=endpoint, max_concurrent_generations=4),
            ParquetWriter(f"hf://datasets/{target}/{TEMPLATE_NAME}", "${rank}_${chunk_index}.parquet"),
            checkpoints_local_dir=str(checkpoints),
            records_per_chunk=7,
            skip_bad_requests=True,
            drain_seconds=3.0,
            hub_commit_seconds=1.0,
        ),
    ]


def main() -> None:
    folder, endpoint, source, target = Path(sys.argv[1]), *sys.argv[2:]
    slurm: dict[str, Any] = {"time": "00:10:00", "partition": "low", "qos": "", "cpus_per_task": 1}
    slurm["sbatch_args"] = {"open-mode": "append"}
    steps = inference(endpoint, source, target, folder / "checkpoints")
    logs = folder / "inference"
    array = SlurmPipelineExecutor(steps, TASKS, logging_dir=str(logs), job_name="inference", **slurm)
    array.run()

    card = InferenceDatasetCardParams(
        output_repo_id=target,
        input_dataset_name=source,
        input_dataset_split="train",
        input_dataset_config=None,
        prompt_column="text",
        prompt_template=TEMPLATE,
        prompt_template_name=TEMPLATE_NAME,
        system_prompt=None,
        model_name="fake",
        model_revision="main",
        generation_kwargs={},
        spec_config=None,
        stats_path=str(logs / "stats.json"),
    )
    watch = InferenceProgressMonitor(params=card, inference_job_id=array.job_id, update_interval=2)
    monitor = SlurmPipelineExecutor([watch], 1, logging_dir=str(folder / "monitor"), job_name="monitor", **slurm)
    monitor.run()

    write = InferenceDatasetCardGenerator(params=card)
    final = SlurmPipelineExecutor(
        [write],
        1,
        logging_dir=str(folder / "card"),
        job_name="card",
        depends=array,
        run_on_dependency_fail=False,
        **slurm,
    )
    final.run()
    print(array.job_id, monitor.job_id, final.job_id)


if __name__ == "__main__":
    main()
