"""A copy of a rank's checkpoint at a URL, and back.

It may import ``checkpoint``. ``mirror.py`` is the thread that uploads, ``manifests.py`` says what a complete copy is,
``restore.py`` brings one back. Start at ``mirror.py``.
"""
