"""Checks the configs of several models in one rollout: ``config={"writer": InferenceConfig(...),
"judge": InferenceConfig(...)}``.

The first model is the rollout's ``generate``, the others are ``generate.judge`` and so on. Each
model has its own servers.
"""

import copy
import keyword
import re
from collections.abc import Mapping
from dataclasses import fields

from datatrove_ckpt.config.inference_config import InferenceConfig
from datatrove_ckpt.errors import ConfigError

_NAME = re.compile("[A-Za-z][A-Za-z0-9_]*")
_GENERATE_NAMES = "classify count_finished embed once score url"
_CODE_FIELDS = "imports output_writer rollout_fn shared_context uses"
_IDENTITY_FIELDS = (
    f"identity_version metadata_key models records_per_chunk rollout_version tasks {_CODE_FIELDS}"
)
_SETTINGS = tuple(field.name for field in fields(InferenceConfig))
# No model may have the name of an attribute of ``generate``, or of a field of a run's identity.
_TAKEN = frozenset({*_GENERATE_NAMES.split(), *_IDENTITY_FIELDS.split(), *_SETTINGS})
_SETTINGS_OF_RANK = ("rollouts_per_document", "metric_interval")


def models_of(
    config: InferenceConfig | Mapping[str, InferenceConfig],
) -> dict[str, InferenceConfig]:
    """Returns the models by name, in their order. A config that is no mapping gets the name "".

    The configs of several models are copies, each with its name and the names of all models.

    Raises:
        ConfigError: a name or a setting is not allowed.
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
    models = {name: _checked(f"config: {name}", model) for name, model in config.items()}
    if len(models) == 1:
        return models
    _refuse_settings_of_rank(models)
    models = {name: copy.copy(model) for name, model in models.items()}
    on_cores = {
        name: model.replicas for name, model in models.items() if model.server_type == "llamacpp"
    }
    for name, model in models.items():
        model.name = name
        model.models = tuple(models)
        model.neighbours = sum(on_cores.values()) - on_cores.get(name, 0)
    return models


def _refuse_settings_of_rank(models: Mapping[str, InferenceConfig]) -> None:
    """Raises ConfigError if a model after the first has a setting of the whole rank."""
    first, *later = models
    for name in later:
        for setting in _SETTINGS_OF_RANK:
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


def _checked(place: str, config: object) -> InferenceConfig:
    if isinstance(config, InferenceConfig):
        return config
    if not hasattr(config, "server_type"):
        raise ConfigError(
            f"{place}: takes an InferenceConfig(...), and not a {type(config).__name__}."
        )
    # A config of datatrove may have more settings.
    settings = {name: value for name, value in vars(config).items() if name in _SETTINGS}
    checked = InferenceConfig(**settings)
    checked.limits_documents = False  # datatrove always sets max_concurrent_documents
    return checked
