"""The entry point of ``datatrove-ckpt``.

Ctrl-C prints one message even during imports, which take a second.
"""

import sys
from contextlib import suppress

from datatrove_ckpt.process.streams import flush_streams, open_streams


def main() -> int:
    """Returns the exit code; see cli/main.py."""
    open_streams()
    try:
        from datatrove_ckpt.cli.main import main as command

        code = command()
    except (KeyboardInterrupt, RuntimeError) as error:
        # Python 3.11 raises RuntimeError from what __set_name__ raises, as in an enum's import.
        if not isinstance(error.__cause__ or error, KeyboardInterrupt):
            raise
        with suppress(OSError):
            print("interrupted", file=sys.stderr)
        code = 130
    finally:
        flush_streams()
    if event_loop := sys.modules.get("datatrove_ckpt.process.event_loop"):
        event_loop.exit_past_threads(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
