"""The command ``datatrove-ckpt``: argparse, YAML files into executors, Slurm submission. The only room that prints.

It may import every other room; no room imports it. What a command needs is imported when it is called, so that
``--help`` and ``status`` start without datatrove. Start at ``main.py`` (every command and option).
"""
