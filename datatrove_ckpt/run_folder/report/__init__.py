"""One HTML page about a run: what happened when (``gather`` in ``page.py``)."""
