"""The client of the model servers: takes one payload, returns one answer.

It keeps connections open, limits the requests in flight, and decides what to do with everything that is not an answer:
retry, fail this request, or fail the run. It knows servers as URLs only. Who launches and restarts them is the job of
``inference.servers``, which marks targets up or dead here.

Start at ``client.py``, whose table says what each
failure leads to. Then read ``routing.py`` (which server takes the next request, which requests wait, and which are in
quarantine), ``transport.py`` (one HTTP exchange, by aiohttp or by our own ``plain.py``) and
``answers.py`` (what counts as a finished completion).
"""
