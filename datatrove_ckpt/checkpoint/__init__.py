"""The checkpoint of one rank: local files that show, after a crash at any instant, what is done.

The room uses no HTTP, event loop or datatrove. Start at ``open_checkpoint`` (how a rank is taken,
and what the event loop calls), then ``rank_files`` (what the storage thread writes) and
``rank_summary`` (what other processes read). See docs/internals/recovery.md for the files and the
commit of a chunk.
"""
