"""The entry point of ``datatrove-ckpt``. Ctrl-C prints one message even during imports, which take a second."""

from __future__ import annotations

import sys


def main() -> int:
    """Returns the exit code; see cli/main.py."""
    try:
        from datatrove_ckpt.cli.main import main as command

        return command()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
