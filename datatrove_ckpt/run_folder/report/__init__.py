"""One HTML page about a run: what happened when (``histories``), drawn by ``page``."""
