"""Which files of a template lie in an output folder, and how large they are: one listing, however many there are.

Locally only the folders are read in which a file of the template may be. On object stores that can list by prefix
(s3fs, gcsfs, adlfs), only the names of one rank are listed, 1000 per request. The hub is asked afresh each time, for
the folder that all names of the template have in common.
"""

from __future__ import annotations

import inspect
import os
import posixpath
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

from datatrove.io import DataFolder
from datatrove.pipeline.writers.disk_base import DiskWriter
from loguru import logger

from datatrove_ckpt.checkpoint.commits import OutputFile
from datatrove_ckpt.output.hub import HubFile, HubFolder
from datatrove_ckpt.output.hub_access import is_missing_repository, private_if_made
from datatrove_ckpt.output.names import STAGING, fields_of_documents, plain
from datatrove_ckpt.retrying import failure_line, file_system_call

_NUMBER = "000_"  # in front of the first file of a writer with max_file_size


@dataclass
class FoundFiles:
    """What lies in an output folder.

    Attributes:
        sizes: in bytes, by path; None: the store tells no size.
        by_rank: the files that the template may have named, and no commit names, each with the folder of its retry
            ("": of no retry).
        hub_files: what the hub tells of the files; empty elsewhere.
    """

    sizes: dict[str, int | None]
    by_rank: dict[int, list[tuple[str, str]]] = field(default_factory=lambda: defaultdict(list))
    hub_files: dict[str, HubFile] = field(default_factory=dict)

    def show(self, files: Mapping[str, HubFile]) -> None:
        """Adds what a later look at the hub has found."""
        self.hub_files |= files
        self.sizes |= {name: file.size for name, file in files.items()}

    def size(self, file: OutputFile) -> int | None:
        return self.sizes.get(plain(file.path))

    def is_right(self, file: OutputFile) -> bool:
        name = plain(file.path)
        if name in self.hub_files:
            return self.hub_files[name].holds(file.size, file.hub_hash)
        return name in self.sizes and self.sizes[name] in (file.size, None)


def list_output(
    writer: DiskWriter, committed: Mapping[str, OutputFile], rank: int | None = None, others: bool = True
) -> FoundFiles:
    """Lists an output folder.

    It finds every file that exists among ``committed``, and every other one that the template may have named. It may
    find more.

    Args:
        committed: by their plain paths.
        rank: only look for other files of this rank.
        others: look for other files at all. Without them the hub needs one request for 500 names.

    Raises:
        OSError: the folder cannot be read. One that does not exist holds no files.
    """
    folder = writer.output_folder
    head, everywhere = _head(writer.output_filename, rank)
    if folder.is_local():
        root = Path(folder.resolve_paths(""))
        found: dict[str, int | None] = {}
        for name, size in _scan(root, head, everywhere):
            found[committed[name].path if name in committed else name] = size  # no second copy of a million names
        found |= _look_at(root, [name for name in committed if name not in found])
        return FoundFiles(found)
    if (hub := HubFolder.of(folder)) is not None:
        try:
            with file_system_call():
                # The part of the folder where files of the template may be, and committed files elsewhere.
                base = posixpath.dirname(head)
                listed = hub.below(base).files() if others else {}
                files = {posixpath.join(base, name): file for name, file in listed.items()}
                files |= hub.look_up([name for name in committed if name not in files])
            return FoundFiles({name: file.size for name, file in files.items()}, hub_files=files)
        except OSError as error:
            if committed or private_if_made(writer) is None or not is_missing_repository(error):
                raise
            return FoundFiles({})  # a run makes it
    try:
        with file_system_call():
            folder.invalidate_cache()
            remote = _find(folder, head, writer.max_file_size > 0)
            # Files that an earlier template named, or those with a number other than the first.
            if any(name not in remote and not name.startswith(head) for name in committed):
                remote |= _find(folder, "", numbered=False)
            return FoundFiles(remote)
    except PermissionError as error:
        logger.warning(
            f"{folder.resolve_paths('')} may not be listed ({failure_line(error)}), so its committed files are looked "
            "up one by one, and files that no commit names are not seen. On S3, allow s3:ListBucket."
        )
        with file_system_call():
            return FoundFiles(dict(_look_up(folder, committed)))


def _head(template: Template, rank: int | None) -> tuple[str, bool]:
    """What all names start with, and whether the folders below that are part of the names, too."""
    known = {} if rank is None else {"rank": f"{rank:05d}"}
    mark = "\0"
    unknown = {name: mark for name in template.get_identifiers() if name not in known}
    filled = template.substitute(known | unknown)
    head, _, rest = filled.partition(mark)
    base = posixpath.dirname(head)
    head = f"{plain(base)}/{posixpath.basename(head)}" if base else head
    return head, "/" in rest or bool(fields_of_documents(template))


def _scan(root: Path, head: str, everywhere: bool) -> Iterator[tuple[str, int]]:
    """The files whose names start with ``head``, perhaps after a number, as writers with max_file_size give it.

    Only these are looked at: a folder that all ranks share may hold a million files, and to look at one may take a
    request to a file server.
    """
    base, start = posixpath.split(head)
    may_be_ours = re.compile(rf"(\d+_)?{re.escape(start)}").match
    waiting = [base]
    while waiting:
        name = waiting.pop()
        try:
            found = os.scandir(root / name)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except PermissionError:
            if name == base:
                raise
            continue  # not a folder of ours
        with found:
            for entry in found:  # not a list of them: a million take 200 MB
                path = posixpath.join(name, entry.name)
                if name == base and not may_be_ours(entry.name):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    waiting += [path] if everywhere and path != STAGING else []
                elif entry.is_file():
                    with suppress(FileNotFoundError):  # removed meanwhile
                        yield path, entry.stat().st_size


def _look_at(root: Path, names: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Names that the scan has not met: behind a symbolic link, or of an earlier template."""
    for name in names:
        try:
            yield name, (root / name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            continue


def _look_up(folder: DataFolder, names: Iterable[str]) -> Iterator[tuple[str, int | None]]:
    for name in names:
        # To whom may not list, S3 does not tell a missing file from a forbidden one.
        with suppress(FileNotFoundError, PermissionError):
            yield plain(name), folder.info(name).get("size")


def _find(folder: DataFolder, head: str, numbered: bool) -> dict[str, int | None]:
    base, start = posixpath.split(head)
    find = getattr(folder.fs, "_find", folder.fs.find)
    options = {}
    if start and "prefix" in inspect.signature(find).parameters:
        options["prefix"] = (_NUMBER if numbered else "") + start
    try:
        listed = folder.find(base, detail=True, **options)
    except FileNotFoundError:
        return {}
    return {path: info.get("size") for path, info in listed.items() if info["type"] != "directory"}


def file_problem(file: OutputFile, size: int | None) -> tuple[str, str]:
    """The kind and the description of what is wrong with a file that is not right.

    Args:
        size: its size now, in bytes; None: it does not exist.
    """
    if size is None:
        return "missing", "is missing"
    if size == file.size:
        return "altered", "is altered: the hub lists another hash for it"
    kind = "truncated" if size < file.size else "grown"
    return kind, f"is {kind}: it has {size} bytes instead of {file.size}"


OTHER_JOB = (
    "Stop one of the jobs, and start it anew with another output_folder or output_filename, and with a "
    "checkpoints_local_dir and logging_dir of its own. The other one goes on with the same command, once files that "
    "are not its own are deleted from the folder."
)
"""What to do about another job that writes to the same folder."""


def stray_advice(number: int) -> str:
    """What to do about files of a template that no commit names. ``run`` and ``verify`` say the same."""
    it, its = ("it", "Its") if number == 1 else ("them", "Their")
    return (
        f"{its} documents may be in the output twice. Move {it} out of the output folder, or delete {it} if nothing "
        f"else needs {it}"
    )
