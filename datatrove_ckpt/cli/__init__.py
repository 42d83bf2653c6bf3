"""The command ``datatrove-ckpt``: argparse, YAML files into executors, Slurm submission. The only room that prints.

It may import every other room; no room imports it. A handler imports what it needs when it is called, so that
``--help`` and ``status`` start without datatrove. Start at ``main.py``, then ``parsers.py`` (every
command and option).
"""
