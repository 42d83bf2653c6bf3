"""Output without a server: which errors are retried, when waiting ends, which uploads are
aborted.
"""

import errno
import os
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import fsspec
import pytest
from botocore.exceptions import NoCredentialsError
from datatrove.io import DataFolder
from datatrove.pipeline.writers import JsonlWriter
from fsspec.implementations.memory import MemoryFileSystem

from datatrove_ckpt.checkpoint.commits import stamp_of
from datatrove_ckpt.checkpoint.publish_intents import PublicationStopped, PublishIntents
from datatrove_ckpt.common import retrying
from datatrove_ckpt.common.redaction import check_options
from datatrove_ckpt.errors import ConfigError, Fenced, OutputFailed, StorageFailed
from datatrove_ckpt.output.file_managers import StagedFiles
from datatrove_ckpt.output.interruptible_calls import InterruptibleCalls
from datatrove_ckpt.output.output_folder import OutputFolder, list_files
from datatrove_ckpt.output.targets import LocalTarget, RemoteTarget, S3Target
from datatrove_ckpt.output.writer_checks import check_writer
from datatrove_ckpt.readers import JsonlReader
from tests import golden
from tests.crashes import WatchedDisk, disk_in_place
from tests.disk_errors import Answered


class Breaking(MemoryFileSystem):
    """A file system in memory. ``before`` and ``after`` are called around every upload."""

    protocol = "breaking"
    store = {}  # noqa: RUF012 (as fsspec's own)
    before = staticmethod(lambda path: None)
    after = staticmethod(lambda path: None)

    @classmethod
    def _strip_protocol(cls, path):
        return str(super()._strip_protocol(path.replace("breaking://", "memory://")))

    def put_file(self, lpath, rpath, **options):
        type(self).before(rpath)
        super().put_file(lpath, rpath, **options)
        type(self).after(rpath)


@pytest.fixture
def files(monkeypatch):
    fsspec.register_implementation("breaking", Breaking, clobber=True)
    monkeypatch.setattr(Breaking, "before", Breaking.before)
    monkeypatch.setattr(Breaking, "after", Breaking.after)
    monkeypatch.setattr(Breaking, "store", {})
    monkeypatch.setattr(Breaking, "pseudo_dirs", [""])
    DataFolder.clear_instance_cache()
    return Breaking


def leased(check=lambda: None):
    return SimpleNamespace(check=check)


def remote_folder(scratch, lease, calls):
    return RemoteTarget(DataFolder("breaking://output"), scratch, lease, calls)


@pytest.fixture
def calls():
    return InterruptibleCalls("breaking://output")


@pytest.fixture
def folder(files, tmp_path, policy, calls):
    policy("STORAGE", first=0.001)
    return remote_folder(tmp_path, leased(), calls)


@pytest.fixture
def local(tmp_path):
    (tmp_path / "staged").write_text("content")
    return tmp_path / "staged"


def failing(*errors):
    """Raises these errors, one per call, and then none."""
    left = list(errors)

    def fail(path):
        if left:
            raise left.pop(0)

    return fail


class OssError(Exception):
    """As the errors of some libraries: no OSError."""


def test_temporary_errors_are_retried(files, folder, local, log):
    files.before = failing(
        ConnectionResetError("reset"), TimeoutError(), OSError(16, "SlowDown"), OssError()
    )
    folder.upload(local, "a")
    assert files.store["/output/a"].getvalue() == b"content"
    assert not folder.create(local, "a")
    assert len(log.said("Next attempt in")) == 4
    assert "a could not be uploaded: ConnectionResetError: reset. Next attempt in " in log[0]
    assert log[0].endswith(", for 5 min at most.\n")


def test_a_listing_that_fails_for_now_is_tried_again(files, tmp_path, policy, monkeypatch):
    policy("STORAGE", first=0.001)
    fail = failing(ConnectionResetError("reset"), OSError(16, "SlowDown"))
    monkeypatch.setattr(files, "find", lambda *_, **options: fail("") or {})
    writer = JsonlWriter("breaking://output", "${rank}_${chunk_index}.jsonl", compression=None)
    assert OutputFolder(writer, tmp_path).look({}).sizes == {}


@pytest.mark.parametrize(
    "error, advice",
    [
        (PermissionError("Access Denied."), "Access Denied. Check the credentials"),
        (
            FileNotFoundError("The bucket does not exist"),
            "Make the bucket, repository or branch, or correct the output folder",
        ),
        (NoCredentialsError(), "Unable to locate credentials. Set AWS_ACCESS_KEY_ID"),
    ],
)
def test_a_permanent_error_ends_the_upload_at_once_and_says_what_to_do(
    files,
    folder,
    local,
    log,
    error,
    advice,
):
    files.before = failing(error)
    with pytest.raises(OutputFailed, match="breaking://output: a could not be uploaded") as failed:
        folder.upload(local, "a")
    assert advice in str(failed.value)
    assert "Run again" in str(failed.value)
    assert log == []


def test_a_rank_that_was_taken_over_meanwhile_tries_no_upload_again(
    files, local, tmp_path, calls, policy
):
    def taken():
        raise Fenced("Another process has taken over")

    policy("STORAGE", first=0.001)
    folder = remote_folder(tmp_path, leased(taken), calls)
    folder.upload(local, "a")
    files.before = failing(ConnectionResetError("the network is gone, and comes back"))
    with pytest.raises(Fenced):
        folder.upload(local, "b")
    assert files.store.keys() == {"/output/a"}


def test_a_file_of_another_size_is_refused(files, folder, local):
    files.after = lambda path: files().pipe_file(path, b"of another")
    with pytest.raises(OutputFailed, match="a has 10 bytes after its upload instead of 7"):
        folder.upload(local, "a")


def test_a_stop_ends_the_wait_for_an_upload(files, folder, calls, local):
    begun, release = threading.Event(), threading.Event()

    def hang(path):
        begun.set()
        release.wait()

    files.before = hang
    threading.Thread(target=lambda: (begun.wait(), calls.stop())).start()
    with pytest.raises(PublicationStopped):
        folder.upload(local, "a")
    release.set()
    with pytest.raises(PublicationStopped):
        folder.upload(local, "b")


def test_a_stop_ends_the_pause_between_attempts(
    files,
    folder,
    calls,
    local,
    policy,
):
    policy("STORAGE", first=1000.0, longest=1000.0, patience=1000.0)

    def fail(path):
        threading.Timer(0.05, calls.stop).start()
        raise ConnectionError

    files.before = fail
    with pytest.raises(PublicationStopped):
        folder.upload(local, "a")


def by_s3(kind, code, status):
    error = kind("said S3")
    error.__cause__ = Answered(
        response={"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    )
    return error


test_which_errors_are_permanent = golden.shows(
    "errors_of_storage", globals(), {"STORAGE": retrying.STORAGE}
)


class Uploads:
    """S3's open uploads."""

    protocol = "s3"

    def __init__(self, *keys):
        self.open = [(key, f"id-{number}") for number, key in enumerate(keys)]
        self.refuses = ""

    def split_path(self, path):
        bucket, _, key = path.removeprefix("s3://").partition("/")
        return bucket, key, None

    def call_s3(self, method, Bucket, Key="", **arguments):
        if method == self.refuses:
            raise by_s3(PermissionError, "AccessDenied", 403)
        if method == "create_multipart_upload":
            self.open.append((Key, "new"))
            return {"UploadId": "new"}
        if method == "abort_multipart_upload":
            if (Key, arguments["UploadId"]) not in self.open:
                raise by_s3(FileNotFoundError, "NoSuchUpload", 404)
            self.open.remove((Key, arguments["UploadId"]))
            return {}
        assert method == "list_multipart_uploads"
        found = [one for one in self.open if one[0].startswith(arguments["Prefix"])]
        return {"Uploads": [{"Key": key, "UploadId": upload} for key, upload in found]}


def on_s3(uploads, scratch, *left):
    """``left``: the files that an earlier process has staged."""
    folder = SimpleNamespace(
        fs=uploads, resolve_paths=lambda name: f"s3://bucket/output/{name}".rstrip("/")
    )
    target = S3Target(folder, scratch, leased(), InterruptibleCalls("s3://bucket/output"))
    for name in left:
        staged = target.staging.with_name("earlier") / "0" / name
        staged.parent.mkdir(parents=True, exist_ok=True)
        staged.touch()
    return target


def test_open_uploads_of_exactly_these_names_are_aborted_however_many_there_are(
    tmp_path,
):
    mine, others = (
        ["output/a", "output/a", "output/b", "output/a"],
        ["output/ab", "output/c", "a", "elsewhere/a"],
    )
    uploads = Uploads(*mine, *others)
    on_s3(uploads, tmp_path, "a", "b").prepare()
    assert [key for key, _ in uploads.open] == others


def test_after_a_good_end_no_open_uploads_are_listed(tmp_path):
    uploads = Uploads("output/a")
    uploads.refuses = "list_multipart_uploads"
    on_s3(uploads, tmp_path).prepare()
    assert uploads.open == [("output/a", "id-0")]


@pytest.mark.parametrize(
    "refused, message",
    [
        ("create_multipart_upload", "s3://bucket/output: cannot be written to: PermissionError"),
        ("list_multipart_uploads", "s3:ListBucketMultipartUploads"),
        ("abort_multipart_upload", "s3:ListBucketMultipartUploads"),
    ],
)
def test_a_user_who_may_not_write_or_not_abort_gets_an_error_at_once(
    tmp_path, log, refused, message
):
    uploads = Uploads("output/a")
    uploads.refuses = refused
    with pytest.raises(OutputFailed, match=message):
        on_s3(uploads, tmp_path, "a").prepare()
    assert log == []


@pytest.mark.parametrize(
    "options, named",
    [
        ({"key": "AKIA", "secret": "hunter2"}, "'key'"),
        ({"client_kwargs": {"aws_secret_access_key": "hunter2"}}, "'aws_secret_access_key'"),
    ],
)
def test_secrets_among_the_storage_options_are_refused_and_not_repeated(options, named):
    folder = DataFolder("memory://x", fs=MemoryFileSystem(**options, skip_instance_cache=True))
    for refuse in (
        lambda: check_writer(JsonlWriter(folder, "${rank}_${chunk_index}.jsonl"), checkpoints=True),
        lambda: JsonlReader(folder),
    ):
        with pytest.raises(ConfigError, match=named) as refused:
            refuse()
        assert "hunter2" not in str(refused.value)


def test_options_that_are_no_secrets_are_fine():
    check_options(
        {"endpoint_url": "http://x", "profile": "me", "anon": False}, "s3://b", "data_folder"
    )
    check_options({"token": "anon"}, "gs://b", "data_folder")
    with pytest.raises(ConfigError, match="'private_key'"):
        check_options({"token": {"private_key": "x"}}, "gs://b", "data_folder")


# Local files -------------------------------------------------------------------------------------


def staged_files(folder, **contents):
    """Files of a chunk that are written and closed, as a writer of gzip makes them."""
    manager = JsonlWriter(str(folder / "output"), compression="gzip").output_mg
    staged = StagedFiles(folder / "staging", manager)
    for name, content in contents.items():
        file = staged.get_file(name)
        file.write(content if "b" in manager.mode else content.decode())
        file.close()
    return staged


def test_the_bytes_of_a_compressed_file_do_not_depend_on_the_time(tmp_path, monkeypatch):
    hashes = set()
    for seconds in (0.0, 1e9):
        monkeypatch.setattr(time, "time", lambda: seconds)  # noqa: B023 (in this turn)
        staged = staged_files(tmp_path / f"{seconds}", a=b"content")
        hashes.add(staged.finished["a"].hexdigest())
    assert len(hashes) == 1


def test_a_file_in_a_folder_that_a_group_shares_belongs_to_the_group(tmp_path, monkeypatch):
    output = tmp_path / "output"
    output.mkdir()
    group = os.getgid()
    changed = []
    monkeypatch.setattr(os, "chown", lambda path, *owner: changed.append((path.name, owner)))
    target = LocalTarget(DataFolder(str(output)), tmp_path, 0)
    target.publish(0, staged_files(tmp_path, a=b"content"), PublishIntents(tmp_path))
    assert changed == []
    output.chmod(0o2770)
    target.publish(1, staged_files(tmp_path, b=b"content"), PublishIntents(tmp_path))
    assert changed == [("b", (-1, group))]


class TwoFileSystems(WatchedDisk):
    """A disk on which nothing in a staging folder can be linked to elsewhere."""

    def before(self, name, args, label):
        if name == "link" and args[0].parent.name == "staging":
            raise StorageFailed from OSError(errno.EXDEV, "elsewhere")


def test_a_file_on_another_file_system_is_copied_in_parts_and_synced_before_it_has_its_name(
    tmp_path,
):
    output = tmp_path / "output"
    output.mkdir()
    staged = staged_files(tmp_path, a=os.urandom(3 << 20))
    target = LocalTarget(DataFolder(str(output)), tmp_path, 0)
    with disk_in_place(disk := TwoFileSystems()):
        target.publish(0, staged, PublishIntents(tmp_path))
    copied = disk.happened.index("link a")
    effects = [label.split(" ")[0] for label in disk.happened[copied - 6 : copied + 3]]
    assert effects == ["create", *["write"] * 4, "sync", "link", "remove", "sync"]
    assert (output / "a").stat().st_size > 3 << 20


@pytest.mark.parametrize("disk", [WatchedDisk, TwoFileSystems])
def test_a_file_is_read_again_if_it_has_changed_though_its_time_was_put_back(tmp_path, disk):
    folder = DataFolder(str(tmp_path / "output"))
    path = tmp_path / "output/a"
    staged = staged_files(tmp_path, a=b"content")
    with disk_in_place(disk()):
        (file,) = LocalTarget(folder, tmp_path, 0).publish(0, staged, PublishIntents(tmp_path))
    before = path.stat()
    older = replace(file, stamp=stamp_of(f"{before.st_mtime_ns}:{before.st_ino}"))
    for committed in (file, older):
        assert not list_files(folder, {"a": committed}).touched
    path.write_bytes(path.read_bytes()[::-1])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    while path.stat().st_ctime_ns == before.st_ctime_ns:  # the kernel's clock is a coarse one
        path.touch()
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert list_files(folder, {"a": file}).touched == {"a"}
