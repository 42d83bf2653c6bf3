"""The client of the model servers: takes one payload, returns one answer.

It knows servers only as URLs, which ``inference.servers`` marks up or dead. Start at ``client.py``:
its table shows the effect of each failure.
"""
