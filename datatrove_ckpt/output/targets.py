"""Publishes a rank's staged files: to a local folder, a remote folder, or the hub.

A file appears complete or not at all. All files of a chunk are complete on the local disk before
the first byte is sent.

Only S3 (s3fs) can list open uploads, and show without a trace whether it is writable. Other file
systems need only ``put_file`` and ``info``.

A rank's uploaded files are committed to the hub with few commits, in a dedicated thread. They wait
until the first file has waited for ``hub_commit_seconds`` or a part of it, or there are 100 files,
or the rank has no more files. While more files may come, they then wait for the rank's turn
(``hub.CommitPace``).

    a kill before the commit       the next attempt writes the chunk again, and does not send
                                   content that the hub has
    a kill after the commit        the next attempt finds equal files there, and makes no commit
    the commit's response is lost  the files are looked up before they are sent again

The hub may lag behind its newest commit, so commits may be repeated harmlessly.

``repair`` removes output files; from a repository on the hub many in one commit, because commits
are few.
"""

import copy
import errno
import hashlib
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import xxhash
from datatrove.io import DataFolder
from loguru import logger

from datatrove_ckpt.checkpoint import files, layout
from datatrove_ckpt.checkpoint.checksummed_lines import explained
from datatrove_ckpt.checkpoint.commits import OutputFile
from datatrove_ckpt.checkpoint.open_checkpoint import RankLease
from datatrove_ckpt.checkpoint.publish_intents import (
    Placement,
    PublicationStopped,
    PublishIntents,
    WaitingChunk,
)
from datatrove_ckpt.common import retrying
from datatrove_ckpt.common.formatting import duration, no_bars_in_logs, plural, ranges
from datatrove_ckpt.common.object_store import Creator
from datatrove_ckpt.common.threads import context_thread
from datatrove_ckpt.errors import OutputFailed, StorageFailed
from datatrove_ckpt.output.file_managers import StagedFiles
from datatrove_ckpt.output.file_names import STAGING, plain
from datatrove_ckpt.output.hub import (
    CommitHistory,
    CommitPace,
    HubFolder,
    commit_title,
    hub_failure,
)
from datatrove_ckpt.output.interruptible_calls import InterruptibleCalls
from datatrove_ckpt.output.output_folder import (
    Info,
    OutputFolder,
    OutputListing,
    RankCommits,
    content_hash,
    first_names,
    local_stamps,
    other_content,
    remote_stamp,
)

PART_BYTES = 8 << 20
"""Size of a part of a multipart upload. Files of twice this size and more are sent in parts. s3fs's
own 50 MiB would be sent again after each reset, and ten such parts be held in memory.
"""

T = TypeVar("T")


class OutputTarget(Placement):
    """Publishes a rank's files, which are first written to the folder ``staging``.

    An existing file is replaced only if the rank's intents name its content.
    """

    def __init__(self, folder: DataFolder, scratch: Path) -> None:
        self._folder = folder
        # Another run may write into the same folder: it must not remove this run's staged files.
        self._run_hash = xxhash.xxh3_64_hexdigest(str(scratch).encode())
        # Each process has a folder: a process that lost its rank must not touch the files of the
        # next process.
        self.staging = scratch / layout.STAGING / secrets.token_hex(4)

    def publish(
        self, chunk_index: int, staged: StagedFiles, intents: PublishIntents
    ) -> list[OutputFile]:
        """Publishes a chunk's files, all or none: they appear now, or after ``wait``.

        Raises:
            OutputMismatch: a file exists with content that this rank has not published.
            OutputFailed, StorageFailed: a file cannot be published.
        """
        finished = staged.finished.items()
        intents.add({name: file.hexdigest() for name, file in finished})
        created = []
        for name, file in finished:
            if self.create(file.path, name):
                created.append(name)
                continue
            there = self.hash_of(name)
            if there not in intents.hashes(name):
                for created_name in created:
                    remove_file(self._folder, created_name)
                raise other_content(self._folder.resolve_paths(""), [name])
            if there != file.hexdigest():
                self.replace(file.path, name)
        self.settle_names(staged.finished)
        files.disk.remove_tree(staged.folder)  # before the stamps: its names count as a change
        return [
            OutputFile(name, file.size, file.hexdigest(), stamp=self.stamp(name), rows=file.rows)
            for name, file in finished
        ]

    def create(self, staged: Path, name: str) -> bool:
        """Returns False if the name exists."""
        raise NotImplementedError

    def replace(self, staged: Path, name: str) -> None:
        raise NotImplementedError

    def settle_names(self, names: Iterable[str]) -> None:
        """Returns when the names of published files survive a power loss."""

    def stamp(self, name: str) -> int:
        raise NotImplementedError

    def hash_of(self, name: str) -> str:
        """Returns the hash of the file at this name, as intents record it."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Runs before the staged files of earlier processes are removed."""

    def finish(self) -> None:
        """Runs once everything is published."""

    def settle(self, commits: RankCommits, listing: OutputListing) -> None:
        """Adds this process's published files to a listing that lags."""


class LocalTarget(OutputTarget):
    """A folder on a disk. A file is published as a second name of the staged file, unless the name
    exists.

    Files are staged in the checkpoint's folder, which no reader of the output reads. If it is on
    another file system, a copy beside the published files replaces the staged file.
    """

    def __init__(self, folder: DataFolder, scratch: Path, rank: int) -> None:
        super().__init__(folder, scratch)
        self._root = Path(folder.resolve_paths("")).absolute()
        self._beside = self._root / STAGING / f"{rank:05d}-{self._run_hash}"

    def create(self, staged: Path, name: str) -> bool:
        final = self._root / name
        files.disk.make_dirs(final.parent)
        self._take_group(staged, final.parent)
        return self._named(files.disk.put_new, staged, final)

    def replace(self, staged: Path, name: str) -> None:
        self._named(files.disk.rename, staged, self._root / name)

    def _named(self, name: Callable[[Path, Path], T], staged: Path, final: Path) -> T:
        try:
            return name(staged, final)
        except StorageFailed as error:
            cause = error.__cause__
            if not isinstance(cause, OSError) or cause.errno != errno.EXDEV:
                raise
        copied = self._copied(staged)
        named = name(copied, final)
        files.disk.remove(copied)
        return named

    def _copied(self, staged: Path) -> Path:
        copied = self._beside / secrets.token_hex(4)
        files.disk.make_dirs(self._beside, files.PRIVATE_FOLDER)
        with staged.open("rb") as file:
            files.disk.write_new(copied, iter(partial(file.read, 1 << 20), b""), files.PUBLIC_FILE)
        self._take_group(copied, self._root)
        return copied

    def _take_group(self, path: Path, folder: Path) -> None:
        status = folder.stat()
        if status.st_mode & stat.S_ISGID:
            with suppress(OSError):
                os.chown(path, -1, status.st_gid)

    def settle_names(self, names: Iterable[str]) -> None:
        sync_parents(self._root, names)

    def hash_of(self, name: str) -> str:
        with explained("read", self._root / name):
            return content_hash(self._folder, name)

    def stamp(self, name: str) -> int:
        with explained("look at", self._root / name):
            return local_stamps((self._root / name).stat())[0]

    def prepare(self) -> None:
        files.disk.remove_tree(self._beside)
        files.disk.remove_dir(self._beside.parent)

    finish = prepare


class RemoteTarget(OutputTarget):
    def __init__(
        self, folder: DataFolder, scratch: Path, lease: RankLease, calls: InterruptibleCalls
    ) -> None:
        super().__init__(folder, scratch)
        self._lease = lease
        self._calls = calls
        self._creator = Creator(folder.fs)

    def _retry(self, problem: str, call: Callable[[], T]) -> T:
        return self._calls.retry(problem, call, lease=self._lease)

    def create(self, staged: Path, name: str) -> bool:
        if self._look_up(name):
            return False
        return self.upload(staged, name, is_new=True)

    def replace(self, staged: Path, name: str) -> None:
        self.upload(staged, name)

    def upload(self, local: Path, name: str, is_new: bool = False, **options: object) -> bool:
        """Returns False if the file must be new, and its name exists.

        Raises:
            OutputFailed: the file could not be uploaded, or the remote file has another size.
        """
        size = local.stat().st_size
        put = partial(self._put, local, name, is_new, **options)
        if not self._retry(f"{name} could not be uploaded", put):
            return False
        remote_size = int(self._look_up(name).get("size", 0))
        if remote_size != size:
            raise OutputFailed(
                f"{self._folder.resolve_paths(name)} has {remote_size} bytes after its upload "
                f"instead of {size}. Find out who else writes there, and run again."
            )
        return True

    def _put(self, local: Path, name: str, is_new: bool, **options: object) -> bool:
        self._folder.makedirs(os.path.dirname(name), exist_ok=True)  # noqa: PTH120 (a remote path)
        put = partial(self._folder.put_file, str(local), name, **options)
        if is_new:
            return self._creator.write(put)
        put()
        return True

    def info(self, name: str) -> Info:
        self._folder.invalidate_cache(name)
        info: Info = self._folder.info(name)
        return info

    def hash_of(self, name: str) -> str:
        return self._retry(f"{name} cannot be read", partial(content_hash, self._folder, name))

    def stamp(self, name: str) -> int:
        return remote_stamp(self._look_up(name))

    def _look_up(self, name: str) -> Info:

        def look() -> Info:
            try:
                return self.info(name)
            except FileNotFoundError:
                return {}

        return self._retry(f"{name} could not be looked up", look)


class S3Target(RemoteTarget):
    """A folder on S3, through s3fs. It makes no folders: s3fs would make a bucket with a misspelt
    name.
    """

    def prepare(self) -> None:
        """Checks write access, and aborts uploads of earlier processes."""
        # A name that only this rank of this run uses, for an upload that is never completed.
        probe = f"{STAGING}/probe-{self._run_hash}"
        create = partial(self._call, "create_multipart_upload", probe)
        upload = self._retry("cannot be written to", create)["UploadId"]
        self._abort(probe, upload)
        earlier = self.staging.parent
        if earlier.exists():  # their files are still staged
            paths = (
                path.relative_to(earlier).parts for path in earlier.rglob("*") if path.is_file()
            )
            self._abort_open_uploads({probe, *("/".join(parts[2:]) for parts in paths)})

    def upload(self, local: Path, name: str, is_new: bool = False, **options: object) -> bool:
        part = max(PART_BYTES, -(-local.stat().st_size // 10_000))  # S3's maximum number of parts
        is_uploaded = super().upload(local, name, is_new, chunksize=part, **options)
        if local.stat().st_size >= 2 * PART_BYTES:
            self._abort_open_uploads({name})
        return is_uploaded

    def info(self, name: str) -> Info:
        head = self._call("head_object", name)  # ``info`` may read a cached listing
        return {"size": head["ContentLength"], "ETag": head["ETag"]}

    def _abort_open_uploads(self, names: set[str]) -> None:
        for name in names:
            bucket, key = self._bucket_and_key(name)
            find = partial(
                self._folder.fs.call_s3, "list_multipart_uploads", Bucket=bucket, Prefix=key
            )
            page = self._retry("the open uploads could not be listed", find)
            for upload in page.get("Uploads", []):
                if upload["Key"] == key:
                    self._abort(name, upload["UploadId"])

    def _abort(self, name: str, upload: str) -> None:
        def abort() -> None:
            try:
                self._call("abort_multipart_upload", name, UploadId=upload)
            except FileNotFoundError as error:
                if retrying.s3_code(error) != "NoSuchUpload":
                    raise

        self._retry(f"an open upload of {name} could not be aborted", abort)

    def _call(self, method: str, name: str, **arguments: str) -> Info:
        bucket, key = self._bucket_and_key(name)
        response: Info = self._folder.fs.call_s3(method, Bucket=bucket, Key=key, **arguments)
        return response

    def _bucket_and_key(self, name: str) -> tuple[str, str]:
        bucket, key, _ = self._folder.fs.split_path(self._folder.resolve_paths(name))
        return bucket, key


_ANSWER_SECONDS = 600.0
"""Limit of a request to the hub. The client itself would wait for ever."""


class _TargetOnHub(RemoteTarget):
    def __init__(
        self, folder: DataFolder, scratch: Path, lease: RankLease, calls: InterruptibleCalls
    ) -> None:
        super().__init__(folder, scratch, lease, calls)
        no_bars_in_logs()
        assert calls.hub is not None
        self._hub = calls.hub

    def _retry(self, problem: str, call: Callable[[], T], seconds: float = _ANSWER_SECONDS) -> T:
        return self._calls.retry(problem, call, retrying.HUB, seconds, self._lease)


class BucketTarget(_TargetOnHub):
    """A bucket of the hub, which has no commits. Its client sends content that the hub lacks."""

    def upload(self, local: Path, name: str, is_new: bool = False, **options: object) -> bool:
        hub = self._hub
        send = partial(hub.api().batch_bucket_files, hub.repo, add=[(local, hub.full_name(name))])
        self._retry(f"{name} could not be uploaded", send, seconds_to_send([local]))
        return True

    def info(self, name: str) -> Info:
        existing = self._hub.look_up([name])
        if name not in existing:
            raise FileNotFoundError(name)
        return vars(existing[name])

    def stamp(self, name: str) -> int:
        # A new file may not be listed yet.
        return int(self._look_up(name).get("stamp", 0))


MOST_FILES = 100
"""Limit of the files in a commit. The hub advises fewer than about 100."""

MOST_BYTES = 32 * 2**20
"""Limit of the bytes of small files that are sent inside a commit."""


@dataclass(eq=False)
class UploadedFile:
    """A file whose content is on the hub, or is sent inside its commit."""

    chunk_index: int
    name: str
    operation: Any

    def __post_init__(self) -> None:
        self._is_regular = getattr(self.operation, "_upload_mode", None) == "regular"
        self.bytes_in_commit = 0
        if self._is_regular:
            self.bytes_in_commit = self.operation.upload_info.size
        self.earlier: Collection[str] = ()
        """Hashes of all content that the rank may have published under this name."""

    @cached_property
    def content_hash(self) -> str:
        if not self._is_regular:
            return str(self.operation.upload_info.sha256.hex())
        with self.operation.as_file() as file:
            data = file.read()
        return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


class HubTarget(_TargetOnHub):
    def __init__(
        self,
        folder: DataFolder,
        rank: int,
        scratch: Path,
        lease: RankLease,
        calls: InterruptibleCalls,
        pace: CommitPace,
    ) -> None:
        super().__init__(folder, scratch, lease, calls)
        self._pace = pace
        self._seconds = pace.seconds_of_next()
        self._rank = rank
        self._history = CommitHistory()
        self._seen: list[str | None] = [None]
        """The commits of the branch, in the order in which this process has seen them."""
        self._confirmed: dict[str, int] = {}
        """Number of commits seen before a file was committed, by its name."""
        self._uploaded: dict[int, tuple[list[UploadedFile], Path]] = {}
        self._queue: list[UploadedFile] = []
        """Files that wait for a commit, oldest first."""
        self._chunks: dict[int, tuple[WaitingChunk, Path]] = {}
        """Chunks of the waiting files, with their staging folders."""
        self._waiting_since = 0.0
        self._change = threading.Condition()
        self._hurried = False
        self._is_running = False

    # publisher's thread --------------------------------------------------------------------------

    def publish(
        self, chunk_index: int, staged: StagedFiles, intents: PublishIntents
    ) -> list[OutputFile]:
        """Uploads files, which appear with a commit that refuses other content."""
        finished = staged.finished
        paths = {name: file.path for name, file in finished.items()}
        uploaded = []
        if paths:
            uploaded = self._retry(
                f"{first_names(list(paths))} could not be uploaded",
                partial(self._preupload, chunk_index, paths),
                seconds_to_send(paths.values()),
            )
        # The client silently omits such files from a commit.
        ignored = [file.name for file in uploaded if getattr(file.operation, "_should_ignore", 0)]
        if ignored:
            raise OutputFailed(
                f"{self._hub.url}: .gitignore leaves {first_names(ignored)} out of every commit. "
                "Change it, or choose another output_filename, and run again."
            )
        hashes = {file.name: file.content_hash for file in uploaded}
        intents.add(hashes)
        for file in uploaded:
            file.earlier = intents.hashes(file.name)
        self._uploaded[chunk_index] = uploaded, staged.folder
        return [
            OutputFile(name, file.size, file.hexdigest(), hashes[name], rows=file.rows)
            for name, file in finished.items()
        ]

    def _preupload(self, chunk_index: int, paths: Mapping[str, Path]) -> list[UploadedFile]:
        """Uploads the staged files, except content that the hub has.

        The staged files must stay until they are committed. Small text files are sent inside the
        commit, outside LFS.
        """
        from huggingface_hub import CommitOperationAdd

        added = {
            name: CommitOperationAdd(self._hub.full_name(name), str(path))
            for name, path in paths.items()
        }
        self._hub.api().preupload_lfs_files(
            self._hub.repo,
            added.values(),
            repo_type=self._hub.kind,
            revision=self._hub.branch,
            free_memory=False,
        )
        return [UploadedFile(chunk_index, *item) for item in added.items()]

    def hash_of(self, name: str) -> str:
        existing = self._retry("cannot be listed", partial(self._hub.look_up, [name]))
        if name not in existing:
            return ""
        return existing[name].hash

    def settle(self, commits: RankCommits, listing: OutputListing) -> None:
        """Adds files to a listing whose commit by this process the hub does not show yet.

        Other missing files are lost: they were deleted, or the repository was made again.
        """
        lost = {file.path: file for file in commits.files if not listing.is_right(file)}
        waited_for = [
            name for name in lost if name in self._confirmed and name not in listing.sizes
        ]
        if not waited_for:
            return
        head = self._calls.retry("cannot be listed", self._look_at_history, lease=self._lease).head
        trusted = [name for name in waited_for if head in self._seen[: self._confirmed[name]]]
        if trusted:
            logger.info(
                f"{self._hub.url} does not show {plural(len(trusted), 'file')} yet that it has "
                "committed. Check later with datatrove-ckpt verify."
            )
            listing.sizes |= {name: lost[name].size for name in trusted}

    def wait(self, chunk_index: int, waiting: WaitingChunk) -> None:
        uploaded, folder = self._uploaded.pop(chunk_index)
        if not uploaded:
            files.disk.remove_tree(folder)
            waiting.done()
            return
        with self._change:
            if not self._queue:
                self._waiting_since = time.monotonic()
            self._queue += uploaded
            self._chunks[chunk_index] = waiting, folder
            if not self._is_running:
                self._is_running = True
                context_thread(self._run, "datatrove-ckpt hub")
            self._change.notify_all()

    # any thread ----------------------------------------------------------------------------------

    def flush(self) -> None:
        with self._change:
            self._hurried = True
            self._change.notify_all()

    def stop(self) -> None:
        """A running commit may still succeed; the next attempt finds it."""
        with self._change:
            self._change.notify_all()

    # own thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        attempts = retrying.FailureCounter(retrying.HUB, hub_failure)
        try:
            while batch := self._next_batch():
                self._commit(batch, attempts)
        except PublicationStopped:
            return
        except BaseException as error:  # every failure here must reach the event loop
            waiting, _ = next(iter(self._chunks.values()))
            waiting.failed(error)

    def _next_batch(self) -> list[UploadedFile]:
        with self._change:
            while not self._calls.stopped:
                due = None
                if self._queue:
                    due = self._waiting_since + self._seconds - time.monotonic()
                is_full = (
                    len(self._queue) >= MOST_FILES
                    or sum(file.bytes_in_commit for file in self._queue) >= MOST_BYTES
                )
                if due is not None and (due <= 0 or self._hurried or is_full):
                    break
                self._change.wait(due)
            else:
                return []
            size = 0
            batch: list[UploadedFile] = []
            for file in self._queue[:MOST_FILES]:
                size += file.bytes_in_commit
                if batch and size > MOST_BYTES:
                    break
                batch.append(file)
            return batch

    def _commit(self, batch: list[UploadedFile], attempts: retrying.FailureCounter) -> None:
        self._lease.check()
        try:
            history = self._calls.run(self._look_at_history, _ANSWER_SECONDS)
            ends = self._hurried
            seconds = self._pace.seconds_until_turn(history, ends)
            if seconds:
                meanwhile = "generation continues"
                if ends:
                    meanwhile = "the task waits"
                logger.info(
                    f"{self._hub.url}: {plural(len(self._queue), 'file')} wait for a commit: "
                    f"{len(history.of_last_hour)} were made within an hour "
                    f"(hub_commits_per_hour={self._pace.per_hour}). Next look in "
                    f"{duration(seconds)}; {meanwhile}."
                )
                with self._change:
                    self._change.wait_for(
                        lambda: self._calls.stopped or self._hurried != ends, seconds
                    )
                return
            self._commit_missing(batch, history.head)
        except OSError as error:
            problem = f"{plural(len(self._queue), 'file')} wait for a commit"
            try:
                self._calls.sleep(attempts.failed(f"{self._hub.url}: {problem}", error))
            except OSError:
                raise self._calls.failed(problem, error) from error
            return  # the commit may have succeeded: the next attempt checks
        attempts.succeeded()
        self._seconds = self._pace.seconds_of_next()
        with self._change:
            del self._queue[: len(batch)]
            self._waiting_since = time.monotonic()
            waiting_chunks = {file.chunk_index for file in self._queue}
        for file in batch:
            self._confirmed[plain(file.name)] = len(self._seen)
            if file.chunk_index not in waiting_chunks:
                waiting_chunks.add(file.chunk_index)
                waiting, folder = self._chunks[file.chunk_index]
                files.disk.remove_tree(folder)
                waiting.done()
                del self._chunks[file.chunk_index]  # now: ``_run`` reports an error to a chunk

    def _look_at_history(self) -> CommitHistory:
        history = self._hub.history(self._history)
        self._history = history._replace(made=history.made[:1] + tuple(history.of_last_hour[1:]))
        self._seen += [commit.oid for commit in history.made if commit.oid not in self._seen]
        return self._history

    def _commit_missing(self, added: list[UploadedFile], head: str | None) -> None:
        """Commits the files that are missing, with one attempt. After a stop or an error, the
        commit may exist.

        Another job's files may have appeared: only content that this rank may have published is
        replaced.
        """
        look_up = partial(self._hub.look_up, [file.name for file in added], head)
        existing = self._calls.run(look_up, _ANSWER_SECONDS)
        other_names = [
            file.name
            for file in added
            if file.name in existing and existing[file.name].hash not in file.earlier
        ]
        if other_names:
            raise other_content(self._hub.url, other_names)
        # Copies, because the client refuses committed operations.
        operations = [
            copy.copy(file.operation)
            for file in added
            if file.name not in existing or existing[file.name].hash != file.content_hash
        ]
        if not operations:  # an earlier commit succeeded, but its response was lost
            return
        chunks = ranges({file.chunk_index for file in added})
        title = commit_title(plural(len(added), "file"), self._rank, chunks)
        self._calls.run(partial(self._hub.commit, operations, title, head), _ANSWER_SECONDS)


def seconds_to_send(paths: Iterable[Path]) -> float:
    """Allows for 50 kB a second."""
    return _ANSWER_SECONDS + sum(path.stat().st_size for path in paths) / 50_000


def make_target(
    folder: OutputFolder, rank: int, scratch: Path, lease: RankLease, pace: CommitPace
) -> OutputTarget:
    output = folder.writer.output_folder
    if output.is_local():
        return LocalTarget(output, scratch, rank)
    kind = RemoteTarget
    if folder.hub is not None:
        if not folder.hub.is_bucket:
            return HubTarget(output, rank, scratch, lease, folder.calls, pace)
        kind = BucketTarget
    elif hasattr(output.fs, "call_s3"):
        kind = S3Target
    return kind(output, scratch, lease, folder.calls)


_MAX_REMOVED = 1000


def remove_output(folder: DataFolder, names: Sequence[str]) -> None:
    """Removes files that may exist. Raises OutputFailed and StorageFailed."""
    hub = HubFolder.of(folder)
    if hub is not None:
        calls = InterruptibleCalls(hub.url, hub)
        for start in range(0, len(names), _MAX_REMOVED):
            part = names[start : start + _MAX_REMOVED]
            # Each attempt looks the files up again: the hub refuses to remove missing files.
            calls.retry(
                f"{plural(len(part), 'file')} could not be removed", partial(_remove, hub, part)
            )
        return
    for name in names:
        remove_file(folder, name)
    if folder.is_local():
        sync_parents(Path(folder.resolve_paths("")), names)


def remove_file(folder: DataFolder, name: str) -> None:
    if folder.is_local():
        files.disk.remove(Path(folder.resolve_paths(name)))
        return
    try:
        with retrying.file_system_call():
            folder.rm_file(name)
    except FileNotFoundError:
        return
    except OSError as error:
        location = folder.resolve_paths(name)
        raise OutputFailed(
            f"{location} could not be removed: {retrying.failure_line(error)}. Run again."
        ) from error


def sync_parents(root: Path, names: Iterable[str]) -> None:
    for folder in {(root / name).parent for name in names}:
        if folder.is_dir():
            files.disk.sync_dir(folder)


def _remove(hub: HubFolder, names: Sequence[str]) -> None:
    there = [hub.full_name(name) for name in hub.look_up(names)]
    if there:
        hub.remove(there, f"Remove {plural(len(there), 'file')}: datatrove-ckpt repair")
