"""Checks before a run: the job (``run_plan``), its folders (``before_run``), its surroundings
(``doctor``).

It may import ``runner`` and everything below it, and prints nothing. Start at ``before_run.py``.
"""
