"""Reads, checks and repairs the folder of a run.

Before and after a run: ``run_plan`` reads a job, ``preflight`` checks it (``earlier_runs`` compares
its folders), ``run_summary`` sums it up. During and after a run: ``run_location`` finds the folder
that a command means, ``run_state`` reads all ranks, judges each, and adds them up, which
``status_text`` and ``report`` show; ``verify`` compares the output, ``repair`` has chunks made
again.

The room may import ``runner`` and everything below it, starts no server or rank, and prints
nothing.
"""
