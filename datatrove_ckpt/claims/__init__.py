"""Records which process works on which rank, if processes choose their ranks (``run --worker``).

``claims.py`` is the protocol; ``stores.py`` reads and writes claims on a disk or an object store.
"""
