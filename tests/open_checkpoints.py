"""A checkpoint that is open, without a runner."""

from types import SimpleNamespace

from datatrove_ckpt.checkpoint.commits import OutputFile
from datatrove_ckpt.checkpoint.identity import RunIdentity
from datatrove_ckpt.checkpoint.journal import FinishedDocument
from datatrove_ckpt.checkpoint.open_checkpoint import CheckpointManager, OpenCheckpoint
from datatrove_ckpt.checkpoint.publish_intents import Placement
from datatrove_ckpt.checkpoint.request_cache import AnswerKey, CachedAnswer


def write_chunk(index, documents):
    return [OutputFile(f"{index}", sum(len(data) for _, data in documents), "")]


def nothing():
    pass


def opened(
    folder,
    write=write_chunk,
    placement=None,
    records_per_chunk=2,
    **changes,
):
    identity = RunIdentity({"records_per_chunk": records_per_chunk, "tasks": 1})
    settings = CheckpointManager(folder, 0, records_per_chunk, identity, **changes)
    output = SimpleNamespace(write_chunk=write, placement=placement or Placement(), stop=nothing)
    with settings.lock() as locked:
        lease = locked.take(nothing)
    return OpenCheckpoint(settings, lease, output)


def answer_and_finish(checkpoint, ordinal, outcome="written"):
    """The document has one answer, and is looked up first."""
    slot = checkpoint.admit(f"input {ordinal}")
    if slot is not None:
        checkpoint.lookup(slot)
        checkpoint.put_answer(
            slot, f"id {ordinal}", AnswerKey(0, "f" * 32, 0), CachedAnswer(b"{}", None)
        )
        checkpoint.finish(slot, FinishedDocument(slot.ordinal, outcome, f"input {ordinal}", b"{}"))
