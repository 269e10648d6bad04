"""The page of one run, for this machine alone: a process of its own that reads the run's state file and the sensors.

    http://127.0.0.1:8765/TOKEN/         the page
    http://127.0.0.1:8765/TOKEN/state    what it shows, as JSON

Other programs on this machine, and pages of other sites in the reader's browser, must learn nothing: the server listens
on the loopback address only, every path begins with a random token, a Host header that is no loopback name (a site
whose name was made to point here) and an Origin other than the page's own are refused, and so is every method but GET.
The page loads nothing from elsewhere and runs no script but the one that carries the nonce of its response.
"""

from __future__ import annotations

import functools
import hmac
import json
import secrets
import socketserver
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path

from flatout.diagnose.run_energy import EnergyWatch
from flatout.diagnose.seen_run import SeenRun
from flatout.errors import UsageError
from flatout.machine.ceilings import Ceilings
from flatout.machine.detect import detect
from flatout.machine.device_rates import DeviceWatch
from flatout.machine.kept_ceilings import load_ceilings
from flatout.machine.sensors import Sensors, SensorSource
from flatout.report.live_text import LiveView, live_rows
from flatout.serve.page import page_html
from flatout.serve.run_folder import read_ranks, read_run
from flatout.units import format_bytes, format_seconds

HOST, FIRST_PORT, PORTS_TRIED = "127.0.0.1", 8765, 40
LOOPBACK_NAMES = ("127.0.0.1", "localhost")
REQUEST_SECONDS = 10.0
"""A client that sends nothing for so long is let go."""
VIEW_SECONDS = 0.5
"""For so long one view serves all who ask."""
POLL_SECONDS = 1.0
"""How often it looks whether the run has ended."""


class RunPages:
    """What is served of one run."""

    def __init__(self, folder: Path, *, sensors: SensorSource | None = None, token: str | None = None) -> None:
        self.token = secrets.token_urlsafe(24) if token is None else token
        self._folder = folder
        self._seen = read_run(folder)
        self._devices, self._energy = DeviceWatch(sensors or Sensors()), EnergyWatch()
        self._lock = threading.Lock()
        self._view: tuple[float, bytes] | None = None

    def url(self, port: int) -> str:
        return f"http://{HOST}:{port}/{self.token}/"

    def page(self, nonce: str) -> bytes:
        return page_html(self._seen.state.script, nonce).encode("utf-8", "replace")  # of a name that is no UTF-8

    def run(self) -> SeenRun:
        """As its state file says now; where that is gone, as it said last."""
        try:
            self._seen = read_run(self._folder)
        except UsageError:
            if self._seen.condition in ("running", "stopped"):
                self._seen = SeenRun(folder=self._seen.folder, state=self._seen.state, condition="unknown")
        return self._seen

    def state(self) -> bytes:
        """The view as JSON."""
        with self._lock:
            now = time.monotonic()
            if self._view is None or now - self._view[0] >= VIEW_SECONDS:
                self._view = now, json.dumps(self._fresh(now), allow_nan=False).encode()
            return self._view[1]

    def _fresh(self, now: float) -> dict[str, object]:
        seen, devices = self.run(), self._devices.read()
        view = LiveView(
            state=seen.state,
            condition=seen.condition,
            clock_seconds=now,
            ceilings=_ceilings(seen.state.device),
            devices=devices,
            energy=self._energy.add(seen.state, devices),
            ranks=read_ranks(seen),
        )
        return view_json(view)


def view_json(view: LiveView) -> dict[str, object]:
    """What the page shows: texts, and two curves."""
    state = view.state
    findings = [
        {"title": one.title, "texts": [one.evidence, one.remedy], "command": one.next_command, "kind": one.severity}
        for one in state.findings
    ]
    return {
        "script": state.script,
        "condition": view.condition,
        "rows": live_rows(view),
        "findings": findings,
        "curves": [
            _curve("Step time", state.step_curve, tuple(map(format_seconds, state.step_curve))),
            _curve("Resident memory", state.memory_curve, tuple(map(format_bytes, state.memory_curve))),
        ],
    }


def _curve(name: str, values: tuple[float, ...] | tuple[int, ...], texts: tuple[str, ...]) -> dict[str, object]:
    if not values:
        return {"name": name, "values": [], "text": "nothing yet"}
    order = sorted(range(len(values)), key=lambda place: values[place])
    text = f"{texts[-1]} now, {texts[order[0]]} to {texts[order[-1]]} over the run"
    return {"name": name, "values": list(values), "text": text}


@functools.cache
def _ceilings(device: str | None) -> Ceilings | None:
    return None if device is None else load_ceilings(detect(), device)


class Handler(BaseHTTPRequestHandler):
    """Answers GET of two paths, and nothing else."""

    pages: RunPages
    timeout = REQUEST_SECONDS
    sys_version = ""
    server_version = "flatout"

    def parse_request(self) -> bool:
        """Refuse whatever is not asked by the page itself, before anything of it is read."""
        if not super().parse_request():
            return False
        if self.command != "GET":
            self._answer(405, b"only GET\n", {"Allow": "GET"})
            return False
        host = self.headers.get_all("Host", [])
        origin = self.headers.get_all("Origin", [])
        if len(host) != 1 or host[0].rpartition(":")[0] not in LOOPBACK_NAMES:
            self._answer(403, b"this page is for this machine alone\n")
            return False
        if any(one != f"http://{host[0]}" for one in origin):
            self._answer(403, b"not asked by the page itself\n")
            return False
        return True

    def do_GET(self) -> None:
        token, slash, rest = self.path.removeprefix("/").partition("/")
        if not slash or not hmac.compare_digest(token.encode("utf-8", "replace"), self.pages.token.encode()):
            self._answer(404, b"not found\n")
        elif rest == "":
            nonce = secrets.token_urlsafe(16)
            self._answer(200, self.pages.page(nonce), {"Content-Type": "text/html; charset=utf-8"}, nonce=nonce)
        elif rest == "state":
            self._answer(200, self.pages.state(), {"Content-Type": "application/json"})
        else:
            self._answer(404, b"not found\n")

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """For what is not HTTP; the usual page would repeat parts of the request."""
        self._answer(code, b"bad request\n")

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is logged: a path contains the token."""

    def _answer(self, code: int, body: bytes, headers: Mapping[str, str] | None = None, *, nonce: str = "") -> None:
        allowed = f"script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; " if nonce else ""
        every = {
            "Content-Type": "text/plain; charset=utf-8",
            "Content-Length": str(len(body)),
            "Content-Security-Policy": f"default-src 'none'; {allowed}base-uri 'none'; form-action 'none'; "
            "frame-ancestors 'none'",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cache-Control": "no-store",
            "Connection": "close",
        }
        self.close_connection = True
        self.send_response(code)
        for name, value in {**every, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


class PageServer(ThreadingHTTPServer):
    """On the loopback address; the name of this machine is not looked up."""

    daemon_threads = True
    allow_reuse_address = False

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = HOST, self.server_address[1]

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is no error."""


def make_server(pages: RunPages, *, first_port: int = FIRST_PORT) -> HTTPServer:
    """On the first port that is free, from `first_port` on; where all that are tried are taken, on any. Raises OSError
    where none can be had."""
    handler = type("RunHandler", (Handler,), {"pages": pages})
    for port in range(first_port, min(first_port + PORTS_TRIED, 65536)):
        try:
            return PageServer((HOST, port), handler)
        except OSError:
            continue
    return PageServer((HOST, 0), handler)


def serve_until_the_end(server: HTTPServer, pages: RunPages, *, linger_seconds: float) -> None:
    """Returns so long after the run was last seen running."""
    serving = threading.Thread(target=server.serve_forever, daemon=True)
    serving.start()
    last_seen = time.monotonic()
    while time.monotonic() - last_seen < linger_seconds:
        time.sleep(min(POLL_SECONDS, linger_seconds))
        if pages.run().condition in ("running", "stopped"):
            last_seen = time.monotonic()
    server.shutdown()
    server.server_close()
