"""Checks before a run: the job (``run_plan``), its folders (``earlier_runs``), its surroundings
(``findings``).

It may import ``runner`` and everything below it, and prints nothing. Start at ``findings.py``.
"""
