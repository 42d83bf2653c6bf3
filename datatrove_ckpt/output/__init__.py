"""Writes a finished chunk as output files: through any datatrove ``DiskWriter``, staged, then
published in one step.

Start at ``chunk_writing.py`` (ChunkOutput). The bytes of a file depend on the documents only, so
writing a chunk again after a crash is harmless.
"""
