"""Preemption notices: a file, a URL, a command or a cloud says that this node goes away soon. It is taken as a SIGTERM.

    file       it exists
    url        it answers with status 200; 204 and 404 mean that there is no notice
    command    it ends with exit code 0
    cloud      the address on which the cloud tells its virtual machines:
               aws      spot/instance-action, with a token (IMDSv2)
               gcp      instance/preempted says TRUE
               azure    a scheduled event of this machine that ends it

A thread asks, never the event loop. What cannot be asked is logged once, and asked again: the run goes on.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TypeAlias

from loguru import logger

from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.formatting import printable
from datatrove_ckpt.process.shutdown import Shutdown, get_within
from datatrove_ckpt.redaction import secrets_among

Setting: TypeAlias = Mapping[str, str | Sequence[str]]

POLL_SECONDS = 5.0
METADATA = "http://169.254.169.254"
_TIMEOUT = 5.0  # seconds, of a request or a command
_AZURE_ENDS = {"Preempt", "Terminate", "Redeploy", "Reboot"}  # not Freeze, a pause of seconds

_said: set[str] = set()


def check_notice(setting: Setting | None, signals: Sequence[str]) -> None:
    """
    Args:
        signals: those that drain a rank.

    Raises:
        ConfigError: ``preemption_notice`` cannot work.
    """
    if setting is None:
        return
    name = "preemption_notice"
    if any(secrets_among(name, setting)):
        raise ConfigError(f"{name}: holds what looks like a secret. Let a command read it where the task runs.")
    if not isinstance(setting, Mapping) or len(setting) != 1 or not {*setting} & {"file", "url", "command", "cloud"}:
        raise ConfigError(f"{name}: takes one of file, url, command and cloud, as {{'file': path}}; it is {setting!r}.")
    [(kind, value)] = setting.items()
    words = [value] if isinstance(value, str) else value
    are_words = words and all(word and isinstance(word, str) for word in words)
    if (kind == "command") == isinstance(value, str) or not are_words:
        takes = "a list of words, the program first" if kind == "command" else "a text"
        raise ConfigError(f"{name}.{kind}: takes {takes}; it is {value!r}.")
    if kind == "url" and not words[0].startswith(("http://", "https://")):
        raise ConfigError(f"{name}.url: must begin with http:// or https://; it is {value!r}. A path is a file.")
    if kind == "cloud" and value not in _CLOUDS:
        raise ConfigError(f"{name}.cloud: {value!r} is not one of {', '.join(_CLOUDS)}. Give a url or a command.")
    if "SIGTERM" not in signals:
        raise ConfigError(f"{name}: is taken as a SIGTERM, which is not in drain_signals. Add it there.")


class NoticeWatch:
    """Asks for a notice until there is one, or until ``close``: at once, every few seconds, and at a request to stop.

    Args:
        came: called in the thread with what the notice is, once.
    """

    def __init__(self, setting: Setting, shutdown: Shutdown, came: Callable[[str], object]) -> None:
        [(self._kind, self._value)] = setting.items()
        self._came = came
        self._command: subprocess.Popen[bytes] | None = None
        self._closed: queue.SimpleQueue[bool] = queue.SimpleQueue()
        shutdown.call(lambda: self._closed.put(False))  # so that a SIGTERM at the same time gets its reason
        threading.Thread(target=self._watch, name="datatrove-ckpt preemption notice", daemon=True).start()

    def close(self) -> None:
        self._closed.put(True)
        if (command := self._command) is not None:
            command.kill()

    def _watch(self) -> None:
        # Of a command, arguments may be long; of a URL, a query is nobody's business.
        shown = self._value if isinstance(self._value, str) else self._value[0]
        what = f"a preemption notice ({self._kind} {shown.partition('?')[0]}"
        while True:
            try:
                if (notice := self._ask()) is not None:
                    self._came(printable(f"{what}{notice and ': '}{notice})"))
                    return
            except Exception as error:  # also of an answer that is not as the cloud documents it
                if what not in _said:
                    _said.add(what)
                    logger.warning(
                        f"preemption_notice: {self._kind} {shown} cannot be asked: {type(error).__name__}: {error}. "
                        f"The run goes on without notices, and tries again every {POLL_SECONDS:g} s."
                    )
            with suppress(queue.Empty):
                if get_within(self._closed, POLL_SECONDS):
                    return

    def _ask(self) -> str | None:
        """What the notice says, perhaps nothing. None: there is none."""
        if self._kind == "command":
            return self._run(self._value)
        assert isinstance(self._value, str)
        if self._kind == "file":
            return "" if os.path.exists(os.path.expandvars(os.path.expanduser(self._value))) else None  # noqa: PTH110, PTH111
        if self._kind == "url":
            return None if _get(self._value, {}) is None else ""
        return _CLOUDS[self._value]()

    def _run(self, command: Sequence[str]) -> str | None:
        null = subprocess.DEVNULL
        with subprocess.Popen(command, stdin=null, stdout=null, stderr=null) as process:
            self._command = process
            try:
                return "" if process.wait(_TIMEOUT) == 0 else None
            finally:
                process.kill()


def _get(url: str, headers: Mapping[str, str], method: str = "GET") -> str | None:
    """The text of an answer; None: status 204 or 404. Past any proxy: such addresses are the node's own.

    Raises:
        OSError: it cannot be reached, or answers with another status.
    """
    from urllib.error import HTTPError
    from urllib.request import ProxyHandler, Request, build_opener

    request = Request(url, headers={**headers}, method=method)
    try:
        with build_opener(ProxyHandler({})).open(request, timeout=_TIMEOUT) as answer:
            return None if answer.status == 204 else answer.read(2**20).decode()
    except HTTPError as error:
        with error:
            if error.code == 404:
                return None
            raise OSError(f"it answers with status {error.code}") from None


def _aws() -> str | None:
    token = _get(f"{METADATA}/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, "PUT")
    asks = {"X-aws-ec2-metadata-token": token or ""}
    found = _get(f"{METADATA}/latest/meta-data/spot/instance-action", asks)
    return None if found is None else "{action} at {time}".format(**json.loads(found))


def _gcp() -> str | None:
    found = _get(f"{METADATA}/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
    return "preempted" if found is not None and found.strip().upper() == "TRUE" else None


def _azure() -> str | None:
    root, asks = f"{METADATA}/metadata", {"Metadata": "true"}
    name = _get(f"{root}/instance/compute/name?api-version=2021-02-01&format=text", asks)
    found = json.loads(_get(f"{root}/scheduledevents?api-version=2020-07-01", asks) or "{}")
    for event in found.get("Events", []):  # those of all machines of a scale set
        if event["EventType"] in _AZURE_ENDS and name in event["Resources"]:
            return f"{event['EventType']} not before {event.get('NotBefore') or 'now'}"
    return None


_CLOUDS: dict[str, Callable[[], str | None]] = {"aws": _aws, "gcp": _gcp, "azure": _azure}
