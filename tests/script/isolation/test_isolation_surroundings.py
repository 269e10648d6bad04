"""Beyond files: processes, shared memory, the network, devices and sockets of the machine, seen from a trial."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flatout.script.isolation import devices

from .users_home import HERE, SOMEBODY, give_to

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
USERS = [0, pytest.param(SOMEBODY, marks=needs_root)]
WAYS = ["namespace", "reaper"]
HIDDEN = ("unshare", "--mount", "sh", "-c", 'mount -t proc -o hidepid=1 proc /proc && exec "$0" "$@"')
"""Before a command: it may not look at the processes of other users, though it sees that they are there."""
Place = Callable[[str], Path]
Started = subprocess.Popen[str]


@pytest.fixture
def start(new_place: Place) -> Iterator[Callable[..., Started]]:
    """Start code in an isolation; what it prints comes through pipes that end with the last process that has them."""
    begun: list[Started] = []

    def run(code: str, **more: Any) -> Started:
        user, before = more.get("user", 0), more.pop("before", ())
        home, scratch = more.pop("home", None) or new_place("/var/tmp"), new_place("/tmp")
        if user:
            give_to(user, home)
            give_to(user, scratch)
        asked = {"mode": "overlay", "processes": "namespace", "user": 0, "allow_network": False}
        asked |= {"network_refused": False, "scratch": str(scratch / "s"), "home": str(home), "code": code, **more}
        environment = {**os.environ, "PYTHONPATH": str(HERE.parents[2]), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [*before, sys.executable, str(HERE / "inside.py"), json.dumps(asked)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
        begun.append(subprocess.Popen(command, **pipes))
        return begun[-1]

    yield run
    for process in begun:
        process.kill()
        process.communicate(timeout=200)


@pytest.fixture
def inside(start: Callable[..., Started]) -> Callable[..., tuple[int, str]]:
    """(exit code, what was printed)."""

    def run(code: str, **more: Any) -> tuple[int, str]:
        process = start(code, **more)
        printed, errors = process.communicate(timeout=200)
        if "MachineError" in errors:
            pytest.skip(errors.splitlines()[-1])
        return process.returncode, printed + errors

    return run


DETACHED = """
subprocess.Popen(["sleep", "1000"], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    time.sleep(1000)
print("begun", flush=True)
"""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("user", USERS)
def test_detached_processes_end_with_the_script(inside: Any, way: str, user: int) -> None:
    assert inside(DETACHED + "sys.exit(7)", processes=way, user=user) == (7, "begun\n")


@needs_root
def test_they_end_also_where_the_processes_of_others_are_hidden(inside: Any) -> None:
    if subprocess.run([*HIDDEN, "true"], capture_output=True).returncode:
        pytest.skip("no such /proc here")
    detached = DETACHED.replace("1000", "20")
    found = inside(detached + "sys.exit(7)", mode="guard", processes="reaper", user=SOMEBODY, before=HIDDEN)
    assert found == (7, "begun\n")


@pytest.mark.parametrize("way", WAYS)
def test_they_end_with_whoever_is_told_to_end_the_trial(start: Any, way: str) -> None:
    process = start(DETACHED + "time.sleep(1000)", processes=way)
    if process.stdout.readline() != "begun\n":
        pytest.skip(process.stderr.read())
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=200) == ("", "")
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.first_case
def test_the_processor_time_that_they_used_is_the_trials(start: Any, way: str, told: bool) -> None:
    """Or a tune says that others kept the machine busy."""

    def used_seconds() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    before = used_seconds()
    busy = "while time.process_time() < 0.8: pass\nprint('busy', flush=True)\n"
    process = start(busy + "time.sleep(1000)" * told, processes=way)
    if process.stdout.readline() != "busy\n":
        pytest.skip(process.stderr.read())
    if told:
        process.send_signal(signal.SIGTERM)
    process.communicate(timeout=200)
    assert used_seconds() - before >= 0.8


@pytest.mark.parametrize("way", WAYS)
def test_they_end_when_the_tune_is_killed(tmp_path: Path, way: str) -> None:
    """The pipe ends when the last of them has gone."""
    (tmp_path / "home").mkdir()
    asked = {"mode": "overlay", "processes": way, "user": 0, "allow_network": True, "network_refused": False}
    asked |= {"scratch": str(tmp_path / "s"), "home": str(tmp_path / "home"), "code": DETACHED + "time.sleep(1000)"}
    tune = "import subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]])"
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[2])}
    command = [sys.executable, "-c", tune, str(HERE / "inside.py"), json.dumps(asked)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        if process.stdout.readline() != b"begun\n":
            pytest.skip("no private mounts here")
        process.kill()
        assert process.stdout.read() == b""


@pytest.mark.parametrize("way", WAYS)
def test_a_signal_that_kills_the_script_is_seen(inside: Any, way: str) -> None:
    assert inside("os.kill(os.getpid(), signal.SIGSEGV)", processes=way) == (-signal.SIGSEGV, "")


@pytest.mark.parametrize("user", USERS)
def test_other_processes_can_be_neither_seen_nor_signalled(inside: Any, user: int) -> None:
    code = f"""
try:
    os.kill({os.getpid()}, 0)
except ProcessLookupError:
    print(len([name for name in os.listdir("/proc") if name.isdigit()]), os.getppid())
"""
    assert inside(code, user=user) == (0, "2 1\n")


SHARED_MEMORY = """
precious, new = Path(NAME), Path(NAME + "-new")
assert precious.read_text() == "precious"
precious.unlink()
new.write_text("x")
tracker = multiprocessing.resource_tracker  # a program of its own, which another user may not be able to start
tracker.register = tracker.unregister = lambda *named: None
block = multiprocessing.shared_memory.SharedMemory(create=True, size=1 << 20)
block.buf[:4] = b"abcd"
def worker(queue, lock):
    with lock:
        again = multiprocessing.shared_memory.SharedMemory(block.name)
        queue.put(bytes(again.buf[:4]))
        again.close()
context = multiprocessing.get_context("fork")
queue, lock = context.Queue(), context.Lock()
process = context.Process(target=worker, args=(queue, lock))
process.start()
print(queue.get(), os.path.exists(precious), os.path.exists(new))
process.join()
block.close()
block.unlink()
"""


@pytest.mark.parametrize("user", USERS)
def test_shared_memory_works_and_the_users_is_left_alone(inside: Any, user: int) -> None:
    precious = Path(f"/dev/shm/flatout-test-{os.getpid()}")
    try:
        precious.write_text("precious")
        os.chown(precious, user, user)
        code = SHARED_MEMORY.replace("NAME", repr(str(precious)))
        assert inside(code, user=user) == (0, "b'abcd' False True\n")
        assert precious.read_text() == "precious"
        assert not Path(f"{precious}-new").exists()
    finally:
        precious.unlink()


NETWORK = """
try:
    socket.create_connection(("192.0.2.1", 80), 1)
except OSError as error:
    print(error.strerror)
server = socket.create_server(("127.0.0.1", PORT))
client = socket.create_connection(("127.0.0.1", PORT))
client.sendall(b"x")
print(server.accept()[0].recv(1), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("user", USERS)
def test_two_trials_have_the_same_port_and_no_way_out(start: Any, user: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:  # by the user: no trial gets in its way either
        code = NETWORK.replace("PORT", str(taken.getsockname()[1]))
        both = [start(code.replace("sys.stdin.read()", "time.sleep(1000)"), user=user) for _ in range(2)]
        for process in both:
            first = process.stdout.readline()
            if not first:
                pytest.skip(process.stderr.read())
            assert (first, process.stdout.readline()) == ("Network is unreachable\n", "b'x'\n")


def test_the_network_is_there_where_it_is_allowed(inside: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = f"socket.create_connection(('127.0.0.1', {server.getsockname()[1]})); print(isolation.network)"
        assert inside(code, allow_network=True) == (0, "machine\n")


@pytest.mark.parametrize("mode", ["overlay", "guard"])
def test_without_a_network_of_its_own_no_trial(start: Any, mode: str) -> None:
    process = start("print('ran')", mode=mode, processes="reaper", network_refused=True)
    printed, errors = process.communicate(timeout=200)
    assert printed == ""
    assert "pass --allow-network" in errors
    assert process.returncode == 1


def test_sockets_and_pipes_of_other_programs_are_cut_off(inside: Any, new_place: Place) -> None:
    home = new_place("/var/tmp")
    os.mkfifo(home / "pipe")
    reader = os.open(home / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as abstract:
        server.bind(str(home / "socket"))
        server.listen()
        abstract.bind(f"\0flatout-{os.getpid()}")
        abstract.listen()
        code = f"""
for address in ("socket", "\\0flatout-{os.getpid()}"):
    try:
        socket.socket(socket.AF_UNIX).connect(address)
        print("connected", repr(address))
    except ConnectionRefusedError:
        pass
try:
    os.open("pipe", os.O_WRONLY | os.O_NONBLOCK)
    print("opened")
except OSError:
    pass
"""
        assert inside(code, home=home) == (0, "")
    os.close(reader)


@pytest.mark.parametrize("user", USERS)
def test_no_disk_and_no_setting_of_the_kernel_can_be_reached(inside: Any, user: int) -> None:
    code = """
import stat
disks = [path for path in Path("/dev").iterdir() if stat.S_ISBLK(path.stat().st_mode)]
for path in [*disks, Path("/dev/new"), Path("/proc/sys/vm/drop_caches"), Path("/sys/new")]:
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT))
        print("opened", path)
    except OSError:
        pass
master, slave = pty.openpty()
os.write(slave, b"x")
print(os.read(master, 1), os.ttyname(slave), len(os.urandom(3)), Path(os.devnull).write_text("x"))
"""
    assert inside(code, user=user) == (0, "b'x' /dev/pts/0 3 1\n")


@needs_root
def test_devices_of_accelerators_are_kept_and_those_of_disks_are_not(tmp_path: Path) -> None:
    modes = {"nvidia0": 0o660, "nvidia-caps/nvidia-cap1": 0o400, "null": 0o666, "mem": 0o640, "input/mouse0": 0o660}
    for name, mode in modes.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        try:
            os.mknod(tmp_path / name, stat.S_IFCHR | mode, os.makedev(1, 3))
        except PermissionError:
            pytest.skip("no device can be made here")
        (tmp_path / name).chmod(mode)
    os.mknod(tmp_path / "nvidia-disk", stat.S_IFBLK | 0o666, os.makedev(1, 0))
    kept = [os.path.relpath(path, tmp_path) for path in devices.wanted_devices(str(tmp_path))]
    assert kept == ["null", "nvidia-caps/nvidia-cap1", "nvidia0"]
