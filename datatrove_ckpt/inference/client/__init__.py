"""The client of the model servers: takes one payload, returns one answer.

It knows servers as URLs only, which ``inference.servers`` marks up or dead. Start at ``client.py``,
whose table shows what each failure leads to.
"""
