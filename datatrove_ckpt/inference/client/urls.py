"""Handles URLs of endpoints, which may hold a password or a secret query (``?code=...``)."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import ip_address, ip_network
from urllib.request import getproxies, proxy_bypass

from yarl import URL

from datatrove_ckpt.common.redaction import Secret
from datatrove_ckpt.common.warnings import warn_once
from datatrove_ckpt.errors import ConfigError

_VERSION = re.compile(r"v\d+[a-z0-9]*")
_WHOLE = ("completions", "embeddings")  # the last part of a complete address
_PUBLIC = ("api-version", "name[]")  # fields of queries: Azure's, and names of metrics


Extras = dict[str, dict[str, str]]
"""The fields ``extra_headers`` and ``extra_query`` of a request, which are not in its body."""


class HiddenUrl:
    """A URL that is printed without user, password, query and fragment.

    Raises:
        ConfigError: the text is no URL.
    """

    __slots__ = ("_url",)

    def __init__(self, url: str | URL, name: str = "it") -> None:
        self._url = url if isinstance(url, URL) else _parsed(url)
        if not self._url.host:
            raise ConfigError(
                f"{name} is not a URL. Write http://HOST:PORT or https://HOST. In a user, "
                "password or query, write %2F for /, %40 for @, %23 for #.",
                setting="endpoint_url",
            )

    def reveal(self) -> URL:
        return self._url

    def api(self, path: str) -> HiddenUrl:
        """Returns the address of ``path`` of the OpenAI API ("models", "completions"), or of
        "/tokenize".

        A URL without a path gets /v1, any other URL stays as it is. The URL may also be the whole
        address of the completions, or of the embeddings.
        """
        names = [name for name in self._url.raw_parts if name.strip("/")]
        if not names:
            names = ["v1"]
        elif names[-2:] == ["chat", "completions"]:
            del names[-2:]
        elif names[-1] in _WHOLE:
            del names[-1]
        if path.startswith("/") and names and _VERSION.fullmatch(names[-1]):
            del names[-1]
        url = self._url.with_path(
            "/" + "/".join([*names, *path.strip("/").split("/")]), encoded=True
        )
        return HiddenUrl(url.with_query(self._url.query))

    @property
    def may_lack_version(self) -> bool:
        """True if the API may be directly below the URL's path, or below its /v1."""
        names = [name for name in self._url.raw_parts if name.strip("/")]
        return bool(names) and names[-1] not in _WHOLE and not any(map(_VERSION.fullmatch, names))

    @property
    def has_credentials(self) -> bool:
        return self._url.user is not None or self._url.password is not None

    @property
    def secrets(self) -> Iterator[str]:
        """The values of the query, the password or a lone user, also in the forms that aiohttp
        sends.
        """
        url = self._url
        values = [value or name for name, value in url.query.items() if name not in _PUBLIC]
        for text in (*values, url.password or url.user or ""):
            yield text
            yield text.replace(" ", "+")
        if url.user:
            yield b64encode(f"{url.user}:{url.password or ''}".encode()).decode().rstrip("=")

    def __repr__(self) -> str:
        if not self._url.host:
            return ""
        return str(self._url.with_user(None).with_query(None).with_fragment(None))


def _parsed(url: str) -> URL:
    address = url.partition("?")[0]
    path = address.partition("://")[2].partition("/")[2]
    if "@" in path:
        return URL()  # a "/" in the password made a path of its rest and of the host
    if any(map(str.isspace, address)):
        return URL()
    try:
        parsed = URL(url)
    except ValueError:
        return URL()
    if parsed.scheme in ("http", "https"):
        return parsed
    return URL()


def headers_for(url: HiddenUrl, api_key: Secret | None) -> dict[str, str]:
    if api_key is not None:
        return api_key.headers(url.reveal().path)
    if url.has_credentials:
        return {"Authorization": basic_authorization(url)}
    return {}


def basic_authorization(url: HiddenUrl) -> str:
    pair = f"{url.reveal().user or ''}:{url.reveal().password or ''}"
    return f"Basic {b64encode(pair.encode()).decode()}"


def beside(
    url: HiddenUrl, headers: dict[str, str], extras: Extras
) -> tuple[HiddenUrl, dict[str, str]]:
    """Replaces headers of the same name in any case."""
    added = {name.title(): value for name, value in extras["extra_headers"].items()}
    other_headers = {name: value for name, value in headers.items() if name.title() not in added}
    url = HiddenUrl(url.reveal().update_query(extras["extra_query"]))
    return url, {**other_headers, **added}


def proxy_of(url: HiddenUrl) -> HiddenUrl | None:
    scheme = url.reveal().scheme
    proxies = getproxies()
    name = scheme if scheme in proxies else "all"
    proxy = proxies.get(name)
    host = url.reveal().host or ""
    if not proxy or _is_direct(host, url.reveal().port, proxies.get("no", "")):
        return None
    if name == "all" and proxy.startswith("socks"):
        warn_once("all_proxy is a SOCKS proxy, which is not used: requests go directly.")
        return None
    if "://" not in proxy:
        proxy = f"http://{proxy}"
    return HiddenUrl(proxy, f"{name}_proxy")


def _is_direct(host: str, port: int | None, no_proxy: str) -> bool:
    if proxy_bypass(host) or proxy_bypass(f"{host}:{port}"):
        return True
    for entry in no_proxy.split(","):
        with suppress(ValueError):
            if ip_address(host) in ip_network(entry.strip(" []"), strict=False):
                return True
    return False
