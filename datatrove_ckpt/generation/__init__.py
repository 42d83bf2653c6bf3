"""The asynchronous core of a rank: reads documents, runs rollouts, saves answers, records results.

Start at ``rank.py``, then ``scheduler.py`` (from the first document to the last commit, and an
early stop), then ``requests.py`` (one request of a rollout).
"""
