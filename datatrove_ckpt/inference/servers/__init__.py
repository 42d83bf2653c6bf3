"""Model servers: command lines, start, readiness, health, restart, GPUs, several nodes.

It may import ``inference.client``, ``config`` and ``errors``. Start at ``pool.py`` (what the runner connects to), then
``supervisor.py`` (keeps one server alive) and ``server.py`` (starts and stops one process). ``guardian.py``,
``llamacpp.py``, ``dummy.py`` and ``sglang_launch.py`` are programs: they run as processes of their own.
"""
