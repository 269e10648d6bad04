"""Open a page of `flatout report` in headless Chromium: pictures, requests, time to load, what axe complains about.

    python -m benchmarks.report report.html --out pictures --axe node_modules/axe-core/axe.min.js

Needs `chromium`; axe-core is from npm and optional. Exit code 1 where the page requests anything but itself, takes a
second or more to load, or axe finds a violation.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

VIEWS = {
    "light-wide": ("light", "screen", 1280),
    "dark-wide": ("dark", "screen", 1280),
    "light-narrow": ("light", "screen", 390),
    "dark-narrow": ("dark", "screen", 390),
    "print": ("light", "print", 794),
}
"""Name -> (colour scheme, medium, width in pixels)."""
SLOWEST_SECONDS = 1.0
PIECE, MOST_PIECES = 1500, 12
"""Pixels of a picture: one that is taller cannot be judged. A page of megabytes has hundreds of them."""


class Browser:
    """Chromium, spoken to through a pair of pipes (its DevTools protocol)."""

    def __init__(self, command: str, folder: str) -> None:
        theirs, self._to = os.pipe()
        self._from, answers = os.pipe()
        options = [
            "--headless=new",
            "--no-sandbox",
            "--remote-debugging-pipe",
            f"--user-data-dir={folder}",
            "--hide-scrollbars",
        ]
        # Chromium reads descriptor 3 and writes descriptor 4.
        shell = f"exec {command} {' '.join(options)} 3<&{theirs} 4>&{answers}"
        self._process = subprocess.Popen(
            ["bash", "-c", shell], pass_fds=(theirs, answers), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        os.close(theirs)
        os.close(answers)
        self._buffer, self._number = b"", 0
        self.events: list[dict[str, Any]] = []
        self._session: str | None = None

    def open_tab(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])
            self.events.append(answer)

    def wait_for(self, method: str) -> None:
        while not any(event.get("method") == method for event in self.events):
            self.events.append(self._read())

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            chunk = os.read(self._from, 1 << 20)
            if not chunk:
                raise RuntimeError("the browser ended")
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))

    def evaluate(self, expression: str) -> Any:
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(str(found["exceptionDetails"]))
        return found["result"].get("value")

    def close(self) -> None:
        self._session = None
        self.call("Browser.close")
        self._process.wait(30)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("--out", type=Path, default=Path("pictures"))
    parser.add_argument("--axe", type=Path, help="axe.min.js of axe-core")
    parser.add_argument("--chromium", default="chromium")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        browser = Browser(options.chromium, folder)
        try:
            return look(browser, options.page, options.out, options.axe)
        finally:
            browser.close()


def look(browser: Browser, page: Path, out: Path, axe: Path | None) -> int:
    browser.open_tab()
    for domain in ("Page", "Network", "Log", "Runtime"):
        browser.call(f"{domain}.enable")
    url, wrong = page.absolute().as_uri(), 0
    for name, (scheme, medium, width) in VIEWS.items():
        browser.events.clear()
        browser.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 500
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.call("Emulation.setEmulatedMedia", media=medium, features=features)
        browser.call("Page.navigate", url=url)
        browser.wait_for("Page.loadEventFired")
        seconds = browser.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd / 1000")
        wrong += save_pictures(browser, out / f"{name}.png", width)
        asked = requests(browser, url)
        said = [event["params"]["entry"]["text"] for event in browser.events if event.get("method") == "Log.entryAdded"]
        print(f"{name}: loaded in {seconds:.3f} s, {len(asked)} other requests {asked}, console {said}")
        wrong += bool(asked) + bool(said) + (seconds >= SLOWEST_SECONDS)
        if axe is not None and medium == "screen":
            wrong += complaints(browser, axe)
    pdf = browser.call("Page.printToPDF", printBackground=True)["data"]
    (out / "print.pdf").write_bytes(base64.b64decode(pdf))
    return 1 if wrong else 0


def save_pictures(browser: Browser, path: Path, width: int) -> int:
    """Of the whole page, in pieces. Returns 1 where it is wider than its window: it would scroll sideways."""
    size = browser.evaluate("[document.documentElement.scrollWidth, document.documentElement.scrollHeight]")
    for number, top in enumerate(range(0, min(int(size[1]), MOST_PIECES * PIECE), PIECE), 1):
        clip = {"x": 0, "y": top, "width": width, "height": min(PIECE, size[1] - top), "scale": 1}
        shot = browser.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)["data"]
        path.with_stem(f"{path.stem}-{number}").write_bytes(base64.b64decode(shot))
    if size[0] > width:
        print(f"{path.name}: {size[0]} pixels wide in a window of {width}")
    return int(size[0] > width)


def requests(browser: Browser, url: str) -> list[str]:
    """What was asked for besides the page itself."""
    sent = [event for event in browser.events if event.get("method") == "Network.requestWillBeSent"]
    return [one["params"]["request"]["url"] for one in sent if one["params"]["request"]["url"].partition("#")[0] != url]


def complaints(browser: Browser, axe: Path) -> int:
    browser.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    browser.evaluate(axe.read_text() + "; undefined")
    found = browser.evaluate("axe.run().then(found => JSON.stringify(found))")
    result = json.loads(found)
    print(f"  axe {result['testEngine']['version']}: {len(result['passes'])} rules passed", end="")
    print(f", {len(result['violations'])} violated, {len(result['incomplete'])} to be judged by a person")
    for kind in ("violations", "incomplete"):
        for one in result[kind]:
            print(f"    {kind}: {one['id']} ({one['impact']}): {one['help']}, {len(one['nodes'])} places")
            for node in one["nodes"][:3]:
                print(
                    f"      {node['target']} {node['html'][:160]} {' '.join(a['message'] for a in node['any'])[:200]}"
                )
    return len(result["violations"])


if __name__ == "__main__":
    sys.exit(main())
