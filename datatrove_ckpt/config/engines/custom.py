"""The user's own script, started as datatrove starts it: ``python SCRIPT --port N`` and the other model_kwargs."""

from __future__ import annotations

from pathlib import Path

from datatrove_ckpt.config.engines.base import Engine, EngineCommand, Launch, Settings, flag
from datatrove_ckpt.errors import ConfigError


class Custom(Engine):
    """Names of flags keep their underscores, because the user wrote the script's parser.

    The key is in the environment variable DATATROVE_CKPT_API_KEY, and is sent as a bearer token. The script need not
    check it.
    """

    name = "custom"
    takes_interpreter = True
    is_known = False
    has_gpus = True

    def check(self, config: Settings) -> None:
        if "server_script" not in (config.model_kwargs or {}):
            raise ConfigError('model_kwargs: needs "server_script" when server_type is "custom".')

    def find(self, config: Settings) -> str | None:
        """The script."""
        script = str((config.model_kwargs or {})["server_script"])
        if not Path(script).is_file():
            raise ConfigError(f"model_kwargs: server_script {script!r} is not a file (seen from {Path.cwd()}).")
        return script

    def command(self, launch: Launch) -> EngineCommand:
        given = {name: value for name, value in launch.kwargs.items() if name != "server_script"}
        flags = [part for name, value in given.items() for part in flag(name, value, joined=True)]
        start = (launch.python, str(launch.found), "--port", str(launch.port))
        return EngineCommand((*start, *flags), launch.key_variable)
