"""Model servers: start, readiness, health, restart, GPUs, several nodes. Their engines are in ``config.engines``.

Start at ``host.py``, whose ``ServerHost`` lends a rank a client that is ready. From there:

    endpoints.py     servers that run already
    pool.py          the servers that one rank launches; keeps each one running, and restarts it
    server.py        starts and stops one server process; why a start failed
    probes.py        what a running server says: health, load, and how many requests it may get
    warm.py          keeps servers for the next rank of a process
    node.py          leases a node's GPUs and cache folders to servers; ends what killed runs have left there
    multi_node.py    one server over several nodes

``guardian.py``, ``llamacpp.py``, ``dummy.py`` and ``sglang_launch.py`` are programs.
"""
