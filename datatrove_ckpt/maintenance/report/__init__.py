"""One HTML page about a run: ``content`` is what it shows, ``page`` draws it, ``gather`` makes it from a checkpoint.

The page holds its style and its drawings, loads nothing and runs no script. Names of documents, ranks and errors are
not trusted: ``markup`` escapes each text by itself, and the page's own policy forbids scripts and requests.
"""
