"""Inspects, verifies and repairs a checkpoint, on disk or on its mirror, during or after a run.

It starts no server and no rank, and it prints nothing: ``cli`` does. Start at ``where.py`` (what a command looks at)
and ``read_state.py`` (the state of all ranks, read only; ``judge.py`` says what each does, ``sums.py`` adds them up),
which ``report`` draws; at ``tracking.py`` (what trackers are sent); or at ``verify.py``, then ``repair_plan.py`` and
``repair.py``. What a rank has on disk is read by ``checkpoint/ledger.py``.
"""
