"""What is asked before a run: what is the job (``run_plan``), is all there (``before_run``), can it
work (``doctor``).

It may import ``runner`` and everything below it. It prints nothing: ``cli`` does. Start at
``before_run.py``.
"""
