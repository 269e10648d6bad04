"""A contender in a process of its own, so that none profits from another's allocator, threads or compiled code.

    process = ContenderProcess(contender.prepare, Setup(device="cpu"), {})
    process.wait_until_ready().how
    seconds, loss = process.turn()

A search for settings runs in a process too, which ends with it: what it allocated and compiled is not the contender's.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from flatout.bench.workload import Prepare, Settings, Setup
from flatout.errors import MachineError, TrialError, describe_error
from flatout.signals import ctrl_c_is_ours

WARM_TURNS = 3
LOOK_SECONDS = 1.0
ENDING_SECONDS = 5.0
"""For a process to end by itself: one that is killed leaves semaphores, of which Python warns."""
MOST_VALUES = 65_536
"""Of a contender's outputs that are compared."""
if TYPE_CHECKING:
    from torch import Tensor

Sent: TypeAlias = Any  # whatever the child sends
T = TypeVar("T")

_MISSING = "not installed"


@dataclass(frozen=True, kw_only=True)
class Ready:
    """What a contender says of itself once it is warm."""

    how: str
    first_seconds: float
    """From the start of its preparation to the end of its first turn, compilation included."""


class ContenderProcess:
    """A contender that takes a turn when it is asked to, once it is ready. Raises TrialError where it fails."""

    def __init__(self, prepare: Prepare, setup: Setup, settings: Settings) -> None:
        self._child = _Child(_serve, prepare, setup, settings)

    def wait_until_ready(self) -> Ready:
        """Raises NotInstalled for a missing package."""
        try:
            ready: Ready = self._child.answer()
        except BaseException:  # Ctrl-C too: at its exit Python would wait for it
            self._child.kill()
            raise
        return ready

    @property
    def process_id(self) -> int:
        return self._child.process_id

    def turn(self) -> tuple[float, float | None]:
        """Seconds, and the loss if there is one."""
        seconds, loss = self._child.ask("turn")
        return float(seconds), loss

    def flops(self) -> float | None:
        """Operations of one turn, counted."""
        counted: float | None = self._child.ask("flops")
        return counted

    def outputs(self) -> list[float] | None:
        """What a turn gives, flattened; None where its losses are what is compared."""
        found: list[float] | None = self._child.ask("outputs")
        return found

    def peak_bytes(self) -> int | None:
        """The most memory held since it was warm: of tensors on a GPU, resident in the process on a CPU."""
        held: int | None = self._child.ask("peak")
        return held

    def close(self) -> None:
        self._child.close()


class NotInstalled(MachineError):
    """A contender's package is missing."""


def in_child(function: Callable[..., T], *arguments: object) -> T:
    """What `function`, of a module, returns in a process of its own. TrialError with the reason where it fails."""
    child = _Child(_call, function, arguments)
    try:
        found: T = child.answer()
    except BaseException:
        child.kill()
        raise
    child.close()
    return found


class _Child:
    def __init__(self, work: Callable[..., None], *arguments: object) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        # Not a daemon: those must not have children, and a DataLoader has.
        self._process = context.Process(target=work, args=(there, *arguments))
        with ctrl_c_is_ours():
            self._process.start()
        there.close()

    @property
    def process_id(self) -> int:
        return self._process.pid or 0

    def ask(self, what: str) -> Sent:
        with contextlib.suppress(OSError):  # it has ended: that is the answer
            self._here.send(what)
        return self.answer()

    def answer(self) -> Sent:
        try:
            kind, found = self._here.recv()
        except (EOFError, OSError):
            self._process.join()
            raise TrialError(f"its process ended {_end(self._process.exitcode)}") from None
        if kind == "found":
            return found
        raise NotInstalled(str(found)) if kind == _MISSING else TrialError(str(found))

    def close(self) -> None:
        """It ends by itself where it waits for the next word, and is killed where it is busy."""
        self._here.close()
        self._process.join(ENDING_SECONDS)
        self._process.kill()
        self._process.join()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def _end(code: int | None) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return f"by {name}" + (" (too little memory?)" if name == "SIGKILL" else "")
    return f"with code {code}"


# in the child


def _serve(pipe: Connection, prepare: Prepare, setup: Setup, settings: Settings) -> None:
    from flatout.machine.device import CpuDevice, CudaDevice

    with _answering(pipe):
        device = CudaDevice() if setup.device == "cuda" else CpuDevice()
        began = time.perf_counter()
        prepared = prepare(setup, settings)
        prepared.turn()
        first_seconds = time.perf_counter() - began
        for _ in range(WARM_TURNS - 1):
            prepared.turn()
        device.reset_peak()
        pipe.send(("found", Ready(how=prepared.how, first_seconds=first_seconds)))
        while True:
            wanted = pipe.recv()
            found: object
            if wanted == "turn":
                start = time.perf_counter()
                loss = prepared.turn()
                found = (time.perf_counter() - start, loss)
            elif wanted == "flops":
                found = prepared.flops()
            elif wanted == "peak":
                found = device.memory_peak_bytes()
            else:
                found = None if prepared.outputs is None else _sampled(prepared.outputs())
            pipe.send(("found", found))


def _sampled(outputs: Tensor) -> list[float]:
    """At most about MOST_VALUES of them, evenly spread."""
    flat = outputs.flatten()
    values: list[float] = flat[:: max(1, flat.numel() // MOST_VALUES)].tolist()
    return values


def _call(pipe: Connection, function: Callable[..., object], arguments: tuple[object, ...]) -> None:
    with _answering(pipe):
        pipe.send(("found", function(*arguments)))


def _end_with_parent(parent: int) -> None:
    """A parent that was killed cannot end its children, and a search would go on for minutes."""
    while os.getppid() == parent:
        time.sleep(LOOK_SECONDS)
    os._exit(1)


@contextlib.contextmanager
def _answering(pipe: Connection) -> Iterator[None]:
    """Whatever goes wrong is an answer; what is printed meanwhile does not reach the terminal."""
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing), contextlib.redirect_stderr(nothing):
        try:
            yield
        except EOFError:
            sys.exit(0)  # the parent has gone
        except ImportError as error:
            pipe.send((_MISSING, str(error)))
        except Exception as error:
            pipe.send(("failed", describe_error(error)))
