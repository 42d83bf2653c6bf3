"""Copies a rank's checkpoint to a URL while the rank works, and restores it on another node.

The copy is a series of versions: immutable objects, and per version a manifest that names its objects. The newest
complete version is restored when the local folder is missing or older.

    mirror.py        RemoteMirror: the thread that uploads; start reading here
    uploads.py       what is uploaded, and the versions made of it
    manifests.py     the format on the remote: versions, owners, manifests, objects
    sealing.py       seals of versions, made with a key
    restore.py       what happens before a rank opens its checkpoint
    object_store.py  reads and writes below one URL; the seam for crash tests
"""
