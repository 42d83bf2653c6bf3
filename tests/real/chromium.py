"""A real Chromium without a window, driven through its DevTools: ``async with Chromium(folder) as browser``.

It has no network: names resolve to nothing, and each request of a page is counted. Whatever the page says on its
console, warnings of the browser included, is kept.
"""

from __future__ import annotations

import asyncio
import base64
import os
import re
import shutil
import signal
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp

from tests.real.environment import install_debian

PACKAGES = ("chromium", "fonts-liberation")
_LISTENS = re.compile(r"DevTools listening on (ws://\S+)")
_OPTIONS = (
    "--headless",
    "--no-sandbox",  # the tests may run as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-background-networking",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--remote-debugging-port=0",
)


def install() -> None:
    if not shutil.which("chromium"):
        install_debian(PACKAGES)


class Chromium:
    """One browser with one tab.

    Attributes:
        console: what pages said: console messages, exceptions, and the browser's own log.
        requests: URLs that pages asked for.
    """

    def __init__(self, folder: Path) -> None:
        self.console: list[str] = []
        self.requests: list[str] = []
        self._folder = folder
        self._numbers = count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._loaded = asyncio.Event()
        self._tab = ""

    async def __aenter__(self) -> Self:
        install()
        self._process = await asyncio.create_subprocess_exec(
            "chromium",
            *_OPTIONS,
            f"--user-data-dir={self._folder / 'profile'}",
            "about:blank",
            stderr=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            self._session = aiohttp.ClientSession()
            self._socket = await self._session.ws_connect(await self._address(), max_msg_size=0)
            self._listener = asyncio.create_task(self._listen())
            target = await self._call("Target.createTarget", url="about:blank")
            attached = await self._call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
            self._tab = attached["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                await self._call(f"{domain}.enable")
        except BaseException:
            self._kill()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._listener.cancel()
        await self._socket.close()
        await self._session.close()
        self._kill()
        await self._drain
        await self._process.wait()

    def _kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)

    async def _address(self) -> str:
        assert self._process.stderr is not None
        said = []
        async for line in self._process.stderr:
            said.append(line.decode(errors="replace"))
            if found := _LISTENS.search(said[-1]):
                self._drain = asyncio.create_task(self._process.stderr.read())  # else its pipe would fill
                return found[1]
        raise RuntimeError(f"Chromium did not start: {''.join(said)}")

    async def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": parameters}
        await self._socket.send_json(message | ({"sessionId": self._tab} if self._tab else {}))
        found = await answer
        assert "error" not in found, f"{method}: {found}"
        result: dict[str, Any] = found["result"]
        return result

    async def _listen(self) -> None:
        async for message in self._socket:
            content = message.json()
            if "id" in content:
                self._answers.pop(content["id"]).set_result(content)
            else:
                self._event(content.get("method", ""), content.get("params", {}))

    def _event(self, method: str, content: dict[str, Any]) -> None:
        match method:
            case "Runtime.consoleAPICalled":
                self.console.append(str([one.get("value") for one in content["args"]]))
            case "Runtime.exceptionThrown":
                self.console.append(str(content["exceptionDetails"]))
            case "Log.entryAdded":
                self.console.append(str(content["entry"].get("text")))
            case "Network.requestWillBeSent":
                self.requests.append(content["request"]["url"])
            case "Page.loadEventFired":
                self._loaded.set()

    # what tests do ----------------------------------------------------------------------------------------------------

    async def open(self, path: Path, *, dark: bool = False, width: int = 1280, media: str = "") -> None:
        """Loads a page from a file, in a light or dark system, in a window of so many pixels, or as for "print"."""
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        await self._call("Emulation.setEmulatedMedia", features=features, media=media)
        await self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
        )
        self._loaded.clear()
        await self._call("Page.navigate", url=path.as_uri())
        await self._loaded.wait()

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        found = await self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def picture(self) -> bytes:
        """The whole page as a PNG."""
        found = await self._call("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(found["data"])

    async def print(self) -> bytes:
        """The page as it is printed, as a PDF."""
        found = await self._call("Page.printToPDF", preferCSSPageSize=True)
        return base64.b64decode(found["data"])
