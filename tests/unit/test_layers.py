"""The house holds: each room imports only from rooms named before it, and the public names are what they seem."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import datatrove_ckpt

PACKAGE = Path(datatrove_ckpt.__file__).parent

# Lowest first. A room may import what stands above it in this list, and nothing below.
ROOMS = [
    "errors",
    "config",
    "orphans",
    "pool_workers",
    "fork_server",
    "slurm_job",
    "checkpoint.files",
    "checkpoint.interval",
    "checkpoint.lines",
    "checkpoint.commits",
    "checkpoint.journal",
    "checkpoint.request_cache",
    "checkpoint.snapshot",
    "checkpoint.storage",
    "checkpoint.identity",
    "checkpoint.publishing",
    "checkpoint.recovery",
    "checkpoint.manager",
    "store",
    "generations",
    "uploads",
    "mirror",
    "restore",
    "inference",
    "documents",
    "remote",
    "readers",
    "adapter",
    "arrow",
    "output",
    "identity",
    "source",
    "dead_letters",
    "failures",
    "preemption",
    "interruption",
    "drain",
    "requests",
    "generation",
    "uncheckpointed",
    "progress",
    "rollouts",
    "torch",
    "collector",
    "loop",
    "runner",
    "yaml_config",
    "overrides",
    "survey",
    "findings",
    "verify_output",
    "verify",
    "repair_plan",
    "repair",
    "file_systems",
    "measures",
    "checks",
    "doctor",
    "plan",
    "commands",
    "slurm",
    "cli",
    "__main__",
    "testing",
]


@cache
def modules() -> dict[str, ast.Module]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").rstrip(".")
        found[name] = ast.parse(path.read_text())
    return found


def imports(tree: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names.add(node.module or "")
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def room(name: str) -> int | None:
    """The place of a module of ours in the list, or None for the package itself and for other packages."""
    parts = name.removeprefix("datatrove_ckpt").lstrip(".").split(".")
    for length in (2, 1):
        if ".".join(parts[:length]) in ROOMS:
            return ROOMS.index(".".join(parts[:length]))
    return None


@pytest.mark.parametrize("name", sorted(name for name in modules() if name and name != "checkpoint"))
def test_a_room_imports_only_from_rooms_below_it(name: str) -> None:
    own = room(name)
    assert own is not None, f"{name} has no place in the house: add it to ROOMS"
    ours = {imported for imported in imports(modules()[name]) if imported.startswith("datatrove_ckpt.")}
    above = {imported for imported in ours if (place := room(imported)) is not None and place > own}
    assert not above


def test_checkpoint_knows_no_network_and_no_datatrove_and_inference_no_disk_and_no_datatrove() -> None:
    for name, tree in modules().items():
        roots = {imported.split(".")[0] for imported in imports(tree)}
        ours = imports(tree)
        if name.startswith("checkpoint"):
            assert not roots & {"datatrove", "aiohttp", "asyncio", "fsspec"}, name
            assert not any(imported.startswith("datatrove_ckpt.inference") for imported in ours), name
        if name.startswith("inference"):
            assert not roots & {"datatrove", "fsspec", "sqlite3"}, name
            assert not any(imported.startswith("datatrove_ckpt.checkpoint") for imported in ours), name
        if not name.startswith("testing"):
            assert not any(imported.startswith("datatrove_ckpt.testing") for imported in ours), name


def test_the_public_names_are_there_and_no_others() -> None:
    assert datatrove_ckpt.__all__ == ["CkptError", "InferenceConfig", "InferenceRunner"]
    for name in datatrove_ckpt.__all__:
        assert getattr(datatrove_ckpt, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = datatrove_ckpt.nothing


def test_every_module_says_what_its_reader_needs() -> None:
    assert [name for name, tree in modules().items() if not ast.get_docstring(tree)] == []


@pytest.mark.parametrize("module", ["", ".inference.dummy", ".inference.llamacpp"])
def test_servers_start_without_loading_datatrove(module: str) -> None:
    code = f"import datatrove_ckpt{module}, sys; sys.exit('datatrove' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_readme_names_every_room() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    _, _, architecture = readme.partition("\n## Architecture\n")
    drawing = architecture.partition("\n    errors")[2].partition("\n\n")[0]
    named = set(re.findall(r"\w+", "errors" + drawing))
    assert {room.partition(".")[0] for room in ROOMS} <= named
