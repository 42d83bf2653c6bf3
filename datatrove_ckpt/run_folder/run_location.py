"""Opens WHAT (a run folder, a checkpoint folder, its mirror, or the run's YAML file) for reading.

A mirror is copied into a temporary folder. Messages name the mirror instead.
"""

import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from datatrove_ckpt.checkpoint import layout
from datatrove_ckpt.checkpoint.batch_log import Batch, give_up
from datatrove_ckpt.checkpoint.checksummed_lines import is_count
from datatrove_ckpt.checkpoint.rank_summary import RankSummary
from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.common.formatting import plural_or_no
from datatrove_ckpt.common.launchers import LAUNCHERS, default_mirror
from datatrove_ckpt.config.paths import expand_path
from datatrove_ckpt.errors import CheckpointError, ConfigError, name_copy

if TYPE_CHECKING:
    from datatrove_ckpt.mirror.restore import MirrorReader


class RunNotStarted(ConfigError):
    """No task has a checkpoint yet."""


_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


@dataclass(slots=True)
class RunLocation:
    """The folder in which the files of a run's ranks can be read.

    Attributes:
        what: the folder or URL, for people.
        folder: the checkpoint folder, or a copy of the mirror.
        given: the user's WHAT and overrides, for commands to type.
        mirror: reads the mirror; None if ``folder`` is no copy.
        logging_dir: the executor's, from a YAML file or a run folder.
        output: the output folder, likewise.
        named_output: the output folder that the user names, wherever the other folders are.
    """

    what: str
    folder: Path
    given: list[str]
    mirror: "MirrorReader | None" = None
    tasks: int = 0
    logging_dir: str | None = None
    output: str | None = None
    named_output: str | None = None
    config: JsonObject = field(default_factory=dict)

    @property
    def is_copy(self) -> bool:
        return self.mirror is not None

    def refresh(self) -> None:
        if self.mirror is not None:
            self.mirror.refresh()


def is_config(argument: str) -> bool:
    if _URL.match(argument):
        return False
    path = Path(argument)
    return path.is_file() or (path.suffix in (".yaml", ".yml") and not path.exists())


@contextmanager
def open_location(
    argument: str,
    config: JsonObject | None = None,
    wants_file: Callable[[str, int], bool] = lambda name, size: True,
    overrides: Sequence[str] = (),
    output: str | None = None,
) -> Iterator[RunLocation]:
    """Finds what the user named: a folder, a URL, or a YAML file. A mirror's copy is removed at the
    end.

    Args:
        wants_file: which files of a mirror are needed, by name and size in bytes.
        output: the output folder, if the run's files name another.

    Raises:
        ConfigError: there is no such folder, or the YAML file names none.
        StorageFailed, CheckpointCorrupt: the mirror cannot be read.
    """
    if config is not None:
        location, url = _named_by_config(argument, config)
    else:
        location, url = _named(argument)
    location.given += overrides
    location.named_output = output
    if url is None:
        yield location
        return
    from datatrove_ckpt.common.object_store import check_url
    from datatrove_ckpt.mirror.restore import MirrorReader

    check_url("WHAT" if config is None else "checkpoints_remote_dir", url)
    with tempfile.TemporaryDirectory(prefix="datatrove-ckpt-") as folder:
        location.folder = Path(folder)
        root = url.rstrip("/")
        below = default_mirror(f"{root}/logs")
        mirrors = [url] if config is not None else [url, below]
        for mirror in mirrors:
            location.mirror = MirrorReader(mirror, location.folder, wants_file)
            location.what = location.mirror.url
            name_copy(folder, location.what)
            location.refresh()
            if location.mirror.ranks:
                break
        else:
            if config is not None:
                raise _not_begun(location, f"{location.what}, its mirror")
            raise ConfigError(
                f"{url} contains no mirror, and neither does {below}. Give the URL in "
                "checkpoints_remote_dir, or a run_folder."
            )
        if mirror != url:
            location.output = f"{root}/output"
            location.logging_dir = f"{root}/logs"
        yield location


def _named(argument: str) -> tuple[RunLocation, str | None]:
    location = RunLocation(argument, Path(argument), [argument])
    if _URL.match(argument):
        return location, argument
    root = location.folder
    if root.name == "checkpoints" and not root.exists():
        root = root.parent
    checkpoints = root / "checkpoints"
    output = root / "output"
    logs = root / "logs"
    with suppress(PermissionError):  # the command reports it later
        has_ranks = root.is_dir() and layout.rank_numbers(root)
        if checkpoints.is_dir() and not has_ranks:
            location.what = str(checkpoints)
            location.folder = checkpoints
            if output.is_dir():
                location.output = str(output)
            if logs.is_dir():
                location.logging_dir = str(logs)
        elif logs.is_dir() and not has_ranks and not (root / "executor.json").exists():
            location.output = str(output)
            location.logging_dir = str(logs)
            raise _not_begun(location, checkpoints)
    if location.folder.is_dir() and looks_like_mirror(location.folder):
        return location, location.what
    return location, None


def looks_like_mirror(folder: Path) -> bool:
    with suppress(PermissionError):
        for number in layout.rank_numbers(folder):
            rank = layout.rank_folder(folder, number)
            if (rank / layout.RUN).exists():
                return False
            if any(rank.glob("generation-*.json")):
                return True
    return False


# ``repair`` changes a restored copy of a mirror, and uploads it. After a crash in between, the same
# command finds the old commits' files missing, and takes the commits back.


@contextmanager
def restored(location: RunLocation) -> Iterator[RunLocation]:
    """Yields a location to change: for a mirror, a temporary folder with all ranks restored; else
    ``location`` itself.
    """
    if location.mirror is None:
        yield location
        return
    from datatrove_ckpt.mirror.restore import restore_ranks

    with tempfile.TemporaryDirectory(prefix="datatrove-ckpt-") as folder:
        name_copy(folder, location.what)
        restore_ranks(location.mirror.url, location.mirror.ranks, Path(folder))
        yield replace(location, folder=Path(folder))


def upload(location: RunLocation, ranks: list[RankSummary]) -> None:
    """The same command continues after a failure."""
    if location.mirror is None:
        return
    from datatrove_ckpt.mirror.restore import upload_rank

    for rank in {rank.key: rank for rank in ranks}.values():
        upload_rank(
            f"{location.mirror.url}/{rank.folder.relative_to(location.folder)}", rank.folder
        )


def cancel_batch(location: RunLocation, rank: Path, batch: Batch) -> str | None:
    """Cancels a batch of a rank at its provider. Returns why the provider could not; "" if it
    could; None: it has forgotten the batch, which is given up.
    """
    import asyncio

    from datatrove_ckpt.generation.provider_passes import cancel

    problem = asyncio.run(cancel(batch))
    if problem is None:
        with restored(location) as changed:
            folder = changed.folder / rank.relative_to(location.folder)
            give_up(folder, batch.number)
            upload(changed, [RankSummary(folder)])
    return problem


def _named_by_config(path: str, config: JsonObject) -> tuple[RunLocation, str | None]:
    executor = _arguments(config.get("executor"))
    index, step = _kept_step(path, executor)
    tasks = executor.get("tasks", 0)
    logging_dir = _text(executor.get("logging_dir"))
    output = _text(_arguments(step.get("output_writer")).get("output_folder"))
    runs_as_jobs = _runs_as_jobs(config)
    remote = _text(step.get("checkpoints_remote_dir"))
    if remote is None and runs_as_jobs:
        remote = default_mirror(str(logging_dir))
    local = None
    try:
        local = expand_path(
            f"{path}: pipeline[{index}].checkpoints_local_dir", step["checkpoints_local_dir"]
        )
    except ConfigError:
        if remote is None:
            raise
    location = RunLocation(
        str(local),
        local or Path(),
        [path],
        tasks=tasks if is_count(tasks) else 1,
        logging_dir=logging_dir,
        output=output,
        config=config,
    )
    is_here = local is not None and local.is_dir() and layout.rank_numbers(local)
    if remote is not None and (runs_as_jobs or not is_here):
        return location, remote
    if remote is not None:
        from datatrove_ckpt.mirror.restore import find_outdated

        # The folder's own reader reports damage.
        with suppress(OSError, ConfigError, CheckpointError):
            if find_outdated(remote, location.folder):  # other nodes have worked on ranks
                return location, remote
    if not is_here:
        raise _not_begun(location, f"{local}, its checkpoints_local_dir on this node")
    return location, None


def _text(value: object) -> str | None:
    if isinstance(value, str):
        return value
    return None


def _runs_as_jobs(config: JsonObject) -> bool:
    executor = config.get("executor")
    if not isinstance(executor, dict):
        return False
    name = str(executor.get("class_path")).rpartition(".")[2]
    return name in LAUNCHERS and LAUNCHERS[name].has_own_disks


def _not_begun(location: RunLocation, expected: object) -> ConfigError:
    argument = location.given[0]
    if location.output and any(Path(location.output).glob("*")):
        return ConfigError(
            f"{argument}: {location.output} holds files, but no task has a checkpoint in "
            f"{expected}. Move the checkpoints back, run again if there is a mirror, or use "
            "other folders."
        )
    hint = "A submitted job may wait in its queue."
    if _runs_as_jobs(location.config):
        hint += " For ended jobs: hf jobs ps -a, hf jobs logs ID."
    return RunNotStarted(
        f"{argument}: nothing has started yet: no task has a checkpoint in {expected}. {hint}"
    )


def _kept_step(path: str, executor: JsonObject) -> tuple[int, JsonObject]:
    pipeline = executor.get("pipeline")
    steps = enumerate(map(_arguments, pipeline if isinstance(pipeline, list) else ()))
    candidates = {
        index: step for index, step in steps if isinstance(step.get("checkpoints_local_dir"), str)
    }
    if len(candidates) != 1:
        folders = [step["checkpoints_local_dir"] for step in candidates.values()]
        raise ConfigError(
            f"{path}: one step must have checkpoints_local_dir, and "
            f"{plural_or_no(len(candidates), 'step')} has it. Give the folder of one: "
            f"{', '.join(folders) or 'none is known'}."
        )
    return candidates.popitem()


def _arguments(node: object) -> JsonObject:
    if isinstance(node, dict) and isinstance(node.get("init_args"), dict):
        return node["init_args"]  # type: ignore[no-any-return]
    return {}
