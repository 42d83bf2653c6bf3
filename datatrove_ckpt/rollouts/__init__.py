"""The types of rollouts, and ready-made rollouts for YAML files.

A ready-made rollout's class and ``vars`` are part of the run's identity. So its attributes are
plain values, also those from the model's files (``ReadyMade.for_config``); each process parses a
template, a schema or a tokenizer once.

The names below belong to this module, because pickles and identities hold them.
"""

from datatrove_ckpt.rollouts.batch_rollout import BatchRollout, batch_line
from datatrove_ckpt.rollouts.chunked import ChunkedRollout, split_text
from datatrove_ckpt.rollouts.embed import ClassifyRollout, EmbedRollout
from datatrove_ckpt.rollouts.interface import (
    CallFailed,
    Classification,
    Document,
    Generate,
    InferenceResult,
    Payload,
    Rollout,
    chat,
)
from datatrove_ckpt.rollouts.media import InvalidMedia, media_part
from datatrove_ckpt.rollouts.prompt import (
    CompletionRollout,
    JudgeRollout,
    PromptRollout,
    for_config,
)
from datatrove_ckpt.rollouts.settings import InvalidAnswer, ReadyMade

__all__ = [
    "BatchRollout",
    "CallFailed",
    "ChunkedRollout",
    "Classification",
    "ClassifyRollout",
    "CompletionRollout",
    "Document",
    "EmbedRollout",
    "Generate",
    "InferenceResult",
    "InvalidAnswer",
    "InvalidMedia",
    "JudgeRollout",
    "Payload",
    "PromptRollout",
    "ReadyMade",
    "Rollout",
    "batch_line",
    "chat",
    "for_config",
    "media_part",
    "split_text",
]

for _named in [globals()[name] for name in __all__]:
    # The aliases Payload and Rollout are excluded.
    if getattr(_named, "__module__", "").startswith(__name__):
        _named.__module__ = __name__
