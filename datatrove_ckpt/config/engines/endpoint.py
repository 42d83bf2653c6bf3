"""Servers that run already, which any program may be. ``inference/servers/connect.py`` waits for them."""

from __future__ import annotations

from datatrove_ckpt.config.engines.base import Engine, Settings
from datatrove_ckpt.errors import ConfigError


class Endpoint(Engine):
    name = "endpoint"
    is_known = False

    def check(self, config: Settings) -> None:
        if not config.endpoint_urls:
            raise ConfigError('endpoint_url: must be set when server_type is "endpoint".')
        if config.replicas > 1:
            raise ConfigError("replicas: launches servers; for several endpoints set endpoint_url to a list.")
