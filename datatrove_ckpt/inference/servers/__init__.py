"""Manages model servers: start, readiness, health, restart, GPUs, several nodes.

Start at ``host.py``: its ``ServerHost`` lends a rank a ready client. ``config.engines`` has the
engines. ``guardian.py``, ``llamacpp.py``, ``dummy.py`` and ``sglang_launch.py`` are programs.
"""
