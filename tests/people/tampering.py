"""What people do to output, checkpoints and logs by hand, between two runs or during one."""

import shutil
from dataclasses import replace

from tests.people.operations import action


@action()
def remove_output_file(world, chance):
    return _touch_output(world, chance, "remove", lambda path: path.unlink())


@action()
def cut_output_file(world, chance):
    def cut(path):
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[:-1]))

    return _touch_output(world, chance, "remove the last line of", cut)


@action(weight=4)
def mix_up_output_files(world, chance):
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
def replace_output_file(world, chance):
    """By one of the same size."""

    def replace_id(path):
        path.write_bytes(path.read_bytes().replace(b"doc-", b"cod-", 1))

    return _touch_output(world, chance, "change an id in", replace_id)


@action(weight=1)
def repair_full(world, chance):
    if not world.checkpoints.exists():
        return ""
    ended = world.command(["repair", "checkpoints", "--full", "--logging-dir", "logs"])
    return f"repair --full: exit {ended.code}"


@action(weight=1)
def remove_output(world, chance):
    return _remove(world, world.output)


@action()
def remove_checkpoints(world, chance):
    return _remove(world, world.checkpoints)


@action()
def lose_node(world, chance):
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
def remove_rank_folder(world, chance):
    ranks = sorted(world.checkpoints.glob("[0-9]*"))
    return _remove(world, chance.choice(ranks)) if ranks else ""


@action()
def remove_logs(world, chance):
    if not world.logs.exists():
        return ""
    shutil.rmtree(world.logs)
    return "remove logs"


@action()
def copy_checkpoints(world, chance):
    return "copy checkpoints" if _copy_over(world.checkpoints, world.kept) else ""


@action()
def bring_back_checkpoints(world, chance):
    if not _copy_over(world.kept, world.checkpoints):
        return ""
    world.touched()
    return "bring back the copy of checkpoints"


def _copy_over(source, target):
    """False if there is nothing to copy."""
    if not source.exists():
        return False
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    return True


@action(weight=1)
def cut_commits(world, chance):
    logs = sorted(world.checkpoints.glob("[0-9]*/commits.jsonl"))
    if not logs:
        return ""
    log = chance.choice(logs)
    lines = log.read_bytes().splitlines(keepends=True)
    removed = chance.randint(1, len(lines)) if lines else 0
    log.write_bytes(b"".join(lines[: len(lines) - removed]))
    world.touched()
    return f"remove the last {removed} lines of {_name(world, log)}"


def _touch_output(world, chance, what, change):
    files = world.output_files()
    if not files:
        return ""
    path = chance.choice(files)
    change(path)
    world.touched()
    return f"{what} {_name(world, path)}"


def _name(world, path):
    return str(path.relative_to(world.folder))


def _remove(world, folder):
    if not folder.exists():
        return ""
    shutil.rmtree(folder)
    world.touched()
    return f"remove {_name(world, folder)}"


@action(weight=2)
def start_over(world, chance):
    world.start_over()
    return "remove output, checkpoints and logs"
