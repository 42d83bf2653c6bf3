"""The state of this process: signals, its parent, Slurm, open files, event loop, garbage
collection.

Start at ``shutdown.py``: whether a rank stops early, and how quickly. ``preemption.py`` drives it,
with signals (``signals.py``), the time limit (``slurm_job.py``) and notices that this node will be
removed. ``workers.py`` runs worker processes, which ``parent_watch.py`` kills when their parent is
gone.
"""
