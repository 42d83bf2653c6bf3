"""Writes a finished chunk as output files: through any datatrove ``DiskWriter``, staged, then published in one step.

    chunk_output.py    ChunkOutput: one chunk's documents -> staged files -> published files; start reading here
    writer_check.py    what a runner refuses of a writer
    file_managers.py   the files that a writer writes to, in place of datatrove's: staged and hashed, or remote
    targets.py         where staged files go: a local folder, a remote one, the hub
    upload.py          RemoteFolder: uploads to S3 and other file systems, with retries
    hub.py             a folder on the Hugging Face hub, and what lies there
    hub_access.py      whether a job may write there: repository, token and branch
    hub_lag.py         looks again at what the hub does not show yet
    removal.py         removes files; from the hub in one commit
    hub_uploads.py     uploads content to the hub, and makes commits
    hub_commits.py     HubCommits: few commits for many files, in a thread of its own
    hub_writers.py     datatrove's writers for the hub, without their own uploads
    hub_errors.py      what a failed call to the hub means, and when to make it again
    stoppable.py       calls that a rank which stops leaves behind
    names.py           file names: filled in from documents, checked, and recognised in a listing
    listing.py         which files lie in an output folder, and how large they are
    committed.py       compares them with what the commits of a checkpoint name
    folders.py         folders that must differ: output, checkpoint, input, other steps' output
    documents.py       a document as bytes and back, types included
    adapter.py         datatrove's default adapter without its deep copy
    arrow.py           a memory allocator for Arrow that does not block the event loop

The bytes of a file depend on the documents only, so writing a chunk again after a crash is harmless.

This package may import ``checkpoint`` and the modules below them (``errors``, ``backoff``, ...).
"""
