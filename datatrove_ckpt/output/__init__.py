"""A finished chunk into an output file: any DiskWriter of datatrove's, staged, then published in one step.

It may import ``checkpoint`` and ``documents``. Start at ``chunk_output.py``; ``upload.py`` is for remote folders.
"""
