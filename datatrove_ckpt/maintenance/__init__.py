"""Inspects, verifies and repairs a checkpoint on disk, during or after a run.

It may import ``checkpoint`` and ``output``. It starts no server and no rank, and it prints nothing: ``cli`` does. Start
at ``inspect.py`` (one rank's folder, read only), then ``verify.py`` and ``repair.py``.
"""
