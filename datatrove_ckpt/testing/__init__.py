"""Tools for tests, also of users: a server that counts requests, and the files of an output."""

from pathlib import Path

from datatrove_ckpt.testing.fake_server import FakeServer

__all__ = ["FakeServer", "outputs"]


def outputs(folder: Path) -> dict[str, bytes]:
    """Returns the content of every file below the folder, by relative path."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
