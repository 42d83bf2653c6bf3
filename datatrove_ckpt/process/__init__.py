"""What happens to this process: signals, the parent's death, Slurm, the event loop, garbage collection.

It imports ``errors`` only. Start at ``preemption.py``.
"""
