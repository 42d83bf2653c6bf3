"""Several models in one rollout: ``config={"writer": InferenceConfig(...), "judge":
InferenceConfig(...)}``.

The first is the rollout's ``generate``, the others are ``generate.judge`` and so on, each with its
own servers.
"""

import copy
import keyword
import re
from collections.abc import Mapping
from dataclasses import fields

from datatrove_ckpt.config.inference_config import InferenceConfig
from datatrove_ckpt.errors import ConfigError

_NAME = re.compile("[A-Za-z][A-Za-z0-9_]*")
# Taken by ``generate``, or by fields of a run's identity.
_OF_GENERATE = "classify count_finished embed once score url"
_OF_CODE = "imports output_writer rollout_fn shared_context uses"
_OF_IDENTITY = (
    f"identity_version metadata_key models records_per_chunk rollout_version tasks {_OF_CODE}"
)
_TAKEN = frozenset(
    {*_OF_GENERATE.split(), *_OF_IDENTITY.split(), *(one.name for one in fields(InferenceConfig))}
)
_OF_THE_RANK = ("rollouts_per_document", "metric_interval")


def models_of(
    config: InferenceConfig | Mapping[str, InferenceConfig],
) -> dict[str, InferenceConfig]:
    """Returns the models by their names, in their order; a single one may have the name "". Several
    are copies, which know their names.

    Raises:
        ConfigError: a name or a setting cannot be one.
    """
    if not isinstance(config, Mapping):
        return {"": _checked("config", config)}
    if not config:
        raise ConfigError(
            'config: is empty. Name each model: {"writer": InferenceConfig(...), ...}.'
        )
    for name in config:
        if not _NAME.fullmatch(str(name)) or keyword.iskeyword(str(name)) or name in _TAKEN:
            raise ConfigError(
                f"config: {name!r} cannot be the name of a model: generate.{name} must be Python, "
                "and mean nothing else. Take letters, digits and _, such as judge."
            )
    models = {name: _checked(f"config: {name}", one) for name, one in config.items()}
    if len(models) == 1:
        return models
    first, *others = models
    for name in others:
        for setting in _OF_THE_RANK:
            default = InferenceConfig.__dataclass_fields__[setting].default
            if getattr(models[name], setting) not in (default, getattr(models[first], setting)):
                raise ConfigError(
                    f"config: {name}: {setting}: is set for the first model only, {first}."
                )
        if models[name].limits_documents:
            raise ConfigError(
                f"config: {name}: max_concurrent_documents: is set for the first model only, "
                f"{first}."
            )
    models = {name: copy.copy(one) for name, one in models.items()}
    on_cores = {name: one.replicas for name, one in models.items() if one.server_type == "llamacpp"}
    for name, one in models.items():
        one.name = name
        one.models = tuple(models)
        one.neighbours = sum(on_cores.values()) - on_cores.get(name, 0)
    return models


def _checked(place: str, config: object) -> InferenceConfig:
    if isinstance(config, InferenceConfig):
        return config
    if not hasattr(config, "server_type"):
        raise ConfigError(
            f"{place}: takes an InferenceConfig(...), and not a {type(config).__name__}."
        )
    known = {field.name for field in fields(InferenceConfig)}  # datatrove's may have more
    given = {name: value for name, value in vars(config).items() if name in known}
    made = InferenceConfig(**given)
    made.limits_documents = False  # datatrove fills it in
    return made
