"""Reads, checks and repairs the folder of a run.

Start at ``preflight`` (before a run) and ``run_state`` (during a run).

The room may import ``runner`` and everything below it, starts no server or rank, and prints
nothing.
"""
