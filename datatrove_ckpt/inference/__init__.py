"""Everything that talks to a model server. It knows no disk, no datatrove and no checkpoint.

``client/`` turns one payload into one answer. ``servers/`` launches, watches and restarts the servers, and imports
``client/``, never the other way round.
"""
