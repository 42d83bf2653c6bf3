"""Copies a rank's checkpoint to a URL while the rank works, and restores it on another node.

Start at ``mirror`` (the thread that uploads), then ``manifests`` (the format on the remote) and
``restore`` (before a rank opens its checkpoint).
"""
