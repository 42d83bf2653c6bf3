"""What happens to this process: signals, the parent's death, Slurm, open files, the event loop,
garbage collection.

Start at ``shutdown.py``: whether a rank stops early, and how quickly. ``preemption.py`` drives it,
with signals (``signals.py``), the time limit (``slurm_job.py``) and notices that this node goes
away. ``workers.py`` starts and watches worker processes, ``worker.py`` runs in them, and
``parent_watch.py`` kills them when their parent is gone.

The room knows nothing of documents, checkpoints or servers.
"""
