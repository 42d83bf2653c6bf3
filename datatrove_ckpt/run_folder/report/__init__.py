"""One HTML page about a run: what happened when (``gather``), drawn by ``page``."""
