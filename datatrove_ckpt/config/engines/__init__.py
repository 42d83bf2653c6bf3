"""The engines: the values of ``server_type``.

Each engine with a package is one file, and each has one row here. The others are the user's script,
canned answers, and servers that run already. The short form takes the first installed engine that
leases GPUs.
"""

import sys
from pathlib import Path

from datatrove_ckpt.config.engines.llamacpp import Llamacpp
from datatrove_ckpt.config.engines.sglang import SGLang
from datatrove_ckpt.config.engines.vllm import Vllm
from datatrove_ckpt.config.inference_config import (
    ENGINES,
    Engine,
    EngineCommand,
    EngineLaunch,
    InferenceConfig,
)
from datatrove_ckpt.errors import ConfigError


class AnyProgram(Engine):
    is_known = False
    health_path = "v1/models"  # which each server must have; /health may be missing


class Custom(AnyProgram):
    """The user's own script, started as datatrove starts it: ``python SCRIPT --port N`` and the
    other model_kwargs.

    Names of flags keep their underscores. The key is in DATATROVE_CKPT_API_KEY; the script need not
    check it.
    """

    name = "custom"
    takes_interpreter = True

    def check(self, config: InferenceConfig) -> None:
        super().check(config)
        if "server_script" not in (config.model_kwargs or {}):
            raise ConfigError('model_kwargs: needs "server_script" when server_type is "custom".')

    def find(self, config: InferenceConfig) -> str | None:
        script = str((config.model_kwargs or {})["server_script"])
        if not Path(script).is_file():
            raise ConfigError(
                f"model_kwargs: server_script {script!r} is not a file (seen from {Path.cwd()})."
            )
        return script

    def command(self, launch: EngineLaunch) -> EngineCommand:
        user_flags = dict(launch.config.model_kwargs or {})
        del user_flags["server_script"]
        start = (launch.python, str(launch.program))
        return launch.command(start, {"port": launch.port}, user_flags)


class Dummy(Engine):
    """The server of canned answers, ``inference/servers/dummy.py``.

    The flags of a script's true engine are ignored.
    """

    name = "dummy"
    is_canned = True

    def check(self, config: InferenceConfig) -> None:
        pass

    def gpus_per_server(self, config: InferenceConfig) -> int:
        return 0

    def command(self, launch: EngineLaunch) -> EngineCommand:
        start = (sys.executable, "-m", "datatrove_ckpt.inference.servers.dummy")
        flags = {name: value for name, value in launch.flags.items() if name == "latency-ms"}
        return launch.command(start, {"port": launch.port}, flags)


class Endpoint(AnyProgram):
    """Servers that run already, which any program may be.

    ``inference/servers/host.py`` waits for them.
    """

    name = "endpoint"

    def check(self, config: InferenceConfig) -> None:
        if not (config.endpoint_url or config.endpoints):
            raise ConfigError('must be set when server_type is "endpoint".', setting="endpoint_url")
        if config.replicas > 1:
            raise ConfigError(
                "replicas: launches servers; for several endpoints give their URLs as a list."
            )


ENGINES |= {
    engine.name: engine for engine in (Llamacpp(), Vllm(), SGLang(), Endpoint(), Dummy(), Custom())
}
