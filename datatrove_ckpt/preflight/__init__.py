"""What is asked before a run: can it work (``doctor``), how often should it save (``plan``), is all there
(``requirements``).

It may import ``runner`` and everything below it. It prints nothing: ``cli`` does. Start at ``doctor.py``.
"""
