"""The datatrove step ``InferenceRunner`` checks its arguments. ``generation/rank.py`` runs ranks.

datatrove deep-copies and pickles a step, and may run one step object for several ranks in turn. So
the step holds only the user's settings; everything that a rank needs is made in ``run`` and closed
there.
"""

from collections.abc import Iterable

from datatrove_ckpt.process.gc_tuning import gc_paused

with gc_paused():
    from datatrove.data import Document
    from datatrove.utils.stats import Stats

    from datatrove_ckpt.common.redaction import Veiled
    from datatrove_ckpt.generation.runner_settings import RunnerSettings
    from datatrove_ckpt.process.host_loop import run_hosted


class InferenceRunner(RunnerSettings):
    """Sends each document through a rollout function, and writes the results, one file per chunk of
    documents.

    The first eight arguments are those of datatrove's ``InferenceRunner``. For the words in
    brackets see ``InferenceConfig``.

    Args:
        rollout_fn (identity): ``async def rollout(document, generate, **shared)``. Its result (an
            InferenceResult or JSON values) is added to the list
            ``document.metadata[metadata_key]``. None is left out; a document whose rollouts all
            return None is dropped.
        config (below): the server and its settings.
        output_writer (identity): any DiskWriter; its ``output_filename`` needs ``${chunk_index}``
            with checkpoints, and ``${rank}`` with several tasks.
        shared_context (identity): keyword arguments for the rollout: a dict, a context manager that
            gives one, or a function that returns either.
        checkpoints_local_dir (free): local folder for checkpoints. None: unfinished chunks are in
            the system's temporary folder (``TMPDIR``), and a run that dies starts over.
        records_per_chunk (identity): documents per output file, with checkpoints.
        metadata_key (identity): key of the results in the document's metadata.
        skip_bad_requests (free): a document whose request the server rejects (HTTP 400, 413, 414,
            422, 431) becomes a dead letter, and does not stop the task.
        on_document_error (free): "stop" the task when a rollout raises, or its request is rejected
            or always fails while others are answered; or make the document a "dead_letter". A
            request that kills servers always becomes one; a server that fails always stops the
            task.
        max_dead_letters (free): documents that may become dead letters; one more stops the task.
            None: no limit.
        retry_dead_letters (free): process the dead letters of a finished task instead of the input,
            into output files of their own. datatrove's executors need ``skip_completed=False`` for
            it.
        seek (free): whether a resume may seek in the input. None: if the reader can, and the steps
            before the runner are known to keep nothing between documents; otherwise documents are
            counted. True: you know that they keep nothing.
        sync_seconds (free): time between two syncs, which a power loss may cost; kill -9 costs none
            of it. "auto": 2 % of the storage thread's time, from 0.1 to 30 seconds.
        drain_seconds (free): time for requests in flight once a signal, an error or a time limit
            stops the task. A second signal ends it.
        drain_signals (free): signals that request a stop. Afterwards each is raised again for the
            handler that was there before.
        retry_errors (free): send requests again that an earlier run recorded as permanent errors.
        accept_changes (free): continue unfinished tasks that were started with other settings, and
            record that; take over results of other settings with ``finished_from``.
        checkpoints_remote_dir (free): fsspec URL or folder to which the checkpoint is copied during
            the run. A node without the local folder resumes from it.
        mirror_seconds (free): shortest time between two such uploads, which a lost node may cost.
            "auto": 5 % of the mirror thread's time, from 5 to 600 seconds.
        hub_commit_seconds (free): longest time that uploads to the Hugging Face hub wait to share a
            commit.
        hub_commits_per_hour (free): commits to a repository beyond which tasks wait. A free account
            may make 128.
        monitoring (free): metrics.
        keep_answers (free): keep answers of committed documents for ``answers_from``. They need
            about as much room as the output, and no mirror holds them.
        finished_from (free): folders or URLs of an old output. Documents found there by id, text
            and metadata keep their results, and need no request. datatrove's runner, or ours, wrote
            it: JSON lines, Parquet or journals. ``${rank}``, and ``*`` in the last part, name a
            task's own files. A run of ours must have the same settings, but for tasks, chunks and
            files.
        answers_from (free): ``checkpoints_local_dir`` of an old run over the same input, with as
            many tasks. A request whose final payload is equal takes the answer that its document
            got there, if that is still kept.
        preemption_notice (free): source of notices that this node goes away soon, taken as SIGTERM.
            ``{"cloud": "aws"}``, "gcp" or "azure", or ``{"command": [...]}`` that ends with 0.
            Polled every 5 seconds.
        rollout_version (identity): replaces the code and the values of the rollout in the identity
            of the run. Another text is another run, and edits of your code are your matter.
        answer (identity): metadata key for the answers, beside the whole results at
            ``metadata_key``: the text of an answer (parsed if it has a ``json_schema``), a score or
            label, or what the rollout returned; a list of them with several
            ``rollouts_per_document``. A document that has either key already is refused. None: no
            such key, and the results replace what is there.
        card (free): whether ``datatrove-ckpt run`` writes ``card.md`` beside the checkpoints, when
            it is finished: what made the output, what is in it, and how to load it. On the hub, it
            is a section of the dataset repository's ``README.md``, whose rest stays.
        explode (identity): write a row of each item of the list that is the ``answer`` ("item"
            without that name).
        rollout_results (identity): write the whole results at ``metadata_key``. False: only
            ``answer`` has the answers, which takes a third less room, and a column of that name
            stays as it came.
        quality (identity): add columns with the finish_reasons of a document's answers, what is
            wrong with them, and their completion tokens, named after ``answer`` or
            ``metadata_key``: ``summary_finish_reason``, ``summary_faults``, ``summary_tokens``.
        refusals (free): further phrases that the beginning of a refusal has, in any case. With
            ``quality`` or ``on_refusal``, part of the identity.
        until (free): written documents after which the run ends, with at most a chunk more for each
            task at work.
        max_cost (free): what answers may cost, by ``prices``, before the run ends. Documents
            begin only if it will probably pay for them.
        max_total_tokens (free): prompt and completion tokens of answers before the run ends, held
            like ``max_cost``.
        replay_check (free): record up to 64 finished documents, and run the rollout on them with
            their answers at each start. Other requests or results are refused.

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
            CkptError: see ``errors.py``. Finished work is saved; the same call resumes. The failure
                of a document is also datatrove's InferenceError, the failure of a server also its
                ServerError.
            Preempted, or whatever the old signal handlers raise: a stop was requested, see
                ``process/preemption.py``.
        """
        with gc_paused():
            from datatrove_ckpt.generation.rank import run_rank  # half of the package

        self.stats = Stats(str(self))  # datatrove may have run another rank with this step
        run_rank(self, data, rank, world_size)

    async def run_async(
        self, data_gen: Iterable[Document] | None, rank: int = 0, world_size: int = 1
    ) -> None:
        """Does ``run`` inside a running event loop, on which the rollouts also run. Other tasks of
        the loop continue meanwhile.

        Cancelled, as by ``asyncio.timeout``, this starts nothing new, gives the requests in flight
        ``drain_seconds``, saves everything, and then raises CancelledError; the same call resumes.
        Cancelled again, it ends that wait. ``asyncio.run`` makes Ctrl-C a cancellation. No other
        signal drains: SIGTERM kills unless you handle it.

        Raises:
            CkptError: see ``run``.
            asyncio.CancelledError: this call was cancelled.
        """
        await run_hosted(lambda: self.run(data_gen, rank, world_size), f"task {rank}")
