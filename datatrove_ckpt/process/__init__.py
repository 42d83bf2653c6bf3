"""What happens to this process: signals, the parent's death, Slurm, open files, the event loop, garbage collection.

Start at ``shutdown.py``: whether a rank stops early, and how quickly. ``preemption.py`` drives it: temporary signal
handlers, which let a rank stop early and save what it has. It asks ``slurm_job.py`` when the job ends, and whether the
job must be requeued, gives the signals their usual effect afterwards, and asks whether this node goes away.
``pool_signals.py`` kills a pool worker whose parent is gone, and drains the ranks of datatrove's pool. ``workers.py``
starts and watches worker processes of our own, and ``worker.py`` runs in them. ``screen.py`` shows how far the ranks
are. ``open_files.py`` raises the limit on open files. ``event_loop.py`` and ``gc_tuning.py`` make a run cheaper; the
first also ends a process that user code forked.

The room knows nothing of documents, checkpoints or servers.
"""
