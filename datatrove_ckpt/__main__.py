"""The command datatrove-ckpt, from its first moment on: its imports take a second, and Ctrl-C ends it then, too."""

from __future__ import annotations

import sys


def main() -> int:
    """Returns the exit code; see cli.py."""
    try:
        from datatrove_ckpt.cli.main import main as command

        return command()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
