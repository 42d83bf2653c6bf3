"""The checkpoint of one rank: local files that show, after a crash at any instant, what is done.

The room uses no HTTP, event loop or datatrove. Start at ``open_checkpoint`` (takes a rank, and is
called by the event loop), whose ``RankFiles`` the storage thread writes, and ``rank_summary``
(read by other processes). docs/internals/recovery.md explains the files and the commit of a chunk.
"""
