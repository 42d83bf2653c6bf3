"""Preemption notices, which say that this node goes away soon.

One is taken as a SIGTERM:

    command    ends with exit code 0
    aws        spot/instance-action, with a token (IMDSv2)
    gcp        instance/preempted is TRUE
    azure      a scheduled event of this machine that ends it
"""

import json
import queue
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial

from loguru import logger

from datatrove_ckpt.common.redaction import secrets_among
from datatrove_ckpt.errors import ConfigError, printable
from datatrove_ckpt.process.shutdown import Shutdown, get_within

Setting = Mapping[str, str | Sequence[str]]

POLL_SECONDS = 5.0
METADATA = "http://169.254.169.254"
_TIMEOUT = 5.0  # seconds, of a request or a command
_AZURE_ENDS = {"Preempt", "Terminate", "Redeploy", "Reboot"}  # not Freeze, a pause of seconds


def check_notice(setting: Setting | None, drain_signals: Sequence[str]) -> None:
    if setting is None:
        return
    name = "preemption_notice"
    if any(secrets_among(name, setting)):
        raise ConfigError(
            f"{name}: holds what looks like a secret. Let a command read it where the task runs."
        )
    match setting:
        case {"cloud": str() as cloud} if len(setting) == 1 and cloud in _CLOUDS:
            pass
        case {"command": [_, *_]} if len(setting) == 1:
            pass
        case _:
            raise ConfigError(
                f"{name}: takes {{'cloud': NAME}}, one of {', '.join(_CLOUDS)}, or {{'command': "
                f"[program, ...]}}; it is {setting!r}."
            )
    if "SIGTERM" not in drain_signals:
        raise ConfigError(f"{name}: needs SIGTERM in drain_signals. Add it there.")


@contextmanager
def watched_notices(
    setting: Setting, shutdown: Shutdown, came: Callable[[str], object]
) -> Iterator[None]:
    """Polls for a notice in a thread every few seconds, and at a request to stop.

    Args:
        came: called once, in the thread, with the text of the notice.
    """
    closed = queue.SimpleQueue[bool]()
    [(kind, value)] = setting.items()
    poll = _CLOUDS.get(str(value), partial(_ask_command, value))
    source = f"{kind} {value if isinstance(value, str) else value[0]}"  # arguments may be long

    def watch() -> None:
        is_warned = False
        while True:
            try:
                notice = poll()
                if notice is not None:
                    came(printable(f"a preemption notice ({source}{notice and ': '}{notice})"))
                    return
            except Exception as error:  # also for an unknown response
                if not is_warned:
                    is_warned = True
                    logger.warning(
                        f"preemption_notice: {source} cannot be polled: {type(error).__name__}: "
                        f"{error}. The run polls again every {POLL_SECONDS:g} s."
                    )
            with suppress(queue.Empty):
                if get_within(closed, POLL_SECONDS):
                    return

    # A SIGTERM at the same time then gets its reason.
    with shutdown.calling(lambda: closed.put(False)):
        name = "datatrove-ckpt preemption notice"
        threading.Thread(target=watch, name=name, daemon=True).start()
        try:
            yield
        finally:
            closed.put(True)


def _ask_command(command: Sequence[str]) -> str | None:
    null = subprocess.DEVNULL
    done = subprocess.run(
        command, stdin=null, stdout=null, stderr=null, timeout=_TIMEOUT, check=False
    )
    return None if done.returncode else ""


def _get(url: str, headers: Mapping[str, str], method: str = "GET") -> str | None:
    """Returns None for status 404. Uses no proxy: such addresses are the node's own."""
    from urllib.error import HTTPError
    from urllib.request import ProxyHandler, Request, build_opener

    request = Request(url, headers={**headers}, method=method)
    try:
        with build_opener(ProxyHandler({})).open(request, timeout=_TIMEOUT) as answer:
            text: str = answer.read(2**20).decode()
            return text
    except HTTPError as error:
        with error:
            if error.code == 404:
                return None
            raise OSError(f"it answers with status {error.code}") from None


def _aws() -> str | None:
    token = _get(
        f"{METADATA}/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, "PUT"
    )
    headers = {"X-aws-ec2-metadata-token": token or ""}
    response = _get(f"{METADATA}/latest/meta-data/spot/instance-action", headers)
    if response is None:
        return None
    return "{action} at {time}".format(**json.loads(response))


def _gcp() -> str | None:
    response = _get(
        f"{METADATA}/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"}
    )
    if response is not None and response.strip().upper() == "TRUE":
        return "preempted"
    return None


def _azure() -> str | None:
    root = f"{METADATA}/metadata"
    headers = {"Metadata": "true"}
    name = _get(f"{root}/instance/compute/name?api-version=2021-02-01&format=text", headers)
    events = json.loads(_get(f"{root}/scheduledevents?api-version=2020-07-01", headers) or "{}")
    for event in events.get("Events", []):  # of all machines of a scale set
        if event["EventType"] in _AZURE_ENDS and name in event["Resources"]:
            return f"{event['EventType']} not before {event.get('NotBefore') or 'now'}"
    return None


_CLOUDS: dict[str, Callable[[], str | None]] = {"aws": _aws, "gcp": _gcp, "azure": _azure}
