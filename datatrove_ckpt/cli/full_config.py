"""The long form of a job as ``--dry-run`` and ``--print-config`` print it, without secrets."""

from datatrove_ckpt.cli.yaml_config import MASK, import_name, leaves
from datatrove_ckpt.cli.yaml_text import dump
from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.common.redaction import is_secret
from datatrove_ckpt.common.setting_types import parameters_of


class FullConfig:
    """The configuration of a job as YAML that can be run again, with secrets masked.

    Args:
        config: the content of the file with overrides applied, which ``build`` has accepted.
    """

    def __init__(self, config: JsonObject) -> None:
        self._secrets: list[str] = []
        self._config = {**config, "executor": self._masked("", config["executor"])}

    def text(self) -> str:
        return (
            "# The long form of the run. It can be run as it stands, but for what is "
            f"hidden.\n{dump(self._config)}"
        )

    def redact(self, text: str) -> str:
        for secret in sorted(self._secrets, key=len, reverse=True):
            text = text.replace(secret, MASK)
        return text

    def _masked(self, name: str, value: object) -> object:
        if value and isinstance(value, str | list | dict) and is_secret(name, value):
            self._secrets += [
                text for _, text in leaves(value, "") if text and isinstance(text, str)
            ]
            return MASK
        if isinstance(value, list):
            return [self._masked(name, part) for part in value]
        if not isinstance(value, dict):
            return value
        if "class_path" not in value:
            return {key: self._masked(f"{name}.{key}", part) for key, part in value.items()}
        cls = import_name(value["class_path"], "class_path")
        arguments = {}
        declared = {
            name
            for base in cls.__mro__
            if base.__module__.partition(".")[0] in ("datatrove", "datatrove_ckpt")
            for name in parameters_of(base)[0]
        }
        for key, part in (value.get("init_args") or {}).items():
            secret_name = key
            if key in declared:  # such as ``text_key``, which is no secret by its name
                secret_name = ""
            arguments[key] = self._masked(secret_name, part)
        return {"class_path": value["class_path"], "init_args": arguments}
