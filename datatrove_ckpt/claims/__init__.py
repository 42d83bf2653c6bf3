"""Which process works on which rank, where processes take ranks by themselves (``run --worker``).

``claims.py`` is the protocol, and knows where claims lie and whether an attempt was in vain.
"""
