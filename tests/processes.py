"""What tests ask of processes that are not their children, and programs that stand in for others."""

from __future__ import annotations

from pathlib import Path


def is_alive(pid: int) -> bool:
    """A zombie is not: who reaps it, and when, depends on the machine."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
