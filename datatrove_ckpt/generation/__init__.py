"""The asynchronous core of a rank: documents in, rollouts run, answers kept, finished documents handed over.

It may import ``checkpoint``, ``inference.client``, ``readers``, ``output`` and ``process``. It knows no server process:
``runner.py`` gives it one. Start at ``scheduler.py``, then ``generate.py`` (one call of a rollout's ``generate``).
"""
