"""The checkpoint of one rank: local files that show, after a crash at any instant, what is done.

This room knows no HTTP, no event loop and no datatrove. Start at ``open_checkpoint`` (how a rank is
taken, and what the event loop calls), then ``rank_files`` (what the storage thread does) and
``ledger`` (what other processes read). docs/internals/recovery.md describes the files, and how a
chunk is committed.
"""
