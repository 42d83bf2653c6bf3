"""Writes a finished chunk as output files: through any datatrove ``DiskWriter``, staged, then
published in one step.

    chunk_writing.py   ChunkOutput: documents -> staged files -> published files, with a copy of the
                       user's writer and the types of columns; start reading here
    output_folder.py   OutputFolder: how a rank checks its output folder: whose it is,
                       the files in it, and those that commits name
    writer_trial.py, writer_checks.py
                       the user's writer: a trial of a document, what is refused or replaced
    formats.py         the formats whose files can be read again
    file_managers.py   files that replace datatrove's in a writer: staged and hashed, or remote
    targets.py         where staged files go: a local folder, a remote folder, the hub
    interruptible_calls.py       calls to storages: stopped with the rank, and retried
    hub*.py            the Hugging Face hub: access, uploads, their pace
    file_names.py      file names
    document_codec.py       a document as bytes and back, and as a cheap row for a writer
    arrow_types.py     the Arrow types of values

The bytes of a file depend on the documents only, so writing a chunk again after a crash is
harmless.
"""
