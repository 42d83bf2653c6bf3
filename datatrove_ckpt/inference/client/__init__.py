"""One payload in, one answer out: connections, retries, and whose fault a failure is.

It imports ``config`` and ``errors`` only. Start at ``client.py``; ``routing.py`` chooses the server, ``transport.py``
the HTTP library, ``answers.py`` says what counts as an answer.
"""
