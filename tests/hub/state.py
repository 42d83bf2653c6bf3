"""What a hub keeps: repositories, their branches, commits, and the content of files.

No HTTP here.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

ATTRIBUTES = ".gitattributes"
LFS_SUFFIXES = (".parquet", ".arrow", ".gz", ".zst")
REGULAR_BYTES = 10 * 1024 * 1024


def sha256(content):
    return hashlib.sha256(content).hexdigest()


@dataclass(frozen=True)
class File:
    """A file of a commit. ``sha256`` names the content; ``lfs``: it is in the large file
    storage.
    """

    path: str
    sha256: str
    size: int
    lfs: bool
    oid: str
    """The id that git gives to the file, or to the pointer of a large one."""

    @classmethod
    def of(cls, path, sha, content, lfs):
        pointer = (
            f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha}\nsize {len(content)}\n"
        )
        kept = pointer.encode() if lfs else content
        return cls(
            path, sha, len(content), lfs, hashlib.sha1(b"blob %d\0" % len(kept) + kept).hexdigest()
        )


@dataclass(frozen=True)
class Commit:
    """One commit of a branch.

    ``at``: seconds of the hub's clock. ``changes``: added or replaced and deleted paths.
    """

    oid: str
    title: str
    at: float
    tree: dict[str, File] = field(repr=False)
    parent: Commit | None = field(default=None, repr=False)
    added: tuple[str, ...] = ()
    deleted: tuple[str, ...] = ()

    def history(self):
        """This commit, then its ancestors, the newest first."""
        commit = self
        while commit is not None:
            yield commit
            commit = commit.parent

    def behind(self, number):
        """The commit ``number`` commits earlier, or the first one."""
        *_, last = (commit for commit, _ in zip(self.history(), range(number + 1), strict=False))
        return last


@dataclass
class Repo:
    kind: str
    """dataset, model or space."""
    name: str
    """NAMESPACE/NAME."""
    private: bool = False
    branches: dict[str, Commit] = field(default_factory=dict)
    commits: dict[str, Commit] = field(default_factory=dict)
    """By oid, in the order they were made."""
    blobs: dict[str, bytes] = field(default_factory=dict)
    """Content by SHA-256: also what was uploaded and is in no commit."""
    uploads: list[str] = field(default_factory=list)
    """SHA-256 of each upload to the large file storage, in order."""
    ignored: tuple[str, ...] = ()
    """How the names of files end that its .gitignore leaves out of every commit."""

    def __post_init__(self):
        lines = "".join(
            f"*{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in LFS_SUFFIXES
        ).encode()
        self.blobs[sha256(lines)] = lines
        attributes = File.of(ATTRIBUTES, sha256(lines), lines, lfs=False)
        self.commit("main", "initial commit", 0.0, [attributes], [])

    def find(self, revision):
        """A branch's head, or a commit."""
        return self.branches.get(revision.removeprefix("refs/heads/")) or self.commits.get(revision)

    def commit(self, branch, title, at, add, delete):
        parent = self.branches.get(branch)
        tree = dict(parent.tree) if parent else {}
        for path in delete:
            tree.pop(path, None)
        tree.update((file.path, file) for file in add)
        seed = f"{self.kind} {self.name} {len(self.commits)} {parent.oid if parent else ''} {title}"
        oid = hashlib.sha1(seed.encode()).hexdigest()
        made = Commit(oid, title, at, tree, parent, tuple(file.path for file in add), tuple(delete))
        self.commits[oid] = made
        self.branches[branch] = made
        return made


def upload_mode(path, size, sample):
    """ "lfs" for large and binary files and some endings, as the hub's default ``.gitattributes``
    has them.
    """
    if path.endswith(LFS_SUFFIXES) or size > REGULAR_BYTES or b"\0" in sample:
        return "lfs"
    return "regular"


def folders(tree):
    """Every folder that has files below it; the root is none."""
    found = set()
    for path in tree:
        while "/" in path:
            path = path.rpartition("/")[0]
            if path in found:
                break
            found.add(path)
    return found
