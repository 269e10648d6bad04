"""Hosts that are network namespaces of this machine, each with an address of its own, on one switch.

The switch is a bridge in a namespace of its own, so that nothing of this machine's own network is changed, and two runs
at a time do not meet. The hosts have names of their own; they share processors, memory and file systems.

    with simulated_hosts(3) as hosts:
        hosts[2].start(["flatout", "launch", ...], log)
        hosts[2].cut()

Needs Linux, root and the command `ip`. At the end, whatever it is, every process of a host is killed, and the
namespaces are removed.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flatout.errors import MachineError

COMMAND_SECONDS = 30.0
ENDS_SECONDS = 10.0
"""For killed processes to be gone."""
NEEDED = ("ip", "tc", "ss", "unshare")


@dataclass
class Host:
    """One namespace."""

    number: int
    space: str
    """Its name among the namespaces of this machine."""
    switch: str
    address: str
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """What it calls itself."""
        return f"host{self.number}"

    @property
    def port(self) -> str:
        """The switch's end of its cable."""
        return f"port{self.number}"

    def start(
        self,
        command: Sequence[str],
        log: Path,
        *,
        out: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Run it there, by the same process id; its output goes to the log, that of stdout to `out` if it is given."""
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.name, *command]
        with log.open("ab") as errors, (out or log).open("ab") as lines:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.space, *named],
                stdin=subprocess.DEVNULL,
                stdout=lines,
                stderr=errors,
                env={**os.environ, **(environment or {})},
                cwd=log.parent,
                start_new_session=True,  # Ctrl-C is for the benchmark, which ends them
            )
        self.started.append(process)
        return process

    def cut(self) -> None:
        """Nothing arrives and nothing leaves: the cable is out of the switch."""
        _run("ip", "-n", self.switch, "link", "set", self.port, "down")

    def reconnect(self) -> None:
        """Undo `cut`."""
        _run("ip", "-n", self.switch, "link", "set", self.port, "up")

    def slow_down(self, rate: str) -> None:
        """At most so much in either direction: '20mbit'."""
        for space, device in ((self.switch, self.port), (self.space, "eth0")):
            limit = ("root", "tbf", "rate", rate, "burst", "32kbit", "latency", "400ms")
            _run("tc", "-n", space, "qdisc", "replace", "dev", device, *limit)

    def speed_up(self) -> None:
        """Undo `slow_down`."""
        for space, device in ((self.switch, self.port), (self.space, "eth0")):
            _run("tc", "-n", space, "qdisc", "del", "dev", device, "root")

    def pids(self) -> set[int]:
        """Its processes."""
        return {int(pid) for pid in _run("ip", "netns", "pids", self.space).split() if not _is_zombie(int(pid))}

    def listening(self) -> set[str]:
        """The addresses that something listens on, by TCP or UDP: '10.77.0.1', '*' for all."""
        lines = _run("ip", "netns", "exec", self.space, "ss", "-Hltnu").splitlines()
        return {re.sub(r"%.*", "", line.split()[4].rpartition(":")[0]).strip("[]") for line in lines}

    def end(self) -> int:
        """Kill what runs; how many processes that were."""
        found: set[int] = set()
        deadline = time.monotonic() + ENDS_SECONDS
        while (left := self.pids() | self._unended()) and time.monotonic() < deadline:
            found |= left
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        return len(found)

    def _unended(self) -> set[int]:
        """Of the commands, also those that are about to enter the namespace."""
        return {process.pid for process in self.started if process.poll() is None}


def missing() -> str | None:
    """Why there can be no simulated hosts here; None: there can."""
    if os.geteuid() != 0:
        return "network namespaces are made by root"
    absent = [name for name in NEEDED if shutil.which(name) is None]
    return f"no command {', '.join(absent)}; they are in iproute2 and util-linux" if absent else None


@contextlib.contextmanager
def simulated_hosts(count: int) -> Iterator[list[Host]]:
    """Their addresses are 10.77.0.1 and the following. Raises MachineError where they cannot be made."""
    run = secrets.token_hex(3)
    switch = f"flatout-{run}-switch"
    hosts = [
        Host(number=number, space=f"flatout-{run}-{number}", switch=switch, address=f"10.77.0.{number + 1}")
        for number in range(count)
    ]
    try:
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        for host in hosts:
            _connect(host)
        yield hosts
    finally:
        with _undisturbed():
            for host in hosts:
                with contextlib.suppress(MachineError):  # it was not made yet
                    host.end()
            for space in (*(host.space for host in hosts), switch):
                with contextlib.suppress(MachineError):
                    _run("ip", "netns", "del", space)


def _connect(host: Host) -> None:
    _run("ip", "netns", "add", host.space)
    ends = ("type", "veth", "peer", "name", "eth0", "netns", host.space)
    _run("ip", "-n", host.switch, "link", "add", host.port, *ends)
    _run("ip", "-n", host.switch, "link", "set", host.port, "master", "bridge", "up")
    _run("ip", "-n", host.space, "addr", "add", f"{host.address}/24", "dev", "eth0")
    for device in ("lo", "eth0"):
        _run("ip", "-n", host.space, "link", "set", device, "up")


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Another Ctrl-C does not interrupt the cleaning up."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(one, signal.SIG_IGN) for one in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _run(*command: str) -> str:
    """Its stdout. Raises MachineError where it fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=COMMAND_SECONDS, start_new_session=True
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MachineError(f"{' '.join(command)}: {error}") from error
    if done.returncode:
        said = done.stderr.strip() or f"exit code {done.returncode}"
        raise MachineError(f"{' '.join(command)}: {said}", limit="hosts are network namespaces of this machine")
    return done.stdout


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
