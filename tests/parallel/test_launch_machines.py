"""Jobs of several machines, each a launcher of its own on this one: who takes part, and what is said of differences."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from flatout.errors import MachineError, UsageError
from flatout.parallel.launch_request import Launch
from flatout.parallel.launching import addresses, machines, messages
from flatout.parallel.launching.facts import Facts, first_difference
from flatout.parallel.launching.failure import RankEnd
from flatout.parallel.launching.launch import launch
from flatout.parallel.launching.leader import Leader
from flatout.parallel.launching.messages import Beats, Connection, Disconnected, Ended, Hello, RankBeat
from flatout.parallel.launching.signals import Signals

# Ranks that import no torch need no store.
COMMAND = """
import sys
from flatout.parallel.launching import leader
class NoStore:
    def __init__(self, listener, **_): listener.close()
    def check(self): pass
    def close(self): pass
leader.Store = NoStore
from flatout.__main__ import main
sys.exit(main(["launch", *sys.argv[1:]]))
"""


class Machines:
    """Launchers of one job, each in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.started: list[subprocess.Popen[str]] = []
        (folder / "train.py").write_text("")

    def script(self, source: str) -> None:
        head = "import os, signal, sys, time\nrank = int(os.environ['RANK'])\n"
        head += "again = os.environ['TORCHELASTIC_RESTART_COUNT']"
        (self._folder / "train.py").write_text(f"{head}\n{source}")

    def start(self, node_rank: int, *options: str, count: int = 2, script: str = "train.py") -> subprocess.Popen[str]:
        words = ["--nnodes", str(count), "--node-rank", str(node_rank), "--rendezvous", f"127.0.0.1:{self.port}"]
        words += ["--nproc-per-node", "1", *options, script]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", COMMAND, *words],
            cwd=self._folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.started.append(process)
        return process

    def wait_for(self, name: str) -> None:
        """Until a rank has made this file."""
        while not (self._folder / name).exists():
            time.sleep(0.02)

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


@pytest.fixture
def several(tmp_path: Path) -> Iterator[Machines]:
    made = Machines(tmp_path)
    yield made
    made.close()


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, _ = process.communicate()
    return process.returncode, out


def test_ranks_are_numbered_over_the_machines(several: Machines) -> None:
    several.script("print('rank', rank, 'of', os.environ['WORLD_SIZE'], os.environ['GROUP_RANK'])")
    second, first = several.start(1), several.start(0)
    for number, process in enumerate((first, second)):
        code, out = ended(process)
        assert code == 0
        assert out.splitlines()[-1] == f"rank {number} of 2 {number}"


def test_a_failure_is_told_on_every_machine(several: Machines) -> None:
    several.script("if rank == 1: raise ValueError('bad')\ntime.sleep(1000)")
    for process in [several.start(0), several.start(1)]:
        code, out = ended(process)
        assert code == 1
        assert re.search(
            r"rank 1 on \S+ failed with exit status 1: ValueError: bad \(.*line 4\); the others are ended", out
        )


@pytest.mark.slow
def test_a_lost_machine_is_done_without(several: Machines) -> None:
    several.script("open(f'at{rank}-{again}', 'w')\nif again == '0': time.sleep(1000)\nprint(os.environ['WORLD_SIZE'])")
    options = ("--max-restarts", "1", "--min-nnodes", "2", "--join-timeout", "2s")
    processes = [several.start(number, *options, count=3) for number in range(3)]
    several.wait_for("at2-0")
    processes[2].kill()
    for process in processes[:2]:
        code, out = ended(process)
        assert code == 0
        assert re.search(r"machine 2 \(\S+\) is lost: .*; restart 1 of 1", out)
        assert out.splitlines()[-1] == "2"


def test_a_signal_on_one_machine_ends_all(several: Machines) -> None:
    several.script(
        "def save(*_): print('saved'); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\nopen(f'at{rank}', 'w')\nwhile True: time.sleep(0.1)"
    )
    processes = [several.start(0), several.start(1)]
    several.wait_for("at0")
    several.wait_for("at1")
    processes[1].send_signal(signal.SIGTERM)
    for process in processes:
        code, out = ended(process)
        assert code == 128 + signal.SIGTERM
        assert "saved" in out


@pytest.mark.slow
def test_machine_0_that_is_killed_ends_the_others(several: Machines) -> None:
    several.script("open(f'at{rank}', 'w')\ntime.sleep(1000)")
    first, second = several.start(0, "--join-timeout", "1"), several.start(1, "--join-timeout", "1")
    several.wait_for("at1")
    first.kill()
    code, out = ended(second)
    assert code == 1
    assert "did not come back within 1 s; it leads the job" in out


def test_machines_that_do_not_come(several: Machines) -> None:
    code, out = ended(several.start(0, "--join-timeout", "0.2s"))
    assert code == 1
    assert re.search(r"1 of 2 machines arrived within 0.2 s: 0 \(\S+\); the job needs 2; run the same command", out)
    code, out = ended(several.start(1, "--join-timeout", "0.2s"))
    assert code == 1
    assert f"nothing listened on port {several.port} of 127.0.0.1 within 0.2 s" in out


def test_scripts_that_differ_are_refused_on_both(several: Machines, tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("print(1)")
    for process in [several.start(0), several.start(1, script="other.py")]:
        code, out = ended(process)
        assert code == 2
        assert "has another script" in out


def test_a_machine_that_asks_for_something_else_is_turned_away(several: Machines) -> None:
    first = several.start(0)
    code, out = ended(several.start(1, "--max-restarts", "3"))
    assert code == 2
    assert "asked for 2 machines with 3 restarts here, and for 2 machines with 0 restarts on machine 0" in out
    assert ended(several.start(1))[0] == 0
    assert ended(first)[0] == 0


# what differs

FACTS = Facts(host="a", ranks=2, gpus=2, python="3.11", torch="2.13.0", flatout="1", script="0" * 64, plan=None)


@pytest.mark.parametrize(
    ("changes", "text", "is_usage"),
    [
        ({"torch": "2.12.0"}, "machine 1 (b) has torch 2.12.0, machine 0 (a) has 2.13.0", False),
        ({"torch": None}, "machine 1 (b) has torch (none), machine 0 (a) has 2.13.0", False),
        ({"python": "3.12"}, "machine 1 (b) has Python 3.12, machine 0 (a) has 3.11", False),
        ({"flatout": "2"}, "machine 1 (b) has Flatout 2, machine 0 (a) has 1", False),
        ({"plan": "f" * 64}, "machine 1 (b) has another plan (ffffffffffff) than machine 0 (a) (none)", True),
        ({"ranks": 4, "gpus": 4}, "machine 1 (b) would start 4 ranks and has 4 GPUs, machine 0 (a) 2 ranks and ", True),
    ],
)
def test_machines_that_differ(changes: dict[str, object], text: str, is_usage: bool) -> None:
    other = replace(FACTS, host="b", **changes)  # type: ignore[arg-type]
    found = first_difference([(0, FACTS), (1, other)])
    assert found is not None
    assert found.what.startswith(text)
    assert isinstance(found, UsageError) is is_usage
    assert first_difference([(0, FACTS), (1, replace(FACTS, host="b"))]) is None


def test_a_number_that_two_machines_were_given_is_refused_to_one(several: Machines) -> None:
    several.start(0, count=3)
    both = [several.start(1, count=3) for _ in range(2)]
    while (refused := next((one for one in both if one.poll() is not None), None)) is None:
        time.sleep(0.02)
    code, said = ended(refused)
    assert code == 2
    assert re.search(r"--node-rank 1 is that of .* already; machines are 0 to 2", said)
    assert "is lost" not in said
    assert [one.poll() for one in both].count(None) == 1


def test_a_machine_that_waits_for_others_says_that_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "BEAT_SECONDS", 0.0)
    waiting = machines.LocalMachine(None, None, lambda event: None, None)  # type: ignore[arg-type]  # none has started
    assert waiting.poll() == [messages.Present()]


def test_a_lost_machine_that_has_ended_does_not_stand_for_one_that_has_not() -> None:
    leader = object.__new__(Leader)
    closes = SimpleNamespace(close=int)
    one, lost = (SimpleNamespace(slot=slot, lost=None, send=print, connection=closes) for slot in (1, 2))
    ranks = SimpleNamespace(all_gone=False)
    waits: list[int] = []

    def turn(patience: float) -> list[tuple[int, messages.Message]]:
        waits.append(1)
        if len(waits) == 1:
            lost.lost = "its connection broke"
            return [(2, messages.AllEnded(attempt=0))]
        ranks.all_gone = True
        return [(1, messages.AllEnded(attempt=0))]

    vars(leader).update(
        _others=[one, lost],
        _local=SimpleNamespace(ranks=ranks, send=print),
        _request=request(rendezvous=("a", 29500)),
        _kill_wanted=False,
        _turn=turn,
    )
    leader._end_all()
    assert len(waits) == 2
    assert leader._others == [one]


# messages


def test_messages_arrive_as_they_were_sent() -> None:
    end = RankEnd(rank=1, machine=0, status=None, signal=9, seconds_ago=0.5)
    beat = RankBeat(rank=0, beats=3, step=7, age_seconds=0.25, inside=True)
    sent: list[messages.Message] = [Ended(attempt=0, end=end), Beats(attempt=0, ranks=(beat,), failing=(1,))]
    one, other = map(Connection, socket.socketpair())
    for message in sent:
        one.send(message)
    assert other.receive(at_most=1) + other.receive() == sent
    one.close()
    with pytest.raises(Disconnected, match="it closed the connection"):
        other.receive()
    other.close()


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n",
        b"[]\n",
        b'{"Exit": {}}\n',
        b'{"Hello": {"facts": 1}}\n',
        b"\xff\n",
        b"[" * 100_000 + b"\n",
    ],
)
def test_whoever_says_something_else_is_cut_off(said: bytes) -> None:
    peer, ours = socket.socketpair()
    connection = Connection(ours)
    peer.sendall(said)
    with pytest.raises(Disconnected, match="speaks another language"):
        connection.receive()
    peer.close()
    connection.close()


def test_the_gate_lets_in_only_who_says_hello() -> None:
    gate = machines.Gate(addresses.listening("127.0.0.1", 0))
    where = gate._listener.getsockname()
    other_program, guest = socket.create_connection(where), Connection(socket.create_connection(where))
    other_program.sendall(b"SSH-2.0\r\n")
    guest.send(Hello(facts=FACTS, identity="x", node_rank=1, asked="2 machines"))
    found: list[tuple[machines.RemoteMachine, str]] = []
    while not found:
        found = gate.arrivals()
    ((machine, asked),) = found
    assert (machine.facts, machine.node_rank, asked) == (FACTS, 1, "2 machines")
    while other_program.recv(1):
        gate.arrivals()
    for one in (gate, guest, machine.connection, other_program):
        one.close()


def test_a_machine_that_is_silent_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "LOST_SECONDS", 0.0)
    peer, ours = socket.socketpair()
    machine = machines.RemoteMachine(Connection(ours), FACTS, identity="x", node_rank=None)
    assert machine.poll() == []
    assert (machine.lost or "").startswith("nothing heard for")
    peer.close()
    ours.close()


def test_what_a_machine_said_before_it_went_is_read() -> None:
    ours, peer = map(Connection, socket.socketpair())
    machine = machines.RemoteMachine(ours, FACTS, identity="x", node_rank=None)
    peer.send(messages.Finish(status=3))
    peer.close()
    machine.send(messages.Present())  # which finds that nobody reads it
    assert machine.poll() == [messages.Finish(status=3)]
    assert machine.poll() == []
    assert machine.lost is not None
    ours.close()


# addresses


def test_an_interface_is_found_by_name_and_by_address(monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"lo": ("127.0.0.1", "::1"), "eth0": ("10.0.0.1",), "down0": ()}
    monkeypatch.setattr(addresses, "interface_addresses", lambda: here)
    assert [addresses.address_of(one) for one in ("eth0", "10.0.0.1", "lo")] == ["10.0.0.1", "10.0.0.1", "127.0.0.1"]
    assert [addresses.interface_name(one) for one in ("10.0.0.1", "127.0.1.1", "10.0.0.2")] == ["eth0", "lo", None]
    with pytest.raises(UsageError, match=r"no network interface eth1 .*; here are eth0 \(10\.0\.0\.1\), lo \(127"):
        addresses.address_of("eth1")
    with pytest.raises(UsageError, match="the interface down0 has no IP address"):
        addresses.address_of("down0")


def request(**fields: object) -> Launch:
    given = {"command": (sys.executable, "-c", ""), "nnodes": 2, "join_seconds": 0.0, **fields}
    return Launch(**given)  # type: ignore[arg-type]


def test_a_port_that_is_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(MachineError, match=f"port {port} of 127.0.0.1 is in use; machine 0 listens there"):
            launch(request(rendezvous=("127.0.0.1", port), node_rank=0))


def test_a_port_where_something_else_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        # The connection is made by the system; what it then says is no message of ours.
        port = other.getsockname()[1]
        other.settimeout(30)
        import threading

        def answer() -> None:
            peer, _ = other.accept()
            peer.sendall(b"SSH-2.0-OpenSSH\r\n")
            peer.recv(1 << 16)
            peer.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(MachineError, match=f"what listens on port {port} of 127.0.0.1 is not flatout launch"):
            launch(request(rendezvous=("127.0.0.1", port), node_rank=1))
        thread.join()


def test_hosts_and_addresses_that_are_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MachineError, match=r"192\.0\.2\.99 is not an address of this machine"):
        launch(request(rendezvous=("192.0.2.99", 29500), node_rank=0))

    def unknown(host: str) -> tuple[str, ...]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(addresses, "resolved", unknown)
    with pytest.raises(MachineError, match="no host nowhere: Name or service not known; machine 0 listens"):
        launch(request(rendezvous=("nowhere", 29500), node_rank=0))


def test_signals_wake_a_wait_and_are_told_once() -> None:
    signals = Signals()
    signals._note(signal.SIGTERM, None)
    signals._note(signal.SIGTERM, None)
    assert [(one.signal, one.at_once) for one in signals.taken()] == [(15, False), (15, True)]
    assert signals.taken() == []
    signals.close()


def test_every_message_can_be_read_again() -> None:
    assert {"Hello", "Place", "RankFailed", "MachineLost"} <= set(messages._KINDS)
