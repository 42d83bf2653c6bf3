"""Copies a rank's checkpoint to a URL while the rank works, and restores it on another node.

The copy is a series of versions: immutable objects, and manifests that name them. The newest
complete version is restored when the local folder is missing or older. Start at ``mirror`` (the
thread that uploads), then ``manifests`` (the format on the remote) and ``restore`` (before a rank
opens its checkpoint).
"""
