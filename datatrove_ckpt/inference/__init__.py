"""Sends requests to model servers, and launches servers.

    client/     takes a payload, returns an answer: connections, retries, causes of failures
    servers/    launches, watches and restarts servers, and divides the node's GPUs among them

Neither folder touches a checkpoint, and neither imports datatrove, whose import would slow down
each server process.
"""
