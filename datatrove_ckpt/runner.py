"""InferenceRunner, the datatrove step: checks its arguments. ``generation/rank.py`` runs its ranks.

datatrove deep-copies and pickles a step, and may run one step object for several ranks in turn. So the step holds only
the user's settings; everything that a rank needs is made in ``run`` and closed there.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from datatrove.data import Document
from datatrove.utils.stats import Stats

from datatrove_ckpt.generation.step import Step
from datatrove_ckpt.process import event_loop
from datatrove_ckpt.process.gc_tuning import gc_paused
from datatrove_ckpt.process.host_loop import run_hosted
from datatrove_ckpt.redaction import Veiled


class InferenceRunner(Step):
    """Sends each document through a rollout function, and writes the results, one file per chunk of documents.

    The first eight arguments are those of datatrove's ``InferenceRunner``.

    Args:
        rollout_fn: ``async def rollout(document, generate, **shared)``. ``await generate(payload)`` returns an
            ``InferenceResult`` or raises ``InferenceError``. What the rollout returns (an InferenceResult or JSON
            values) is put into ``document.metadata[metadata_key]``, a list with one entry per rollout. None is left
            out; a document whose rollouts all return None is dropped from the output, and counted as done.
        config: the server and how to ask it.
        output_writer: any DiskWriter. With checkpoints its ``output_filename`` needs ``${chunk_index}``. With several
            tasks it needs ``${rank}``: a YAML file is checked for that before anything runs, else the task is when it
            starts.
        shared_context: keyword arguments for the rollout: a dict, a callable that returns one, a context manager
            that gives one, or a callable that returns such a context manager.
        checkpoints_local_dir: local folder for checkpoints; ``~`` and ``$NAME`` are expanded where the task runs. None:
            no checkpoints, and a run that dies starts over.
        records_per_chunk: documents per output file, with checkpoints.
        metadata_key: where the results go in the document's metadata.
        skip_bad_requests: a document whose request the server rejects (HTTP 400, 413, 414, 422, 431) becomes a dead
            letter, instead of stopping the rank.
        on_document_error: "stop" the rank when a rollout raises or its request is rejected, or make the document a
            "dead_letter" and continue. A request that kills servers becomes a dead letter either way. A server that is
            away or fails stops the rank either way.
        max_dead_letters: documents that may become dead letters; one more stops the rank. None: no limit.
        retry_dead_letters: process the dead letters of earlier runs instead of the input, into output files of their
            own. The rank must be finished. datatrove's executors need ``skip_completed=False`` for it.
        seek: whether a resume may seek in the input. None: only if the reader can, and it and the steps after it are
            known to keep nothing from one document to the next; otherwise documents are counted. True declares that
            your steps and adapters keep nothing.
        sync_seconds: time between two syncs, and so what a power loss may cost; kill -9 costs none of it.
            "auto": as short as 2 % of the storage thread's time allows, between 0.1 and 30 seconds.
        drain_seconds: how long requests in flight may take once the rank is asked to stop, by a signal or because
            Slurm's time limit comes near. A second signal ends the wait.
        drain_signals: names of the signals that ask a rank to stop. Afterwards each is raised again for the handler
            that was there before.
        retry_errors: send requests again that an earlier run recorded as permanent errors.
        accept_changes: continue ranks that are not finished and were started with other settings, and record that.
        checkpoints_remote_dir: any fsspec URL (``s3://...``) or folder, to which the checkpoint is copied while the run
            is on. A node without the local folder resumes from there. Credentials come from the environment.
        mirror_seconds: shortest time between two uploads to ``checkpoints_remote_dir``, and so what a lost node may
            cost. "auto": as short as 5 % of the mirror thread's time allows, between 5 and 600 seconds.
        hub_commit_seconds: how long what is uploaded to the Hugging Face hub waits for more before its commit, at most.
        hub_commits_per_hour: commits to a repository in an hour beyond which ranks wait. A free account may make 128.
        monitoring: metrics for Prometheus, and runs of MLflow and Weights & Biases. None: nobody is told anything.
        keep_answers: keep answers of committed documents for a fork with another prompt. They need about as much room
            in the checkpoint as the output has, and no mirror holds them.

    Raises:
        ConfigError: an argument that cannot work.
    """

    name = "Inference 🔍"
    type = "Model call"
    # datatrove writes these attributes to executor.json, and they may hold the user's secrets
    rollout_fn = Veiled()
    config = Veiled()
    shared_context = Veiled()

    def run(self, data: Iterable[Document] | None, rank: int = 0, world_size: int = 1) -> None:
        """Processes every document of ``data``. When it returns, all of them are in the output.

        Raises:
            CkptError: see ``errors.py``. Finished work is saved; the same call resumes. The failure of a document is
                also datatrove's InferenceError, that of a server also its ServerError.
            Preempted, or whatever the old signal handlers raise: a stop was requested, see ``process/preemption.py``.
        """
        event_loop.refuse_nested("InferenceRunner.run")
        with gc_paused():
            from datatrove_ckpt.generation.rank import run_rank  # half of the package

        self.stats = Stats(str(self))  # datatrove may have run another rank with this step
        run_rank(self, data, rank, world_size)

    async def run_async(self, data_gen: Iterable[Document] | None, rank: int = 0, world_size: int = 1) -> None:
        """``run`` inside a running event loop, on which the rollouts then run, too. Other tasks go on meanwhile.

        Cancelled, as by ``asyncio.timeout``, this starts nothing new, gives the requests in flight ``drain_seconds``,
        saves everything, and then raises CancelledError; the same call resumes. Cancelled again, it ends that wait.
        ``asyncio.run`` makes Ctrl-C a cancellation. No other signal drains: SIGTERM kills unless you handle it.

        Raises:
            CkptError: see ``run``.
            asyncio.CancelledError: this call was cancelled.
        """
        await run_hosted(partial(self.run, data_gen, rank, world_size), f"rank {rank}")
