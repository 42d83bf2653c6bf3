"""Folders that releases have left."""

import shutil

from tests.kept import content_of, edit
from tests.make_release import RELEASES, write_input

VERSIONS = sorted(path.name for path in RELEASES.iterdir())


OLDER = ["0.1.0", "0.2.0-dev0"]


NAMES = [name for name in VERSIONS if name not in OLDER]


NEWEST = "0.2.0"
"""The fixture that this version's code makes."""


def restored(name, folder):
    """The folders of a release, where a run can go on with them."""
    shutil.copytree(RELEASES / name, folder)
    write_input(folder / "input")
    for path in (folder / "checkpoints").rglob("*.json"):
        if path.name in ("run.json", "job.json") and "output_folder" in content_of(path):
            edit(path, output_folder=str(folder / "output"))
    return folder


def kept(folder):
    """Everything but locks, which name the process that had them last."""
    return {
        path: path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "lock"
    }
