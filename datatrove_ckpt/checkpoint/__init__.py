"""The checkpoint of one rank: local files that show, after a crash at any instant, what is done.

This room knows no HTTP, no event loop and no datatrove. Start reading at ``open_checkpoint`` (how a
rank is taken, and what the event loop calls), then ``rank_files`` (what the storage thread does)
and ``ledger`` (what others read). ``layout`` has the names of the files.

- A rank's folder has one owner at a time (``files.Lock``, ``identity.Fence``) and belongs to one
  run (``identity``). The owner holds a ``RankLease``, which whatever publishes is made with, and
  checks.
- A finished document is a line in its chunk's journal (``journal``). An answer is a row in the
  request cache until the chunk of its document is committed. One thread writes both, in one order
  (``storage``).
- When the journal holds every document of a chunk (``chunks``), the output is written from the
  journal, in input order, to staged files, and each file is moved into place in one step
  (``publishing``), or later (``placement``). Then a line in the commit log says that the chunk is
  done (``commits``), and the journal and the rows are deleted.
- After a crash, ``recovery`` (with the table of what each step leaves behind) cuts off torn tails
  and completes interrupted commits. Reading resumes after the longest unbroken run of committed
  chunks.
"""
