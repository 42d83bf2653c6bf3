"""Model servers: start, readiness, health, restart, GPUs, several nodes.

Start at ``host.py``, whose ``ServerHost`` lends a rank a client that is ready. ``config.engines``
has the engines. ``guardian.py``, ``llamacpp.py``, ``dummy.py`` and ``sglang_launch.py`` are
programs.
"""
