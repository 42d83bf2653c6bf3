"""What all readers that seek have in common: which files, from where, how far, and a position on each document.

A format says how it reads one file from a place in it (``_read``), and which files it can go on with although they have
grown. Everything here is datatrove's ``BaseDiskReader.run`` otherwise: same files, same order, same ``limit`` and
``skip``, same stats.

On the step itself there is only plain data: datatrove copies and pickles it. And one step may run several ranks, so a
run takes what ``load_state_dict`` left and forgets where the run before it ended.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

from datatrove.data import Document, DocumentsPipeline, Media
from datatrove.io import DataFolderLike, get_shard_from_paths_file
from datatrove.pipeline.readers.base import BaseDiskReader
from loguru import logger
from tqdm import tqdm
from xxhash import xxh3_64_intdigest

from datatrove_ckpt.errors import CheckpointMismatch, ConfigError
from datatrove_ckpt.readers.inputs import REMEDY, Digest, Inputs, fingerprint, short
from datatrove_ckpt.readers.positions import FileOfRun, Position, PositionedDocument, Start, State, begin
from datatrove_ckpt.redaction import check_no_secrets, check_options

_VERSION = 1

At = tuple[int, ...]
"""A place in a file, right after a document. Its meaning is the format's."""

Read = tuple[Document, At]

Share = tuple[int, int]
"""(index, of): of a file's lines or rows, every ``of``-th from ``index`` on."""

ALL: Share = (0, 1)


@runtime_checkable
class Stateful(Protocol):
    """What can say where it stands, and go on from there. As in torchdata."""

    def state_dict(self) -> State: ...

    def load_state_dict(self, state_dict: State) -> None: ...


class SeekingReader(BaseDiskReader):  # type: ignore[misc, unused-ignore]
    """Base of the readers that seek. A subclass comes before datatrove's reader of its format in the bases."""

    shuffle_seed: int | None
    _format: ClassVar[str]
    _order_options: ClassVar[tuple[str, ...]] = ("shuffle_seed", "skip", "glob_pattern", "recursive")
    """What decides, beside the files, which documents come before a position. Kept in a state if not None."""

    _empty_warning: bool
    _next_state: State | None = None  # for the next run
    _start_state: State | None = None  # of this run
    _position: Position | None = None  # of this run's last document
    _resolved: tuple[str, str] = ("", "")

    def __init__(self, data_folder: DataFolderLike, *arguments: Any, **options: Any) -> None:
        super().__init__(data_folder, *arguments, **options)
        check_no_secrets(self.data_folder, "data_folder")
        if isinstance(self.paths_file, tuple):
            check_options(self.paths_file[1], self.paths_file[0], "paths_file")

    def _set_shuffle(self, shuffle_files: bool, shuffle_seed: int | None) -> None:
        if shuffle_files:
            raise ConfigError(
                "shuffle_files=True is another order on every start, so nothing can go on where it was. Use "
                "shuffle_seed=<any integer> instead."
            )
        if shuffle_seed is not None and (isinstance(shuffle_seed, bool) or not isinstance(shuffle_seed, int)):
            raise ConfigError(f"shuffle_seed must be an integer or None, not {shuffle_seed!r}.")
        self.shuffle_seed = shuffle_seed

    # Stateful ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> State:
        """Where the reader stands: right after the last document it yielded. Plain JSON, below 1 kB."""
        if self._next_state is not None:
            return self._next_state
        if self._position is not None:
            return self._position[2].state(self._position)
        return self._start_state or self._identity(0)

    def load_state_dict(self, state_dict: State) -> None:
        """The next run goes on there. It checks that the input is a continuation of what was read."""
        self._next_state = state_dict

    # PipelineStep --------------------------------------------------------------------------------------------------

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Yields what comes from before this step, and then this rank's documents.

        Raises:
            CheckpointMismatch: the input is not a continuation of the one that the state was made for.
        """
        if data:
            yield from data
        start = begin(self._take_state())
        self._log_limit_scope(rank, world_size)
        inputs = self._inputs(rank, world_size, fresh=start.state is None)
        if not inputs.names:
            logger.warning(f"No files found on {self.data_folder.path} for {rank=}")
        if start.done is not None:
            self._stand_aside(inputs, start)
        else:
            yield from self._documents(inputs, start, [rank, world_size], ALL)

    def share(self, index: int, of: int) -> Iterator[Document]:
        """The ``index``-th of ``of`` shares of everything: by file, or by row where there are fewer files than shares.

        Goes on where ``load_state_dict`` said, which counts from this call on, not from the first document.
        """
        state = self._take_state()
        inputs = self._inputs(0, 1, fresh=state is None)
        if len(inputs.names) >= of:
            inputs = Inputs(self.data_folder, inputs.names[index::of])
            return self._documents(inputs, Start(state=state), [index, of], ALL)
        return self._documents(inputs, Start(state=state), [index, of, "rows"], (index, of))

    def get_document_from_dict(self, data: dict[str, Any], source_file: str, id_in_file: int | str) -> Document | None:
        """What datatrove's method of this name does, with a place for the position."""
        fields = self.adapter(data, source_file, id_in_file)
        if not fields.get("text"):
            self._warn_of_empty_text(data)
            return None
        if fields.get("media"):
            fields["media"] = [Media(**media) for media in fields["media"]]
        document = PositionedDocument(**fields)
        if self.default_metadata:
            document.metadata = self.default_metadata | document.metadata
        if self.add_file_path:
            if self._resolved[0] != source_file:  # once per file: it takes longer than all else here
                self._resolved = (source_file, self.data_folder.resolve_paths(source_file))
            document.metadata.setdefault("file_path", self._resolved[1])
        return document

    def _warn_of_empty_text(self, data: dict[str, Any]) -> None:
        if not self._empty_warning:
            self._empty_warning = True
            logger.warning(
                f"Found document without text, skipping. Is your `text_key` ({self.text_key!r}) correct? "
                f"Available keys: {list(data)}"
            )

    # One run -------------------------------------------------------------------------------------------------------

    def _take_state(self) -> State | None:
        self._position = None
        self._start_state, self._next_state = self._next_state, None
        return self._start_state

    def _inputs(self, rank: int, world_size: int, fresh: bool) -> Inputs:
        if self.paths_file:
            names = list(get_shard_from_paths_file(self.paths_file, rank, world_size))
        else:
            if not fresh:
                self.data_folder.invalidate_cache()  # what changed since the listing this process may remember
            names = self.data_folder.get_shard(
                rank, world_size, recursive=self.recursive, glob_pattern=self.glob_pattern
            )
            if names is None:
                raise RuntimeError(f"No files found on {self.data_folder.path}!")
        if self.shuffle_seed is not None:
            names = _shuffled_names(names, self.shuffle_seed)
        return Inputs(self.data_folder, names)

    def _documents(self, inputs: Inputs, start: Start, shard: list[Any], share: Share) -> Iterator[Document]:
        state = self._checked(inputs, start.state, shard)
        self._start_state = start.state
        digest = inputs.resume(state) if state else Digest()
        at: At = ()
        if state:
            at = tuple(state["at"])
            self._check_current(inputs, digest.files, state["file"], at)
        documents, skipped = (state["documents"], self.skip) if state else (0, 0)
        with self._progress(len(inputs.names)) as (documents_bar, files_bar):
            for index in range(digest.files, len(inputs.names)):
                if self.limit != -1 and documents >= self.limit:
                    break
                name, size = inputs.names[index], inputs.size(index)
                self.stat_update("input_files")
                logger.info(f"Reading input file {name}, {index + 1}/{len(inputs.names)}")
                file = FileOfRun(self._identity(start.number, shard, start.earlier, digest, inputs, index))
                before = documents
                for document, after in self._read(name, size, at, share):
                    if skipped < self.skip:
                        skipped += 1
                        continue
                    documents += 1
                    document.position = self._position = (start.number, documents, file, after)
                    self.update_doc_stats(document)
                    yield document
                    documents_bar.update()
                    if documents == self.limit:
                        break
                files_bar.update()
                self.stat_update("documents", value=documents - before, unit="input_file")
                digest.add(name, size)
                at = ()
        start.earlier.append(str(digest))

    def _progress(self, files: int) -> _Bars:
        return _Bars(
            tqdm(
                total=self.limit if self.limit != -1 else None,
                desc="Document progress",
                unit="doc",
                disable=not self.doc_progress,
            ),
            tqdm(total=files, desc="File progress", unit="file", disable=not self.file_progress),
        )

    # States --------------------------------------------------------------------------------------------------------

    def _identity(
        self,
        number: int,
        shard: Sequence[Any] = (),
        earlier: Sequence[str] = (),
        digest: Digest | None = None,
        inputs: Inputs | None = None,
        index: int = 0,
    ) -> State:
        state: State = {"version": _VERSION, "reader": self._format, "number": number, "options": self._options()}
        if digest is None or inputs is None:
            return state
        name, size = inputs.names[index], inputs.size(index)
        current = {
            "name": short(name),
            "size": size,
            "hash": fingerprint(self.data_folder, name, size, whole=not self._may_grow(name)),
        }
        return state | {"shard": list(shard), "earlier": list(earlier), "before": digest.state(), "file": current}

    def _options(self) -> State:
        options = {key: getattr(self, key) for key in self._order_options}
        return {
            key: short(value) if isinstance(value, str) else value
            for key, value in options.items()
            if value is not None
        }

    def _checked(self, inputs: Inputs, state: State | None, shard: list[Any]) -> State | None:
        """The state, once it is known to be one of this reader; None if it is one of a reader that had not begun."""
        if state is None:
            return None
        where = f"The position that was saved for {self.data_folder.path}"
        made_by = (state.get("reader"), state.get("version"))
        if made_by != (self._format, _VERSION):
            raise CheckpointMismatch(
                f"{where} is one of reader {made_by[0]!r} (version {made_by[1]}), and this is {self._format!r} "
                f"(version {_VERSION}). {REMEDY}"
            )
        then = state["options"] | ({"shard": state["shard"]} if "shard" in state else {})
        now = self._options() | ({"shard": shard} if "shard" in state else {})
        for key in then | now:
            if then.get(key) != now.get(key):
                raise CheckpointMismatch(f"{where} is one with {key}={then.get(key)!r}, now {now.get(key)!r}. {REMEDY}")
        return state if "file" in state else None

    def _check_current(self, inputs: Inputs, index: int, then: State, at: At) -> None:
        name = inputs.names[index]
        size, may_grow = inputs.size_as_before(index), self._may_grow(name)
        if size < then["size"] or (size > then["size"] and not may_grow):
            raise CheckpointMismatch(f"The input file {name!r} had {then['size']} bytes, and has {size}. {REMEDY}")
        if fingerprint(self.data_folder, name, then["size"], whole=not may_grow) != then["hash"]:
            raise CheckpointMismatch(f"The content of the input file {name!r} has changed. {REMEDY}")
        if may_grow:
            self._check_grown(name, size, at)

    def _stand_aside(self, inputs: Inputs, start: Start) -> None:
        """Yields nothing, because a later reader has begun; but only if what this one read is still the same."""
        done = start.done or ""
        count = int(done.partition(":")[0] or 0)
        if count > len(inputs.names) or str(inputs.digest(count)) != done:
            raise CheckpointMismatch(
                f"One of the first {count} input files of {self.data_folder.path}, which were read before, is gone, "
                f"new, renamed or resized. {REMEDY}"
            )
        start.earlier.append(done)

    # Formats -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def _read(self, name: str, size: int, at: At, share: Share) -> Iterator[Read]:
        """The documents of one file after ``at`` (empty: from its beginning), each with the place right after it."""

    def _may_grow(self, name: str) -> bool:
        """Whether a longer file may be a continuation of the same."""
        return False

    def _check_grown(self, name: str, size: int, at: At) -> None:
        """Refuses a file whose bytes before ``at`` are not those that were read."""


class _Bars:
    def __init__(self, *bars: Any) -> None:
        self._bars = bars

    def __enter__(self) -> tuple[Any, ...]:
        return self._bars

    def __exit__(self, *_: object) -> None:
        for bar in self._bars:
            bar.close()


def permutation(count: int, seed: int, *key: object) -> list[int]:
    """The numbers below ``count``, in an order that depends on the arguments alone: no version of Python changes it."""
    salt = xxh3_64_intdigest("/".join(map(str, (seed, *key))).encode())
    return sorted(range(count), key=lambda number: xxh3_64_intdigest(number.to_bytes(8, "little"), salt))


def _shuffled_names(names: Iterable[str], seed: int) -> list[str]:
    return sorted(names, key=lambda name: (xxh3_64_intdigest(f"{seed}/{name}".encode()), name))
