"""What a rollout is, and ready-made rollouts for YAML files.

The class of a ready-made rollout and its ``vars`` are part of the run's identity: another prompt is
another run. So its attributes are plain values; each process parses a template, a schema or a
tokenizer once. What a rollout takes from the model's files is an attribute, too
(``ReadyMade.for_config``).

The names below are of this module, whatever file they are in: pickles and identities hold them.
"""

from datatrove_ckpt.rollouts.answers import InvalidAnswer
from datatrove_ckpt.rollouts.batch import BatchRollout, batch_line
from datatrove_ckpt.rollouts.chunked import ChunkedRollout, split_text
from datatrove_ckpt.rollouts.embed import ClassifyRollout, EmbedRollout
from datatrove_ckpt.rollouts.interface import (
    Classification,
    Document,
    Generate,
    InferenceResult,
    Payload,
    Rollout,
    chat,
)
from datatrove_ckpt.rollouts.judge import JudgeRollout
from datatrove_ckpt.rollouts.media import InvalidMedia, media_part
from datatrove_ckpt.rollouts.prompt import CompletionRollout, PromptRollout, for_config
from datatrove_ckpt.rollouts.settings import ReadyMade

__all__ = [
    "BatchRollout",
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
    # Not Payload and Rollout, which are aliases.
    if getattr(_named, "__module__", "").startswith(__name__):
        _named.__module__ = __name__
