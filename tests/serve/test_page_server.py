"""The page of a run on the loopback address: what it serves, and all that it refuses."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flatout.machine.sensors import Reading
from flatout.serve import page_server
from flatout.serve.page_server import RunPages, make_server, serve_until_the_end
from flatout.serve.run_folder import StateFile
from tests.live_states import FINDING, HOSTILE, gpu_reading, reading, run_state


def test_a_script_whose_name_is_no_utf8_has_a_page_too(tmp_path: Path) -> None:
    file = StateFile(tmp_path / "runs")
    file.write(run_state(script="caf\udce9.py"))
    assert file.folder is not None
    assert b"<title>caf?.py" in RunPages(file.folder, sensors=Source()).page("nonce")


class Source:
    """Sensors of a machine with one GPU."""

    def read(self, *, processes: bool = False) -> Reading:
        return reading(1.0, gpu_reading(1.0))

    def close(self) -> None: ...


class Site:
    """A server of one run, and requests to it."""

    def __init__(self, folder: Path) -> None:
        self.file = StateFile(folder)
        self.file.write(run_state(script=HOSTILE, findings=(FINDING,), device="cuda:0"))
        assert self.file.folder is not None
        self.pages = RunPages(self.file.folder, sensors=Source())
        self.server = make_server(self.pages, first_port=0)
        self.port = self.server.server_port
        self.token = self.pages.token
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def ask(self, path: str, method: str = "GET", **headers: str) -> tuple[int, http.client.HTTPMessage, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        named = {"Host": f"127.0.0.1:{self.port}", **headers}
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in named.items():
            if value:
                connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        found = answer.status, answer.headers, answer.read()
        connection.close()
        return found


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(page_server, "VIEW_SECONDS", 0.0)
    found = Site(tmp_path)
    yield found
    found.server.shutdown()
    found.server.server_close()


def test_the_page_and_its_state(site: Site) -> None:
    code, headers, body = site.ask(f"/{site.token}/")
    assert (code, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert site.pages.url(site.port) == f"http://127.0.0.1:{site.port}/{site.token}/"
    nonce = body.decode().partition('<script nonce="')[2].partition('"')[0]
    assert len(nonce) > 16
    assert f"script-src 'nonce-{nonce}'" in headers["Content-Security-Policy"]
    code, headers, body = site.ask(f"/{site.token}/state")
    assert (code, headers["Content-Type"]) == (200, "application/json")
    found = json.loads(body)
    rows = dict(found["rows"])
    assert rows["progress"].startswith("step 1,234 · epoch 3, step 120 of 500")
    assert rows["GPU 0"].startswith("NVIDIA H100 80GB HBM3 · 98% busy")
    assert [one["title"] for one in found["findings"]] == [FINDING.title]
    assert [(one["name"], len(one["values"])) for one in found["curves"]] == [("Step time", 3), ("Resident memory", 2)]


def test_every_answer_forbids_what_the_page_does_not_need(site: Site) -> None:
    for path in (f"/{site.token}/", f"/{site.token}/state", "/"):
        _, headers, _ = site.ask(path)
        policy = headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; ")
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert (headers["X-Content-Type-Options"], headers["Referrer-Policy"]) == ("nosniff", "no-referrer")
        assert (headers["Cache-Control"], headers["Cross-Origin-Resource-Policy"]) == ("no-store", "same-origin")
        assert "Access-Control-Allow-Origin" not in headers


def test_a_nonce_serves_once(site: Site) -> None:
    policies = {site.ask(f"/{site.token}/")[1]["Content-Security-Policy"] for _ in range(3)}
    assert len(policies) == 3


@pytest.mark.parametrize(
    "path",
    ["/", "/state", "//state", "/wrong/", "/wrong/state", "/TOKEN", "/TOKEN/nothing", "/TOKEN/../state",
     "/TOKEN/state/", "/TOKEN//", "/TOKEN/state?x=1", "/TOKENx/", "/%00/", "*"],
)  # fmt: skip
def test_a_path_without_the_token_or_of_nothing_is_not_found(site: Site, path: str) -> None:
    code, _, body = site.ask(path.replace("TOKEN", site.token))
    assert (code, body) == (404, b"not found\n")


@pytest.mark.parametrize(
    "host",
    ["", "evil.example", "evil.example:PORT", "127.0.0.1.evil.example:PORT", "localhost.evil.example:PORT", "PORT"],
)
def test_a_foreign_host_is_refused(site: Site, host: str) -> None:
    code, _, body = site.ask(f"/{site.token}/", Host=host.replace("PORT", str(site.port)))
    assert code == 403
    assert site.token.encode() not in body


def test_loopback_names_and_a_forwarded_port_are_served(site: Site) -> None:
    for host in (f"localhost:{site.port}", f"127.0.0.1:{site.port}", "localhost:9000"):
        assert site.ask(f"/{site.token}/state", Host=host, Origin=f"http://{host}")[0] == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://127.0.0.1:PORT", "http://localhost:PORT"])
def test_a_foreign_origin_is_refused(site: Site, origin: str) -> None:
    assert site.ask(f"/{site.token}/state", Origin=origin.replace("PORT", str(site.port)))[0] == 403


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "CONNECT", "STEAL"])
def test_only_get(site: Site, method: str) -> None:
    code, headers, _ = site.ask(f"/{site.token}/", method)
    assert (code, headers["Allow"]) == (405, "GET")


def test_what_is_not_http_is_answered_without_repeating_it(site: Site) -> None:
    for request in (
        b"<script>alert(1)</script>\r\n\r\n",
        b"GET / HTTP/9.9.9<b>\r\n\r\n",
        b"GET /\r\n\r\n",
        b"\x16\x03\x01",
    ):
        with socket.create_connection(("127.0.0.1", site.port), timeout=20) as connection:
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
            answer = b""
            while data := connection.recv(65536):
                answer += data
        assert b"<" not in answer
        assert b" 200 " not in answer


def test_html_in_a_scripts_name_is_inert(site: Site) -> None:
    _, _, body = site.ask(f"/{site.token}/")
    page = body.decode()
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert page.count("<script") == 1
    assert "innerHTML" not in page
    for word in ("http:", "https:", "//cdn"):
        assert word not in page.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium")
def test_a_browser_shows_the_page_and_runs_nothing_of_a_scripts_name(site: Site, tmp_path: Path) -> None:
    words = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    words += ["--virtual-time-budget=3000", "--dump-dom", site.pages.url(site.port)]
    done = subprocess.run(["chromium", *words], capture_output=True, text=True, timeout=120, check=True)
    shown = done.stdout
    assert "Updated every second." in shown
    assert "<td>step 1,234 · epoch 3, step 120 of 500" in shown
    assert f"<strong>{FINDING.title}</strong>" in shown
    assert shown.count("<polyline") == 2
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in shown
    assert shown.count("<script") == 1
    assert "<img" not in shown


def test_the_state_follows_the_run_to_its_end(site: Site) -> None:
    site.file.write(run_state(steps=1300))
    assert dict(json.loads(site.ask(f"/{site.token}/state")[2])["rows"])["progress"].startswith("step 1,300")
    site.file.write(run_state(steps=1301, ended=True, status=0))
    found = json.loads(site.ask(f"/{site.token}/state")[2])
    assert found["condition"] == "ended"
    assert "with status 0" in dict(found["rows"])["script"]


def test_a_state_that_is_gone_or_broken_leaves_the_last_one(site: Site) -> None:
    assert site.file.folder is not None
    (site.file.folder / "state.json").write_text("{")
    found = json.loads(site.ask(f"/{site.token}/state")[2])
    assert (found["condition"], dict(found["rows"])["progress"][:10]) == ("unknown", "step 1,234")


def test_a_port_that_is_taken_is_left_to_its_owner(site: Site) -> None:
    second = make_server(site.pages, first_port=site.port)
    assert second.server_port != site.port
    assert second.server_address[0] == "127.0.0.1"
    second.server_close()


def test_where_all_ports_are_taken_any_is_used(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_server, "PORTS_TRIED", 1)
    second = make_server(site.pages, first_port=site.port)
    assert second.server_port not in (0, site.port)
    second.server_close()


def test_it_serves_until_the_run_has_ended(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    conditions = iter(["running", "stopped", "killed", "killed", "killed"])
    asked: list[Any] = []

    class Ending(RunPages):
        def run(self) -> Any:
            asked.append(next(conditions))
            return type("Seen", (), {"condition": asked[-1]})

    monkeypatch.setattr(page_server, "POLL_SECONDS", 0.02)
    assert site.file.folder is not None
    pages = Ending(site.file.folder, sensors=Source())
    serve_until_the_end(make_server(pages, first_port=0), pages, linger_seconds=0.03)
    assert asked[:3] == ["running", "stopped", "killed"]


def test_its_process_holds_no_listener_but_the_loopback(site: Site) -> None:
    assert site.server.socket.getsockname()[0] == "127.0.0.1"
