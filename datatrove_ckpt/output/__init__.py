"""Writes a finished chunk as output files: through any datatrove ``DiskWriter``, staged, then published in one step.

    chunk_output.py    ChunkOutput: one chunk's documents -> staged files -> published files; start reading here
    output_folder.py   OutputFolder: what a rank looks at in its output folder, before it is taken and later
    chunk_writing.py   writes a chunk's documents with a copy of the user's writer
    writers.py         how documents get to a writer of the user, without deep copies
    writer_trial.py    whether it can write a document
    writer_checks.py   what is refused of a writer before anything runs
    parquet.py         the Parquet files of a chunk: datatrove's settings and names, our batches
    formats.py         the formats whose files can be read again
    file_managers.py   the files that a writer writes to, in place of datatrove's: staged and hashed, or remote
    targets.py         where staged files go: a local folder, a remote one (uploads with retries), the hub
    removal.py         removes files again
    hub.py             a folder on the Hugging Face hub, and what lies there
    hub_access.py      whether a job may write there
    hub_uploads.py     reads from the hub with retries, and uploads there
    hub_commits.py     few commits for many files, in a thread of its own
    hub_pace.py        how often the ranks of a job commit, all together
    hub_writers.py     datatrove's writers for the hub, without their own uploads
    stoppable.py       calls that a rank which stops leaves behind, and calls to a storage with retries
    names.py           file names: filled in from documents, checked, and recognised in a listing
    listing.py         lists an output folder
    committed.py       compares it with what the commits of a checkpoint name
    owner.py           the run that an output folder belongs to
    folders.py         folders that must differ: output, checkpoint, input, other steps' output
    documents.py       a document as bytes and back, types included
    arrow_types.py     the Arrow type of values
    column_types.py    the column types of a chunk, and whether chunks load as one dataset
    given_schema.py    whether rows fit the schema that a writer was given

The bytes of a file depend on the documents only, so writing a chunk again after a crash is harmless.
"""
