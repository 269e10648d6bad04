"""A contender in a process of its own: its answers, and every way in which it ends."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from flatout.bench.process import ContenderProcess, NotInstalled, _end, in_child
from flatout.bench.workload import Setup
from flatout.errors import TrialError

TINY = """
import os, signal, sys, torch
from flatout.bench.workload import Prepared

def prepare(setup, settings):
    if settings.get("missing"):
        import a_package_that_is_not_there
    if settings.get("fails"):
        raise ValueError("no such thing\\nmore lines")
    print("chatter")
    turns = []
    def turn():
        turns.append(0)
        if settings.get("dies") and len(turns) > 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return float(len(turns))
    return Prepared(turn=turn, how="tiny", outputs=lambda: torch.arange(200_000.), flops=lambda: 7.0)

def double(number):
    return 2 * number

def epoch_of_two_workers():
    from torch.utils.data import DataLoader
    return len(list(DataLoader(torch.arange(8), batch_size=2, num_workers=2)))
"""
CPU = Setup(device="cpu")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """A module that other processes can import as well."""
    folder = tmp_path_factory.mktemp("contenders")
    (folder / "tiny_contender.py").write_text(TINY)
    sys.path.insert(0, str(folder))
    try:
        yield __import__("tiny_contender")
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop("tiny_contender")


@pytest.mark.slow
def test_a_contender_answers_and_is_closed(tiny: object, capfd: pytest.CaptureFixture[str]) -> None:
    process = ContenderProcess(tiny.prepare, CPU, {})  # type: ignore[attr-defined]
    ready = process.wait_until_ready()
    assert ready.how == "tiny"
    assert ready.first_seconds > 0
    seconds, loss = process.turn()
    assert seconds >= 0
    assert loss == 4.0  # after three to warm up
    assert process.flops() == 7.0
    outputs = process.outputs()
    assert outputs is not None
    assert 65_536 <= len(outputs) < 2 * 65_536
    peak = process.peak_bytes()
    assert peak is None or peak > 1 << 20
    number = process.process_id
    process.close()
    assert not psutil.pid_exists(number)
    assert capfd.readouterr().out == ""


@pytest.mark.slow
def test_failures_have_reasons(tiny: object) -> None:
    prepare = tiny.prepare  # type: ignore[attr-defined]
    with pytest.raises(NotInstalled, match="a_package_that_is_not_there"):
        ContenderProcess(prepare, CPU, {"missing": True}).wait_until_ready()
    with pytest.raises(TrialError, match=r"^ValueError: no such thing$"):
        ContenderProcess(prepare, CPU, {"fails": True}).wait_until_ready()
    process = ContenderProcess(prepare, CPU, {"dies": True})
    process.wait_until_ready()
    with pytest.raises(TrialError, match="ended by SIGKILL"):
        process.turn()


@pytest.mark.slow
def test_ctrl_c_is_the_parents_also_while_a_contender_loads(tiny: object) -> None:
    before = signal.getsignal(signal.SIGINT)
    process = ContenderProcess(tiny.prepare, CPU, {})  # type: ignore[attr-defined]
    assert signal.getsignal(signal.SIGINT) is before
    os.kill(process.process_id, signal.SIGINT)
    assert process.wait_until_ready().how == "tiny"
    process.close()


@pytest.mark.slow
def test_a_function_runs_in_a_process_of_its_own(tiny: object) -> None:
    assert in_child(tiny.double, 21) == 42  # type: ignore[attr-defined]
    assert in_child(tiny.epoch_of_two_workers) == 4  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="ends its parent")
def test_a_contender_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    (tmp_path / "tiny_contender.py").write_text(TINY)
    script = tmp_path / "parent.py"
    script.write_text(
        "import sys, time\n"
        "from flatout.bench.process import ContenderProcess\n"
        "from flatout.bench.workload import Setup\n"
        "import tiny_contender\n"
        "if __name__ == '__main__':\n"
        "    process = ContenderProcess(tiny_contender.prepare, Setup(device='cpu'), {})\n"
        "    process.wait_until_ready()\n"
        "    print(process.process_id, flush=True)\n"
        "    time.sleep(600)\n"
    )
    import subprocess

    paths = os.pathsep.join([str(Path(__file__).parents[2]), str(tmp_path)])
    command, environment = [sys.executable, str(script)], {**os.environ, "PYTHONPATH": paths}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 60
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "it goes on"
        time.sleep(0.1)


def test_an_end_by_a_signal_without_a_name() -> None:
    assert [_end(code) for code in (-9, -35, 3)] == ["by SIGKILL (too little memory?)", "by signal 35", "with code 3"]
