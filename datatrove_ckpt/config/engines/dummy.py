"""The server of canned answers, ``inference/servers/dummy.py``, which binds to 127.0.0.1 only."""

from __future__ import annotations

import sys

from datatrove_ckpt.config.engines.base import Engine, EngineCommand, FormFields, FormValue, Launch, arguments, dashed

_FLAGS = ("latency-ms",)


class Dummy(Engine):
    """A script is tried out with it as it is, so the flags of its true engine are ignored."""

    name = "dummy"
    is_canned = True

    def command(self, launch: Launch) -> EngineCommand:
        start = (sys.executable, "-m", "datatrove_ckpt.inference.servers.dummy")
        given = {dashed(name): value for name, value in (launch.config.model_kwargs or {}).items()}
        flags = {name: given[name] for name in _FLAGS if name in given}
        return EngineCommand((*start, *arguments({"port": launch.port}, flags)), launch.key_variable)

    def form_fields(self, kind: str, value: FormValue) -> FormFields | str:
        return {}
