"""Inspects, verifies and repairs a checkpoint, on disk or on its mirror, during or after a run.

It starts no server or rank, and prints nothing. Start at ``where.py`` (what a command reads), then
``read_state.py`` (the state of all ranks; ``judge.py`` judges each, ``sums.py`` adds them up),
which ``report`` draws and ``tracking.py`` sends; or ``verify.py``, then ``repair_plan.py`` and
``repair.py``.
"""
