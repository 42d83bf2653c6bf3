"""The settings of endpoints (servers that run already), with their providers' limits and prices."""

import re
from dataclasses import dataclass
from urllib.parse import parse_qsl

from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.common.setting_types import Count, Positive, Price, check, check_value, one_of
from datatrove_ckpt.errors import ConfigError

_PRICES = ("prompt", "cached", "cache_write", "completion")
_LOWEST = 0.001  # of a million tokens
_VARIABLE = re.compile("[A-Za-z_][A-Za-z0-9_]*")
_ENDPOINT = re.compile(r"(https?://|\$\{\w+\})[^\s@]*")
_FROM_ENVIRONMENT = re.compile(r"(\$\{\w+\})+")


@dataclass(frozen=True)
class EndpointConfig:
    """One of several endpoints.

    Attributes:
        url: base URL. Without a path it gets /v1. ``${NAME}`` is an environment variable.
        api_key_env: the environment variable with the endpoint's key.
        model: the name of the run's model there. None: ``model_name_or_path``.
        requests_per_minute: the provider's limit, for each process of the run.
        tokens_per_minute: the same for prompt and completion tokens together.
        prices: prices, in the form of ``InferenceConfig.prices``. None: the config's prices.
        weight: share of the requests, in relation to the other endpoints. None: the endpoint gets
            the requests for which those before it in the list have no room.

    Raises:
        ConfigError: a value that cannot work.
    """

    url: str
    api_key_env: str | None = None
    model: str | None = None
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    prices: JsonObject | None = None
    weight: Positive | None = None

    def __post_init__(self) -> None:
        check(EndpointConfig, vars(self))
        check_url(self.url, "url")
        check_variable(self.api_key_env)


def check_variable(name: str | None) -> None:
    if name is not None and not _VARIABLE.fullmatch(str(name)):
        raise ConfigError("api_key_env: takes the name of an environment variable, not the key.")


def check_url(url: str, setting: str) -> None:
    """Raises ConfigError if the URL cannot be used, or has a secret that files would show."""
    # A variable is checked where the task runs.
    if not _ENDPOINT.fullmatch(url):
        raise ConfigError(
            "must start with http:// or https://, or ${NAME} that does, and have no space, user "
            "or password; for a key use api_key_env.",
            setting=setting,
        )
    # In a part without "=", the name may be the secret.
    unhidden = [
        f" of {name!r}" if value else ""
        for name, value in parse_qsl(url.partition("?")[2], keep_blank_values=True)
        if name != "api-version" and not _FROM_ENVIRONMENT.fullmatch(value)
    ]
    if unhidden:
        raise ConfigError(
            f"the value{unhidden[0]} in its query would reach files. Export it, and write "
            "${VARIABLE} in its place.",
            setting=setting,
        )


def check_prices(prices: JsonObject | None) -> None:
    """Raises ConfigError: the prices are wrong."""
    check_value("prices", JsonObject | None, prices)
    of_tokens = dict(prices or {})
    tiers = of_tokens.pop("tiers", {})
    check_value("prices.tiers", JsonObject, tiers)
    for name in of_tokens:
        check_value("prices", one_of(_PRICES), name)
    for name, number in (of_tokens | tiers).items():
        check_value(f"prices.{name}", Price, number)
    for name, number in of_tokens.items():
        if 0 < number < _LOWEST:
            raise ConfigError(
                f"prices.{name}: {number:g} is the price of one token; prices are of a million. "
                f"Write {name}: {1e6 * number:g}."
            )
