"""Everything that talks to a model server or launches one.

Two rooms, of which the second imports the first, never the other way round:

    client/     takes one payload, returns one answer: connections, retries, and whose fault a failure is
    servers/    launches, watches and restarts servers, and divides the node's GPUs among them

Neither of them touches a checkpoint, and neither imports datatrove, whose import would slow down each server that we
start as a process. Besides each other they import ``config``, ``redaction``, ``retrying`` and ``errors`` only. Start at
``servers/connect.py``: its ``connect`` is what the runner calls.
"""
