"""What people do to output, checkpoints and logs by hand, between two runs or during one."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tests.people.operations import action
from tests.people.world import World


@action()
def remove_output_file(world: World, chance: random.Random) -> str:
    return _touch_output(world, chance, "remove", lambda path: path.unlink())


@action()
def cut_output_file(world: World, chance: random.Random) -> str:
    def cut(path: Path) -> None:
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[:-1]))

    return _touch_output(world, chance, "remove the last line of", cut)


@action(weight=4)
def mix_up_output_files(world: World, chance: random.Random) -> str:
    files = world.output_files()
    if len(files) < 2:
        return ""
    one, other = chance.sample(files, 2)
    swaps, before = chance.random() < 0.5, other.read_bytes()
    shutil.copyfile(one, other)
    if swaps:
        one.write_bytes(before)
    world.touched()
    return f"{'swap' if swaps else 'copy'} {_name(world, one)} {'and' if swaps else 'over'} {_name(world, other)}"


@action()
def replace_output_file(world: World, chance: random.Random) -> str:
    """By one of the same size."""

    def replace_id(path: Path) -> None:
        path.write_bytes(path.read_bytes().replace(b"doc-", b"cod-", 1))

    return _touch_output(world, chance, "change an id in", replace_id)


@action(weight=1)
def repair_full(world: World, chance: random.Random) -> str:
    if not world.checkpoints.exists():
        return ""
    ended = world.command(["repair", "checkpoints", "--full", "--logging-dir", "logs"])
    return f"repair --full: exit {ended.code}"


@action(weight=1)
def remove_output(world: World, chance: random.Random) -> str:
    return _remove(world, world.output)


@action()
def remove_checkpoints(world: World, chance: random.Random) -> str:
    return _remove(world, world.checkpoints)


@action()
def lose_node(world: World, chance: random.Random) -> str:
    """The checkpoints are on the mirror only. What was not uploaded yet is done again."""
    if not world.settings.mirror:
        world.settings = replace(world.settings, mirror=True)
        return "with a mirror"
    if not world.checkpoints.exists() or not world.mirror.exists():
        return ""
    if not world.history.mirror_has_all:
        world.touched()
    world.history.node_lost = True
    shutil.rmtree(world.checkpoints)
    return "lose checkpoints, keep the mirror"


@action()
def remove_rank_folder(world: World, chance: random.Random) -> str:
    ranks = sorted(world.checkpoints.glob("[0-9]*"))
    return _remove(world, chance.choice(ranks)) if ranks else ""


@action()
def remove_logs(world: World, chance: random.Random) -> str:
    if not world.logs.exists():
        return ""
    shutil.rmtree(world.logs)
    return "remove logs"


@action()
def copy_checkpoints(world: World, chance: random.Random) -> str:
    return "copy checkpoints" if _copy_over(world.checkpoints, world.kept) else ""


@action()
def bring_back_checkpoints(world: World, chance: random.Random) -> str:
    if not _copy_over(world.kept, world.checkpoints):
        return ""
    world.touched()
    return "bring back the copy of checkpoints"


def _copy_over(source: Path, target: Path) -> bool:
    """False if there is nothing to copy."""
    if not source.exists():
        return False
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    return True


@action(weight=1)
def cut_commits(world: World, chance: random.Random) -> str:
    logs = sorted(world.checkpoints.glob("[0-9]*/commits.jsonl"))
    if not logs:
        return ""
    log = chance.choice(logs)
    lines = log.read_bytes().splitlines(keepends=True)
    removed = chance.randint(1, len(lines)) if lines else 0
    log.write_bytes(b"".join(lines[: len(lines) - removed]))
    world.touched()
    return f"remove the last {removed} lines of {_name(world, log)}"


def _touch_output(
    world: World, chance: random.Random, what: str, change: Callable[[Path], None]
) -> str:
    files = world.output_files()
    if not files:
        return ""
    path = chance.choice(files)
    change(path)
    world.touched()
    return f"{what} {_name(world, path)}"


def _name(world: World, path: Path) -> str:
    return str(path.relative_to(world.folder))


def _remove(world: World, folder: Path) -> str:
    if not folder.exists():
        return ""
    shutil.rmtree(folder)
    world.touched()
    return f"remove {_name(world, folder)}"


@action(weight=2)
def start_over(world: World, chance: random.Random) -> str:
    world.start_over()
    return "remove output, checkpoints and logs"
