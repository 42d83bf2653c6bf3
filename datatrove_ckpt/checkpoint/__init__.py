"""The checkpoint: disk only, synchronous, without HTTP or datatrove. Recovery on one page:

- A rank's folder has one owner at a time (``files.Lock``), and belongs to one run (``identity``).
- A finished document is a line in its chunk's journal (``journal``); an answer is a row in the request cache until
  its document's chunk is committed (``request_cache``). Both are written by one thread, in one order (``storage``).
- When every document of a chunk is in its journal, the chunk's output is written from the journal, in input order,
  beside its place, and then moved there in one step. Then a line in the commit log says that the chunk is done
  (``commits``), and journal and rows are dropped (``manager``).
- After a crash (``recovery``, with the table of what is found after which step): torn tails are cut off, what a
  commit left undone is finished, and reading goes on after the longest unbroken run of committed chunks. Documents
  in a journal, or in chunks committed beyond that, are passed; answers in the cache are not asked for again.
- A mirror, which is not part of this room, learns at any instant which bytes and rows make the checkpoint then
  (``snapshot``), and copies them elsewhere.
"""
