"""Model servers: command lines, start, readiness, health, restart, GPUs, several nodes.

It may import ``inference.client``, ``config``, ``redaction``, ``retrying`` and ``errors``. Start at ``connect.py``,
whose ``connect`` gives the runner a client that is ready. From there:

    pool.py                       the servers that one rank launches
    supervisor.py                 keeps one server running: notices that it died or hangs, and restarts it
    server.py, endpoint.py        start and stop one server process; or wait for a server that runs already
    engines.py, installed.py      command lines of vLLM, SGLang, llama.cpp and others; what they need on this machine
    diagnosis.py, metrics.py      why a start failed; what an engine says about its load
    gpu_slots.py                  leases GPUs, and vLLM's cache folders, to servers
    multi_node.py, nodes.py       one server over several nodes

``guardian.py``, ``llamacpp.py``, ``dummy.py`` and ``sglang_launch.py`` are programs: each runs in its own process.
"""
