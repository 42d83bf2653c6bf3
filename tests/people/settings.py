"""What people write into the YAML file of a job."""

from __future__ import annotations

from dataclasses import dataclass

BY_RANK = "${rank}_chunk_${chunk_index}.jsonl"
BY_LANGUAGE = "${lang}/${rank}_chunk_${chunk_index}.jsonl"
NOWHERE = "http://127.0.0.1:9"  # port 9 is discard, which nobody serves


@dataclass(frozen=True)
class Settings:
    """What people change in the YAML file."""

    tasks: int = 1
    model: str = "model-a"
    prompt: str = "Say: {text}"
    text_key: str = "text"
    on_document_error: str = "stop"
    records_per_chunk: int = 3
    max_concurrent_generations: int = 2
    retry_errors: bool = False
    rollouts: int = 1
    workers: int = 1
    mirror: bool = False
    output_filename: str = BY_RANK
    output_folder: str = "output"
    checkpoints_folder: str = "checkpoints"
    logging_dir: str = "logs"


def job_yaml(settings, url):
    """The content of the YAML file. ``url``: of the endpoint."""
    config = {
        "server_type": "endpoint",
        "endpoint_url": url,
        "model_name_or_path": settings.model,
        "max_concurrent_generations": settings.max_concurrent_generations,
        "rollouts_per_document": settings.rollouts,
        "request_max_attempts": 2,
        "server_ready_max_attempts": 1,
        "server_ready_delay_sec": 0.3,
        "server_patience_seconds": 1,
    }
    runner = {
        "rollout_fn": {"class_path": "picky.Picky", "init_args": {"prompt": settings.prompt}},
        "config": config,
        "output_writer": {
            "class_path": "JsonlWriter",
            "init_args": {
                "output_folder": settings.output_folder,
                "output_filename": settings.output_filename,
                "compression": None,
            },
        },
        "checkpoints_local_dir": settings.checkpoints_folder,
        "records_per_chunk": settings.records_per_chunk,
        "on_document_error": settings.on_document_error,
        "retry_errors": settings.retry_errors,
        "drain_seconds": 1,
    }
    if settings.mirror:
        runner |= {"checkpoints_remote_dir": "mirror", "mirror_seconds": 0.1}
    reader = {"data_folder": "input", "text_key": settings.text_key, "max_skipped": None}
    pipeline = [
        {"class_path": "JsonlReader", "init_args": reader},
        {"class_path": "InferenceRunner", "init_args": runner},
    ]
    executor = {
        "tasks": settings.tasks,
        "workers": settings.workers,
        "logging_dir": settings.logging_dir,
        "pipeline": pipeline,
    }
    return {"executor": {"class_path": "LocalPipelineExecutor", "init_args": executor}}
