"""The asynchronous core of a rank: documents in, rollouts run, answers kept, finished documents recorded.

Everything runs on one event loop, which never waits on a disk or on a reader: two threads do that, the reader's
(``prefetch.py``) and the checkpoint's.

Start at ``rank.py``, then ``scheduler.py`` (from the first document to the last commit, and an early stop), then
``generate.py`` (one call of a rollout's ``generate``). ``prefetch.py`` has where documents come from, ``failures.py``
and ``dead_letters.py`` documents that fail, ``run_identity.py`` and ``code_walk.py`` what makes two runs the same run,
``null_checkpoint.py`` a run without a checkpoint, and ``progress.py`` statistics and progress bar.
"""
