"""Model servers: start, readiness, health, restart, GPUs, several nodes. Their engines are in
``config.engines``.

Start at ``host.py``, whose ``ServerHost`` lends a rank a client that is ready. From there:

    endpoints.py     servers that run already
    pool.py          the servers that one rank launches, watches and restarts
    server.py        one server process; why a start failed
    probes.py        health, load, and how many requests a server may get
    warm.py          keeps servers for the next rank of a process
    node.py          GPUs and cache folders for servers; ends what killed runs have left
    multi_node.py    one server over several nodes

``guardian.py``, ``llamacpp.py``, ``dummy.py`` and ``sglang_launch.py`` are programs.
"""
