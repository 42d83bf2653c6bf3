"""The settings of a job in the short form, which ``run --help`` shows."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.executors.kubernetes import KubernetesJob
from datatrove_ckpt.output.formats import BY_NAME


@dataclass(frozen=True)
class ShortJob:
    """The settings of the form itself.

    Attributes:
        run_folder: a new folder, or the folder of the run to resume.
        input: a file, a folder, a pattern such as ``documents/*.jsonl``, a folder of ``datasets``,
            or their URLs (``s3://``, ``hf://datasets/ORG/NAME``); ``-``: standard input;
            ``{sql: "select ..."}``: the rows of a query of DuckDB.
        prompt: a text with ``{text}``; ``@FILE``: the text of that file.
        task: "embed" in place of a prompt (EmbedRollout, into the column "embedding" of Parquet
            files) or "classify" (ClassifyRollout). A ``prompt`` beside it is the text that is sent.
            "batch": the input is a batch file of OpenAI's form, which its first line also shows.
        rollout: ``my_module.my_function`` in place of a prompt; or a ready-made one, such as
            ``ChunkedRollout``.
        model: its name on the hub, a folder, or a GGUF file; of an endpoint, the name that it
            knows.
        models: several models by name, such as ``{judge: {model: ..., max_tokens: 10}}``, each with
            settings of its own; the first is ``generate``, and another ``generate.judge``.
        endpoint: URL of a server that runs already, or several. None: a server is started, on this
            machine's GPUs, else on its CPU.
        output_format: None: the format of a run that has begun; else "parquet" for Parquet, Arrow
            and vectors, and "jsonl" for others.
        tasks: None: one for each input file, up to 100; here fewer where files are tiny.
        workers: processes of this machine that share the tasks; -1: one for each task.
        slurm: arguments of SlurmPipelineExecutor, such as ``{partition: gpu, workers: 40}``.
        kubernetes: settings of ``datatrove-ckpt k8s``, such as ``{image: ...}``; the folder is on
            one of its volumes.
        jobs: arguments of JobsPipelineExecutor, such as ``{flavor: a10g-small}``; ``run_folder`` is
            a URL, such as ``hf://buckets/ORG/NAME/summaries``.
        max_tokens: longest answer, in tokens.
        temperature: sampling temperature; 0: the likeliest answer.
        top_p: share of the likeliest tokens that are drawn from in sampling.
        stop: a text that ends an answer, or several.
        service_tier: the provider's tier, such as "flex", or several that are tried in turn.
        steps: a mapping of names to steps, each a run of its own settings or a query (``sql``); the
            settings beside it hold for each.
        dead_letters: of a step: whether those after it begin although dead letters are left.
    """

    run_folder: str
    input: str | JsonObject
    prompt: str | None = None
    task: Literal["embed", "classify", "batch"] | None = None
    rollout: str | Callable[..., Awaitable[object]] | None = None
    model: str | None = None
    endpoint: str | list[str] | None = None
    models: dict[str, JsonObject] | None = None
    output_format: Literal[*BY_NAME] | None = None  # type: ignore[valid-type]
    tasks: int | None = None
    workers: int = 1
    slurm: JsonObject | None = None
    kubernetes: KubernetesJob | None = None
    jobs: JsonObject | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    service_tier: str | list[str] | None = None
    steps: JsonObject | None = None
    dead_letters: Literal["stop", "leave"] = "stop"

    @property
    def elsewhere(self) -> list[str]:
        settings = ("slurm", "kubernetes", "jobs")
        return [setting for setting in settings if getattr(self, setting) is not None]

    @property
    def is_remote(self) -> bool:
        return "://" in self.run_folder

    @property
    def root(self) -> Path:
        """Of a URL, only the name means anything."""
        return Path(self.run_folder).expanduser()

    @property
    def below(self) -> str:
        return self.run_folder.rstrip("/") if self.is_remote else str(self.root)
