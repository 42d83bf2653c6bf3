"""What happens to this process: signals, the parent's death, Slurm, open files, the event loop, garbage collection.

Start at ``shutdown.py``: whether a rank stops early, and how quickly. ``preemption.py`` drives it, with signals, the
time limit of ``slurm_job.py`` and notices that this node goes away. ``signals.py`` sets, restores and raises again all
handlers of signals. ``workers.py`` starts and watches worker processes, ``worker.py`` runs in them, and
``parent_watch.py`` kills them when their parent is gone. ``screen.py`` shows how far the ranks are. ``event_loop.py``
also ends a process that user code forked.

The room knows nothing of documents, checkpoints or servers.
"""
