"""The command ``datatrove-ckpt``: argparse, YAML files into executors, Slurm submission. The only
room that prints.

No room imports it. Start at ``main.py`` (every command and option). What is slow to import is
imported inside functions.
"""
