"""Records the commits of hub datasets that all ranks of a job read.

A branch moves, so ranks that start at different times would read different files. So the first rank
records the commit of a branch or tag in the job's checkpoint folder. The file is made by a hard
link: the first link wins, whole.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import orjson
from xxhash import xxh3_64_hexdigest

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.errors import CheckpointCorrupt

_COMMIT = re.compile(r"[0-9a-f]{40}")


def is_commit(revision: str | None) -> bool:
    return revision is not None and _COMMIT.fullmatch(revision) is not None


@dataclass
class Revisions:
    _folder: Path

    def commit(self, dataset: str, revision: str, resolve: Callable[[], str | None]) -> str | None:
        """Returns the commit that this job reads as ``revision`` of the dataset.

        Args:
            resolve: requests the commit from the hub, once per job. Returns None if the hub is
                offline.

        Raises:
            CheckpointCorrupt: the recorded commit cannot be read.
        """
        path = self._folder / f"dataset_{xxh3_64_hexdigest(f'{dataset}@{revision}'.encode())}.json"
        recorded = self._read(path)
        if recorded is not None:
            return recorded
        commit = resolve()
        if commit is None:
            return None
        fields = {"dataset": dataset, "revision": revision, "commit": commit}
        files.keep_first(
            path, orjson.dumps(fields, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
        )
        return self._read(path)

    def _read(self, path: Path) -> str | None:
        try:
            fields = orjson.loads(path.read_bytes())
            commit = fields["commit"]
            if is_commit(commit):
                return str(commit)
        except FileNotFoundError:
            return None
        except (orjson.JSONDecodeError, KeyError, TypeError):
            pass
        raise CheckpointCorrupt(
            path,
            " should name the commit of the dataset that this run reads, and cannot be read. "
            "Restore it from a copy, or write the commit as `revision` into dataset_options and "
            "remove the file.",
        )
