"""The configuration of a job as YAML that can be run again, with secrets masked."""

from __future__ import annotations

from datatrove_ckpt.cli.yaml_config import MASK, dump, import_name, leaves
from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.common.declared import parameters_of
from datatrove_ckpt.common.redaction import is_secret


class FullConfig:
    """The configuration of a job, with secrets masked.

    Args:
        content: what the file says, with overrides applied. ``build`` must have accepted it.
    """

    def __init__(self, content: JsonObject) -> None:
        self._secrets: list[str] = []
        self._content = {**content, "executor": self._masked("", content["executor"])}

    def text(self) -> str:
        """Returns the configuration as YAML."""
        return (
            "# The long form of the job. It can be run as it stands, but for what is "
            f"hidden.\n{dump(self._content)}"
        )

    def redact(self, text: str) -> str:
        for secret in sorted(self._secrets, key=len, reverse=True):
            text = text.replace(secret, MASK)
        return text

    def _masked(self, name: str | None, value: object) -> object:
        """Masks the secrets of a value. ``name`` is None where names tell nothing about them."""
        if value and isinstance(value, str | list | dict) and is_secret(name or "", value):
            self._secrets += [
                text for _, text in leaves(value, "") if text and isinstance(text, str)
            ]
            return MASK
        if isinstance(value, list):
            return [self._masked(name, part) for part in value]
        if not isinstance(value, dict):
            return value
        if "class_path" in value:
            harmless = _own_arguments(value["class_path"])
            given = value.get("init_args") or {}
            names = {key: "" if key in harmless else key for key in given}
        else:
            given = value
            names = {key: None if name is None else f"{name}.{key}" for key in given}
        # InferenceConfig has refused secrets in it, and "</s>" is a token.
        if "model_kwargs" in given:
            names["model_kwargs"] = None
        masked = {key: self._masked(names[key], part) for key, part in given.items()}
        if given is not value:
            return {"class_path": value["class_path"], "init_args": masked}
        return masked


def _own_arguments(class_path: str) -> set[str]:
    """Returns the arguments of datatrove's or our class: ``text_key`` is no secret by its name."""
    bases = import_name(class_path, "class_path").__mro__
    known = [
        cls for cls in bases if cls.__module__.partition(".")[0] in ("datatrove", "datatrove_ckpt")
    ]
    return {name for cls in known for name in parameters_of(cls)[0]}
