"""What a checkpoint says afterwards, and what puts a damaged one right: inspect, verify, repair.

It may import ``checkpoint`` and ``output``; it never starts a server or a rank. Start at ``inspect.py``.
"""
