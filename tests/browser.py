"""A headless Chromium, driven over two pipes in the DevTools protocol: no driver and no port."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = [  # without the last ones it looks for its maker's servers when it starts
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--remote-debugging-pipe",
    "--hide-scrollbars",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def find() -> str | None:
    """The browser on this machine, if there is one."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """One page. `errors` are the exceptions and messages of level error that it met, `requests` what it asked the network."""

    def __init__(self, program: str, profile: Path) -> None:
        theirs_in, self.to = os.pipe()
        self.back, theirs_out = os.pipe()

        def plug() -> None:  # the protocol is spoken on descriptors 3 and 4
            copies = os.dup(theirs_in), os.dup(theirs_out)
            for copy, place in zip(copies, (3, 4), strict=True):
                os.dup2(copy, place)

        command = [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen(command, preexec_fn=plug, close_fds=False, stdout=quiet, stderr=quiet)
        os.close(theirs_in)
        os.close(theirs_out)
        self.count, self.session, self.rest = 0, "", b""
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.events: list[str] = []
        (target,) = [t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page"]
        self.session = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and wait for its result; events on the way are noted."""
        self.count += 1
        message = {"id": self.count, "method": method, "params": params}
        os.write(self.to, json.dumps(message | ({"sessionId": self.session} if self.session else {})).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") == self.count:
                assert "error" not in answer, (method, answer)
                return dict(answer["result"])

    def receive(self) -> dict[str, Any]:
        while b"\0" not in self.rest:
            ready, _, _ = select.select([self.back], [], [], 60)
            data = os.read(self.back, 1 << 16) if ready else b""
            assert data, "the browser has gone" if ready else "the browser is silent"
            self.rest += data
        line, self.rest = self.rest.split(b"\0", 1)
        message: dict[str, Any] = json.loads(line)
        name, params = message.get("method", ""), message.get("params", {})
        self.events.append(name)
        if name == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"].get("exception", params)))
        elif name == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert", "warning"):
            self.errors.append(str(params["args"]))
        elif name == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])
        elif name == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        return message

    def open(self, path: Path, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Load a file and wait until it is drawn. width and height: of the window, in CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while "Page.loadEventFired" not in self.events:
            self.receive()

    def value(self, expression: str) -> Any:
        """What a JavaScript expression gives, as plain values."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def hover(self, selector: str, across: float = 0.5, down: float = 0.5) -> None:
        """Move the pointer over an element, to this share of its width and height."""
        place = f"document.querySelector({json.dumps(selector)})"
        self.value(f"{place}.scrollIntoView({{block: 'center'}})")
        box = self.value(f"{place}.getBoundingClientRect().toJSON()")
        x, y = box["x"] + across * box["width"], box["y"] + down * box["height"]
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path: Path) -> None:
        """The whole page as a PNG."""
        picture = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(picture["data"]))

    def close(self) -> None:
        self.call("Browser.close")
        self.process.wait(20)
        os.close(self.back)
        os.close(self.to)
