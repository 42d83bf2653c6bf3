"""Everything that talks to a model server or launches a server.

    client/     takes a payload, returns an answer: connections, retries, blame of failures
    servers/    launches, watches and restarts servers, and divides the node's GPUs among them

``servers`` imports ``client``, never the other way round. Neither touches a checkpoint, and neither
imports datatrove, whose import would slow down each server process.
"""
