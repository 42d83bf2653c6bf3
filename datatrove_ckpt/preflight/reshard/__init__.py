"""Deals what is left of a run out to another number of tasks. Start with ``reshard`` in ``run.py``.

What a rank has touched stays the beginning of its share: its commits, journals and answers stay where they are. Only
the rest is dealt out. Of ranks that there will be no more, unfinished documents go to another rank, with what is kept
of them.
"""
