"""Writes a finished chunk as output files: through any datatrove ``DiskWriter``, staged, then
published in one step.

    chunk_output.py    ChunkOutput: documents -> staged files -> published files; start reading here
    output_folder.py   OutputFolder: how a rank looks at its output folder
    chunk_writing.py   writes a chunk's documents with a copy of the user's writer
    writers.py         how documents get to a writer of the user, without deep copies
    writer_trial.py    whether it can write a document
    writer_checks.py   what is refused of a writer before anything runs
    parquet.py         the Parquet files of a chunk
    formats.py         the formats whose files can be read again
    file_managers.py   files that replace datatrove's in a writer: staged and hashed, or remote
    targets.py         where staged files go: a local folder, a remote one, the hub
    removal.py         removes files again
    hub.py             a folder on the Hugging Face hub
    hub_access.py      whether a job may write there
    hub_uploads.py     reads from the hub with retries, and uploads there
    hub_commits.py     few commits for many files
    hub_pace.py        how often all ranks of a job commit
    hub_writers.py     datatrove's writers for the hub, without their own uploads
    stoppable.py       calls to storages: stopped with the rank, and retried
    names.py           file names: made, checked, and recognised
    listing.py         lists an output folder
    committed.py       compares it with the commits of a checkpoint
    owner.py           the run that an output folder belongs to
    folders.py         folders that must differ
    documents.py       a document as bytes and back
    arrow_types.py     the Arrow type of values
    column_types.py    the column types of a chunk, and whether chunks load as one dataset
    given_schema.py    whether rows fit the schema that a writer was given

The bytes of a file depend on the documents only, so writing a chunk again after a crash is
harmless.
"""
