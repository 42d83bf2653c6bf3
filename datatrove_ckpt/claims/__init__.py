"""Records which process works on which rank, if processes choose their ranks (``run --worker``).

``claims.py`` has the protocol, and reads and writes claims on a disk or an object store.
"""
