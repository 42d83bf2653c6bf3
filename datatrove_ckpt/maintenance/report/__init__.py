"""One HTML page about a run:

``gather`` makes it, ``histories`` tells what happened when, ``page`` draws it.
"""
