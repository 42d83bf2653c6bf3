"""What lies in a run's folder, what is wrong with it, and what repairs it.

Before and after a run: ``run_plan`` reads a job, ``findings`` checks it (``earlier_runs`` compares
its folders), ``closing`` sums it up. During and after a run: ``where`` finds the folder that a
command means, ``run_state`` reads all ranks, judges each, and adds them up, which ``topics``,
``report`` and ``tracking`` show; ``verify`` compares the output, ``repair`` has chunks made again.
``reached`` is for claims.

It may import ``runner`` and everything below it, starts no server or rank, and prints nothing.
"""
