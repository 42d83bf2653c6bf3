"""Which process works on which rank, where processes take ranks by themselves (``run --worker``).

``claims.py`` is the protocol, ``stores.py`` knows where claims lie.
"""
