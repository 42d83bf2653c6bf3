"""Checks what a job needs: settings that fit each other, folders, input, servers, a writer.

A folder is checked by a write in a probe folder: no rank's folder, lock or database is touched. A
checkpoint needs locks, appends, renames, and syncs that reach permanent storage:
``file_system`` finds in /proc/mounts what a folder lacks of them.

Engines keep prompts from their beginning, until others need the room. So equal text costs once only
where prompts begin with it, and soon after each other: ``check_prompts`` finds what a prefix cache
can save of the prompts of a sample, and what keeps it from doing so.
"""

import copy
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from datatrove.data import Document
from datatrove.io import DataFolder, get_datafolder
from datatrove.pipeline.readers.base import BaseDiskReader, BaseReader

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.common.formatting import byte_size, duration, error_text, percent, plural
from datatrove_ckpt.common.retrying import failure_line, file_system_call, hub_refusal
from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.config.generation_params import max_tokens_of
from datatrove_ckpt.config.paths import existing_part, expand_path
from datatrove_ckpt.errors import (
    CheckpointError,
    ConfigError,
    DocumentNotSerializable,
    ServerStartFailed,
    setting_name,
    step_place,
)
from datatrove_ckpt.generation.recorded_requests import unsent_prompts
from datatrove_ckpt.generation.results import check_first, try_media
from datatrove_ckpt.inference.servers.host import EndpointProbe, ask_endpoints, check_servers
from datatrove_ckpt.output.arrow_types import NO_TYPES
from datatrove_ckpt.output.chunk_writing import WriterTrial
from datatrove_ckpt.output.document_codec import as_read, decode, encode
from datatrove_ckpt.output.file_managers import missing_codec
from datatrove_ckpt.output.file_names import writer_name
from datatrove_ckpt.output.hub import HubFolder
from datatrove_ckpt.output.interruptible_calls import check_access
from datatrove_ckpt.output.output_folder import has_commits
from datatrove_ckpt.process import event_loop
from datatrove_ckpt.readers import BatchReader, HuggingFaceDatasetReader
from datatrove_ckpt.readers.empty_input import NoDocuments, explain
from datatrove_ckpt.readers.inputs import (
    InputFiles,
    InputFolder,
    check_reachable,
    list_input,
    refuse_pointers,
)
from datatrove_ckpt.run_folder.finding import (
    Finding,
    FindingState,
    RemoteFailed,
    run_check,
    with_timeout,
)
from datatrove_ckpt.run_folder.gpu_layout import check_layout
from datatrove_ckpt.run_folder.run_plan import (
    RunnerPlan,
    RunPlan,
    check_steps,
    refuse_without_claims,
)
from datatrove_ckpt.run_folder.status_text import SORTING

MOUNTS = Path("/proc/mounts")

_IN_MEMORY = ("tmpfs", "ramfs")
_NETWORK = {
    "nfs",
    "nfs4",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "cifs",
    "smb3",
    "wekafs",
    "fuse.glusterfs",
    "fuse.juicefs",
    "fuse.sshfs",
    "9p",
    "virtiofs",
}
_OBJECT_STORES = {
    "s3fs",
    "mountpoint-s3",
    "goofys",
    "gcsfuse",
    "blobfuse",
    "blobfuse2",
    "rclone",
    "hf-mount",
}


# Mount options that make locks visible to this machine only.
_LOCAL_LOCKS = {"localflock", "nolock", "local_lock=flock", "local_lock=all"}


class Mount(NamedTuple):
    point: Path
    kind: str
    source: str
    options: frozenset[str]


class FilesystemTraits(NamedTuple):
    """The properties of a file system that matter for checkpoints.

    Attributes:
        lasts: files survive a restart of this machine.
        shared: other machines see the same files.
        unsupported: a checkpoint cannot be kept on it.
    """

    name: str
    lasts: bool = True
    shared: bool = False
    concern: str = ""
    unsupported: bool = False


def find_mount(path: Path, mounts: str) -> Mount | None:
    deepest = None
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 4:
            continue
        point = Path(fields[1].replace("\\040", " "))
        mount = Mount(point, fields[2], fields[0], frozenset(fields[3].split(",")))
        # The later mount at a point counts.
        is_deeper = deepest is None or point.is_relative_to(deepest.point)
        if is_deeper and path.is_relative_to(point):
            deepest = mount
    return deepest


def traits(mount: Mount | None) -> FilesystemTraits:
    if mount is None:
        return FilesystemTraits("a file system of unknown kind")
    if mount.kind in _IN_MEMORY:
        return FilesystemTraits(
            f"{mount.kind} (memory)",
            lasts=False,
            concern="It is lost when the machine or container stops.",
        )
    if mount.kind == "overlay":
        return FilesystemTraits(
            "overlay (a container's own layer)",
            lasts=False,
            concern="It is lost when the container is removed: mount a volume.",
        )
    if mount.kind in _NETWORK:
        concern = ""
        is_lustre_without = mount.kind == "lustre" and "flock" not in mount.options
        if is_lustre_without or mount.options & _LOCAL_LOCKS:
            concern = (
                "Its locks do not keep out other nodes. Mount it with locks that all nodes see "
                "(Lustre: flock; NFS: without nolock and local_lock)."
            )
        return FilesystemTraits(f"{mount.kind} (shared)", shared=True, concern=concern)
    if (
        mount.kind.startswith("fuse")
        and {mount.kind.removeprefix("fuse."), mount.source} & _OBJECT_STORES
    ):
        text = (
            "It cannot append to a file. Keep checkpoints on a disk, with checkpoints_remote_dir."
        )
        return FilesystemTraits(
            f"{mount.kind} (an object store)", shared=True, concern=text, unsupported=True
        )
    return FilesystemTraits(f"{mount.kind} (local)")


def file_system(folder: Path) -> FilesystemTraits:
    mounts = ""
    if MOUNTS.exists():
        mounts = MOUNTS.read_text(errors="replace")
    return traits(find_mount(existing_part(folder.absolute()).resolve(), mounts))


PROBE = ".datatrove-ckpt-probe-"


# A remote folder ---------------------------------------------------------------------------------


_CONTENT = b"datatrove-ckpt"


def probe_object(folder: DataFolder) -> Finding:
    """Uploads an object, compares its size, and deletes it.

    Raises:
        RemoteFailed: the upload failed, or the object has a wrong size.
    """
    name = f"{PROBE}{secrets.token_hex(4)}"
    url = folder.resolve_paths("")
    remote = folder.resolve_paths(name)
    try:
        with file_system_call():
            start = time.monotonic()
            folder = _upload(folder, name)
            folder.invalidate_cache(name)
            arrived = folder.info(name)["size"]
            seconds = time.monotonic() - start
    except OSError as error:
        with suppress(Exception):
            folder.rm_file(name)
        raise RemoteFailed(f"{remote} could not be written: {failure_line(error)}.") from error
    text = f"{url}: a small object was written in {duration(seconds)}"
    finding = Finding("ok", "reachable", f"{text} and deleted.")
    try:
        with file_system_call():
            folder.rm_file(name)
    except OSError as error:
        text = (
            f"{remote} was written but could not be deleted: {failure_line(error)}. Delete it by "
            "hand. Only a mirror needs deletions."
        )
        finding = Finding("warning", "reachable", text)
    if arrived != len(_CONTENT):
        raise RemoteFailed(
            f"{remote} has {arrived} bytes after its upload instead of {len(_CONTENT)}."
        )
    return finding


def _upload(folder: DataFolder, name: str) -> DataFolder:
    try:
        folder.pipe_file(name, _CONTENT)
        return folder
    except FileNotFoundError:
        # This file system has real folders, which a run makes; a missing bucket it does not make.
        above = folder.fs._parent(folder.path)
        if above.strip("/") not in ("", folder.path.strip("/")):
            with suppress(Exception):
                return _upload(DataFolder(above, fs=folder.fs), name)
        raise


_LEAST_FREE = 1 << 26  # bytes, for one chunk
_ON_ONE_NODE = "If tasks run on other nodes, choose a folder that all nodes see."


# Local folders -----------------------------------------------------------------------------------


def check_local(
    folder: Path, moves: bool, mirrored: bool = False, is_output: bool = False
) -> Iterator[Finding]:
    """``moves``: tasks may restart on other nodes."""
    yield _try_locally(folder)
    kind = file_system(folder)
    text = f"{kind.name}. {kind.concern}".rstrip()
    advice = "" if is_output else " Or set checkpoints_remote_dir."
    state: FindingState = "ok"
    if kind.unsupported and not is_output:
        state = "problem"
    elif mirrored and not kind.lasts:
        text += " The mirror (checkpoints_remote_dir) outlives it."
    elif not kind.lasts:
        state = "warning"
        text += advice
    elif moves and not mirrored and not kind.shared:
        state = "warning"
        text += f" {_ON_ONE_NODE}{advice}"
    elif kind.concern and not is_output:
        state = "warning"
    if state != "ok" or not is_output:
        yield Finding(state, "file system", text)
    yield check_room(folder)


def _try_locally(folder: Path) -> Finding:
    probe = existing_part(folder) / f"{PROBE}{secrets.token_hex(4)}"
    try:
        try:
            files.disk.make_dir(probe)
            files.disk.replace(probe / "written", _CONTENT)
        finally:
            files.disk.remove_tree(probe)
    except (CheckpointError, OSError) as error:
        return Finding("problem", "writable", f"{folder}: {error}")
    made = "" if folder.is_dir() else f" (will be created in {probe.parent})"
    return Finding("ok", "writable", f"{folder}{made}")


def check_room(folder: Path) -> Finding:
    """The probe notices a used quota, and a file system without free inodes."""
    status = os.statvfs(existing_part(folder))
    free = status.f_bavail * status.f_frsize
    text = f"{byte_size(free)} free."
    if free >= _LEAST_FREE:
        return Finding("ok", "room", text)
    return Finding("problem", "room", f"{text} Free some space, or choose another folder.")


# Remote folders ----------------------------------------------------------------------------------


def check_remote(location: str | DataFolder) -> Iterator[Finding]:
    folder = get_datafolder(location)
    url = folder.resolve_paths("")
    hub = HubFolder.of(folder)
    if hub is not None and not hub.is_bucket:
        text = "each write is a commit, and the hub allows 128 an hour. Use hf://buckets/"
        yield Finding(
            "warning", "reachable", f"{url} is not tested: {text}OWNER/NAME/FOLDER instead."
        )
        return
    try:
        yield with_timeout(partial(probe_object, folder), url)
    except RemoteFailed as error:
        advice = "" if hub_refusal(error) else " Correct the address, the key or its permissions."
        yield Finding("problem", "reachable", f"{error}{advice}")


def check_hub(plan: RunPlan) -> None:
    """Checks write access on the hub, and makes missing repositories."""
    for runner in plan.runners:
        writer = runner.step.output_writer
        hub = HubFolder.of(writer.output_folder)
        if hub is not None and (runner.step.retry_dead_letters or plan.incomplete()):
            check_access_of(runner, hub)


def check_access_of(runner: RunnerPlan, hub: HubFolder) -> str:
    private = None
    if runner.root is None or not has_commits(runner.root):
        private = getattr(runner.step.output_writer, "private", None)
    return check_access(hub, private, only_look=runner.plan.for_doctor)


def check_environment(plan: RunPlan) -> Iterator[Finding]:
    """Checks a job. For doctor, it also tries folders and endpoints, and reads documents."""
    yield from run_check("pipeline", check_steps, plan)
    yield from run_check("pipeline", plan.check_executor)
    yield from run_check(setting_name("logging_dir"), _check_logging_dir, plan)
    sample: list[Document] = []
    runners = {runner.index: runner for runner in plan.runners}
    for index, step in enumerate(plan.pipeline):
        place = plan.place(index)
        if not plan.for_doctor:
            yield from run_check(f"{place}input", refuse_input, plan, index, step)
        elif isinstance(step, BaseReader):
            yield from run_check(
                f"{place}input", check_input, step, plan, sample, property_name="readable"
            )
        if index not in runners:
            continue
        runner = runners[index]
        yield from run_check(f"{place}input", _check_prompt, runner, sample)
        # Cluster jobs may have more.
        if plan.for_doctor or (plan.is_local and plan.incomplete()):
            for config in runner.step.models.values():
                subject = f"{place}{config.server_name('server')}"
                yield from run_check(subject, _check_server, runner, config)
            if plan.for_doctor and plan.is_local and len(runner.step.models) == 1:
                yield from run_check(f"{place}GPUs", check_layout, runner, sample)
            yield from run_check(f"{place}monitoring", runner.step.monitoring.check_packages)
        for subject, check in (("checkpoints", _check_checkpoints), ("output", _check_output)):
            yield from run_check(f"{place}{subject}", check, runner, property_name="reachable")
        if plan.for_doctor:
            yield from run_check(f"{place}output", _check_writer, runner, sample)
            remote = runner.step.checkpoints_remote_dir
            if remote is not None:
                yield from run_check(f"{place}mirror", check_remote, remote)


def _check_logging_dir(plan: RunPlan) -> Iterator[Finding]:
    if plan.pulls:
        refuse_without_claims(plan)
    if plan.logging_dir.is_local():
        refuse_file("logging_dir", plan.logging_dir.resolve_paths(""))
    if plan.for_doctor:
        yield from check_remote(plan.logging_dir)


def refuse_file(setting: str, folder: str | Path) -> None:
    existing = existing_part(Path(folder).absolute())
    if not existing.is_dir():
        raise ConfigError(
            f"{str(folder)!r} cannot be a folder, because {existing} is a file. Choose another "
            "folder.",
            setting=setting,
        )


def _check_prompt(runner: RunnerPlan, sample: list[Document]) -> Iterator[Finding]:
    if sample and runner.index == 1:  # a later step gets what the steps before it have changed
        # Rollouts may change fields. The copies are shallow: a value may be large, or not copyable.
        copies = (
            replace(document, metadata={**document.metadata}) for document in (sample[0], *sample)
        )
        first, *documents = copies
        check_first(runner.step, first)
        if runner.step.on_document_error == "stop":
            event_loop.run(try_media(runner.step, first))
        prompts = event_loop.run(unsent_prompts(runner.step.rollout_fn, documents))
        yield from check_prompts(prompts, runner.step.model.servers)


def _check_server(runner: RunnerPlan, config: InferenceConfig) -> Iterator[Finding]:
    """Checks packages and the key. For doctor, it also requests the models of endpoints."""
    as_jobs = runner.plan.as_jobs
    is_endpoint = config.server_type == "endpoint"
    is_ready = True
    if is_endpoint or not as_jobs:
        try:
            check_servers(config)
        except (ConfigError, ServerStartFailed) as error:
            is_ready = False
            yield Finding("problem", "ready", str(error), error=ConfigError(error))
        else:
            yield Finding("ok", "ready", "its packages, and its key if it has one, are there.")
    if not runner.plan.for_doctor or (as_jobs and not is_endpoint):
        return
    yield Finding("note", "requests", f"{config.places} (max_concurrent_generations).")
    if config.server_log_folder is not None:
        expand_path("server_log_folder", config.server_log_folder)
    if is_endpoint and is_ready:
        yield from check_endpoints(config)


def _check_checkpoints(runner: RunnerPlan) -> Iterator[Finding]:
    if runner.root is not None:
        refuse_file("checkpoints_local_dir", runner.root)
    plan = runner.plan
    step = runner.step
    if plan.as_jobs or not plan.for_doctor:
        return
    if step.checkpoints_local_dir is None:
        yield Finding("warning", "folder", "none: set checkpoints_local_dir.")
        return
    folder = step.checkpoints_root
    mirrored = step.checkpoints_remote_dir is not None
    check = check_local(folder, not plan.is_local, mirrored)
    yield from with_timeout(lambda: [*check], str(folder))


def _check_output(runner: RunnerPlan) -> Iterator[Finding]:
    output = runner.step.output_writer.output_folder
    if output.is_local():
        refuse_file("output_folder", output.resolve_paths(""))
    if not runner.plan.for_doctor:
        return
    hub = HubFolder.of(output)
    if hub is not None:
        look = partial(check_access_of, runner, hub)
        yield Finding("ok", "reachable", with_timeout(look, hub.url))
    elif not output.is_local():
        yield from check_remote(output)
    else:
        folder = Path(output.resolve_paths("")).absolute()
        check = check_local(folder, not runner.plan.is_local, is_output=True)
        yield from with_timeout(lambda: [*check], str(folder))


def _check_writer(runner: RunnerPlan, sample: list[Document]) -> Iterator[Finding]:
    step = runner.step
    writer = step.output_writer
    name = writer_name(writer)
    document = Document(text="text", id="id")
    if sample:
        document = decode(as_read(sample[0]).data)
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    answer = {"text": "An answer.", "finish_reason": "stop", "usage": usage}
    if step.rollout_results:
        document.metadata[step.metadata_key] = [answer] * step.config.rollouts_per_document
    try:
        WriterTrial(writer, NO_TYPES)(encode(document), document.id)
    except DocumentNotSerializable as error:
        text = (
            f"{name} cannot write a document with a made-up answer: "
            f"{error_text(error.__cause__ or error)}. Correct it, unless real answers differ."
        )
        # datatrove's writers write any document, but an adapter or a schema may expect another
        # answer.
        yield Finding("warning" if name.startswith("datatrove.") else "problem", "writer", text)
    else:
        yield Finding("ok", "writer", f"{name} writes a document with a made-up answer.")


# job checks --------------------------------------------------------------------------------------


def check_endpoints(config: InferenceConfig) -> Iterator[Finding]:
    answers = with_timeout(
        lambda: event_loop.run(ask_endpoints(config)), setting_name("endpoint_url")
    )
    silent: FindingState = "warning"
    if all(answer.cause for answer in answers):
        silent = "problem"
    for answer, endpoint in zip(answers, config.endpoints_by_name.values(), strict=True):
        yield _check_answer(answer, config, str(endpoint.model), silent)


def _check_answer(
    answer: EndpointProbe, config: InferenceConfig, model: str, silent: FindingState
) -> Finding:
    if answer.refused:
        return Finding(silent, "endpoint", f"{answer.url} {answer.cause}.")
    if answer.cause:
        text = f"{answer.url}: {answer.cause}. Start the server, or correct its URL."
        return Finding(silent, "endpoint", text)
    if answer.models is None:
        text = (
            f"{answer.url} answers, but lists no models. Correct its URL, unless it is a gateway "
            "without a list."
        )
        return Finding("warning", "endpoint", text)
    if model in answer.models:
        context = answer.models[model]
        max_tokens = max_tokens_of(config.default_generation_params)
        if isinstance(context, int) and max_tokens >= context:
            text = (
                f"max_tokens is {max_tokens}, and max_model_len of {answer.url} {context}: lower "
                "it."
            )
            return Finding("problem", "endpoint", text)
        return Finding("ok", "endpoint", f"{answer.url} answers, and serves {model}.")
    text = f"{answer.unlisted(model)} Correct the model's name."
    return Finding("problem", "endpoint", text)


# the input --------------------------------------------------------------------------------------


_SAMPLE_DOCUMENTS = 1000
_SAMPLE_SECONDS = 2.0
# Files without documents to read before the input counts as unreadable.
_TRIED_FILES = 3


def check_input(reader: BaseReader, plan: RunPlan, sample: list[Document]) -> Iterator[Finding]:
    """Reads the first documents with a copy of the reader into ``sample``, unless it has some."""
    tasks = plan.tasks
    if plan.waits:
        yield Finding("ok", "readable", "is not read: another executor will create it.")
        return
    if not isinstance(reader, BaseDiskReader):
        yield Finding("ok", "readable", "is not read: only readers of files are tested.")
        return
    location = reader.data_folder.resolve_paths("")
    is_dataset = isinstance(reader, HuggingFaceDatasetReader)
    tried = reader
    if is_dataset:
        tried = reader.preview()
    inputs = with_timeout(partial(list_files, setting_name("data_folder"), tried), location)
    names = list(inputs.names)
    if isinstance(reader, BatchReader) and reader.data_folder.is_local():
        reader.check()
    documents: list[Document] = []
    refused: dict[int, NoDocuments] = {}
    with_timeout(partial(_read_some, tried, len(names), documents, refused), location)
    if not is_dataset:
        for first in range(min(len(names), tasks)):
            if refused.keys() >= set(range(first, len(names), tasks)):
                raise refused[first]
        if refused and not documents:
            raise next(iter(refused.values()))
    if not documents:
        if not any(map(inputs.size, range(min(len(names), _TRIED_FILES)))):
            yield Finding("warning", "readable", f"{location}: the first files are empty.")
            return
        advice = "Check the path of the input, its pattern, and text_key."
        # File systems and decompressors raise anything; the check reports what it knows.
        with suppress(Exception):
            text = explain(tried, names[0])  # of datatrove's own readers; ours do it themselves
            advice = f"{names[0]!r}: {text}" if text else advice
        text = f"{location} holds no documents for this reader. {advice}"
        yield Finding("problem", "readable", text)
        return
    if not sample:
        sample += documents
    text = f"{location}: the first {plural(len(documents), 'document')} read."
    yield Finding("ok", "readable", text)
    if refused:
        examples = ", ".join(repr(names[index]) for index in list(refused)[:_TRIED_FILES])
        text = (
            f"{plural(len(refused), 'file')} will give no document: {examples}. Correct or move "
            "what is no input."
        )
        yield Finding("warning", "files", text)
    state: FindingState = "ok"
    text = f"{plural(len(names), 'file')} for {plural(tasks, 'task')}."
    if is_dataset and reader.shares_rows(len(names)):
        text = f"each of {plural(tasks, 'task')} gets an equal part of the rows."
    elif len(names) < tasks:  # datatrove deals out whole files
        state = "warning"
        text = (
            f"{tasks - len(names)} of {tasks} tasks have no input: {text} Set tasks to "
            f"{len(names)}, or split the input into {tasks} files."
        )
    yield Finding(state, "shares", text)


def refuse_input(plan: RunPlan, index: int, step: object) -> None:
    """Refuses an input folder without files: datatrove only warns, and marks the empty ranks
    complete.

    Lists local folders, and others only before paid jobs. A retry does not need its input.

    Raises:
        InputError, OSError: the tasks run here, and their input cannot be reached.
    """
    folder = getattr(step, "data_folder", None)
    if plan.waits or plan.retries or folder is None or getattr(step, "paths_file", None):
        return
    place = f"{step_place(index, step)}: {setting_name('data_folder')}"
    if not folder.is_local():
        if not plan.incomplete():
            return
        if plan.is_local:
            check_reachable(folder)
        if not plan.as_jobs:
            return
    if hasattr(step, "glob_pattern"):
        plan.listed[step] = list_files(place, step).names
        if isinstance(step, BatchReader) and not any(
            root.exists() for _, root in plan.with_checkpoints
        ):
            step.check()
    elif not folder.isdir(""):
        raise ConfigError(f'{place}: "{folder.path}" is not a folder.')


def list_files(setting: str, reader: BaseDiskReader) -> InputFiles:
    """Lists an input.

    Raises:
        ConfigError: the folder is missing, no file matches, or a package for a compression is
            missing.
        InputError: a file is a pointer of Git LFS.
    """
    folder = reader.data_folder
    location = f'{setting}: "{folder.resolve_paths("")}"'
    if folder.is_local() and not reader.paths_file and not folder.isdir(""):
        raise ConfigError(f"{location} is not a folder.")
    try:
        inputs = list_input(reader)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{location} is not there, or this account may not see it: {failure_line(error)}"
        ) from error
    if not inputs.names:
        pattern = ""
        if reader.glob_pattern:
            pattern = f' that match "{reader.glob_pattern}"'
        raise ConfigError(f"{location} contains no files{pattern}.")
    if folder.is_local():
        refuse_pointers(inputs)
    for name in inputs.names:
        advice = missing_codec(getattr(reader, "compression", None), name)
        if advice:
            raise ConfigError(f'{location}: "{name}" cannot be read: {advice}')
    return inputs


def _read_some(
    reader: BaseDiskReader, files: int, collected: list[Document], refused: dict[int, NoDocuments]
) -> None:
    """Adds the first documents, and the files without documents to ``refused``.

    Each file is read as a rank, because a reader continues through files in which no line fits its
    ``text_key``.
    """
    deadline = time.monotonic() + _SAMPLE_SECONDS
    for rank in range(files):
        if not collected and (
            len(refused) == _TRIED_FILES or (rank >= _TRIED_FILES and time.monotonic() > deadline)
        ):
            return
        reader_copy = copy.deepcopy(reader)
        InputFolder.give(reader_copy)
        try:
            with closing(reader_copy.run(None, rank=rank, world_size=files)) as documents:
                for document in documents:
                    if collected and (
                        len(collected) == _SAMPLE_DOCUMENTS or time.monotonic() > deadline
                    ):
                        return
                    collected.append(document)
        except NoDocuments as error:
            refused[rank] = error
        if (
            collected and reader_copy.limit >= 0
        ):  # it counts for a task, which has more files than one
            return


# prompts ------------------------------------------------------------------------------------------


_LEAST = 64  # characters: a block of 16 tokens
_LEAST_SHARE = 0.05
# Small GPUs keep nothing that lies 100,000 tokens back.
_KEPT_CHARACTERS = 400_000


def check_prompts(prompts: Sequence[str], servers: int) -> Iterator[Finding]:
    prompts = [text for text in prompts if text]
    number = len(prompts)
    if number < 2:
        return
    size = sum(map(len, prompts)) / number
    least = max(_LEAST, size * _LEAST_SHARE)
    start = _common(prompts)
    rests = [text[start:] for text in prompts]
    end = _common([text[::-1] for text in rests])
    if start >= least:
        text = (
            f"{size:,.0f} characters on average; the first {start:,} ({percent(start / size)}) "
            f"are the same in all {number:,}: a prefix cache computes them once."
        )
        yield Finding("note", "prompts", text)
    if end >= least:
        text = (
            f"the last {end:,} characters of all {number:,} prompts are the same. Before the "
            f"text that differs, a prefix cache would save {percent(end / size)} of each prompt."
        )
        yield Finding("warning", "end of prompts", text)
    # Texts that begin alike, with more between them than the servers keep.
    compared = max(_LEAST, sum(map(len, rests)) // number // 4)
    starts = [text[:compared] for text in rests]
    last: dict[str, int] = {}
    apart = rows = shared = 0
    for row, text in enumerate(rests):
        earlier = last.get(starts[row], row)
        between = slice(earlier + 1, row)
        # Texts that come several times count once.
        sizes = dict(zip(starts[between], map(len, rests[between]), strict=True))
        if sum(sizes.values()) > _KEPT_CHARACTERS * servers:
            apart += 1
            rows += row - earlier
            shared += _common([rests[earlier], text])
        last[starts[row]] = row
    # Few pairs in a sample are many in the input, but single rows may be duplicates.
    if apart > number / 100:
        text = (
            f"{apart:,} of the first {number:,} prompts share {shared // apart:,} characters "
            f"with an earlier prompt, {rows // apart:,} rows before (averages), perhaps too far "
            f"for a prefix cache. {SORTING}"
        )
        yield Finding("warning", "order", text)


def _common(texts: Sequence[str]) -> int:
    return len(os.path.commonprefix(texts))  # noqa: RUF071
