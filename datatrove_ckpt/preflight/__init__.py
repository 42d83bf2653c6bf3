"""What is asked before a run: can the folders be used (``doctor``), and how often should a run save (``plan``).

It may import ``runner`` and everything below it. It prints nothing: ``cli`` does. Start at ``doctor.py``.
"""
