"""Fits a rollout to the config of its run."""

from __future__ import annotations

from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.rollouts.interface import Rollout, chat
from datatrove_ckpt.rollouts.prompt import CompletionRollout
from datatrove_ckpt.rollouts.settings import ReadyMade


def for_config(rollout_fn: Rollout, config: InferenceConfig) -> Rollout:
    """The rollout as a run with this config calls it. One that is not of this package is returned as it is.

    Raises:
        ConfigError: its payloads are for the other kind of request, so every request would be rejected; or see
            ``ReadyMade.for_config``.
    """
    if config.use_chat and isinstance(rollout_fn, CompletionRollout):
        raise ConfigError("use_chat: CompletionRollout sends plain completions; set use_chat to false.")
    is_chat = rollout_fn is chat or (
        isinstance(rollout_fn, ReadyMade) and not isinstance(rollout_fn, CompletionRollout)
    )
    if not config.use_chat and is_chat:
        name = getattr(rollout_fn, "__name__", type(rollout_fn).__name__)
        raise ConfigError(f"use_chat: {name} sends chat messages; set use_chat to true, or use CompletionRollout.")
    return rollout_fn.for_config(config) if isinstance(rollout_fn, ReadyMade) else rollout_fn
