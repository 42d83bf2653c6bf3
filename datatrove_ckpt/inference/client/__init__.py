"""The client of the model servers: takes one payload, returns one answer.

It knows servers as URLs only, which ``inference.servers`` marks up or dead. Start at ``client.py``,
whose table says what each failure leads to. ``routing.py`` decides which server takes the next
request, ``transport.py`` makes one HTTP exchange, by aiohttp or by our own ``plain.py``, and
``answers.py`` decides what counts as a finished completion.
"""
