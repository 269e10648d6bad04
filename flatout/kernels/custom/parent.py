"""`flatout.kernels.check`: starts the process that runs the user's code, and survives its death.

A kernel may crash, hang or write where it likes, so nothing of it runs here. Where a call ends its process, further
processes look for the smallest such case; where the extension was built by `flatout.kernels.load`, it runs once more
under AddressSanitizer, on the CPU of a Linux machine.
"""

from __future__ import annotations

import json
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import torch

from flatout.arguments import as_device, as_seconds, as_whole_number
from flatout.environment import kernel_environment
from flatout.errors import TrialError, UsageError
from flatout.kernels.custom import doctor, sanitizer
from flatout.kernels.custom.definition import split_target
from flatout.kernels.custom.result import CheckMessage, KernelCheck, KernelFailure, KernelProperty, KernelSpeed
from flatout.kernels.custom.session import Asked
from flatout.tracebacks import is_users_file

Progress = Callable[[str], None]

MODULE = "flatout.kernels.custom.child"
LOCK_SECONDS = 20.0
"""Of silence while the file is loaded, before locks of other builds are looked for."""
NARROWINGS, HANG_SECONDS = 3, 5.0
"""Further processes to find a smaller case that crashes or hangs, and how long each of its calls may take."""
ENDING_SECONDS = 30.0
POLL_SECONDS = 0.5


def check(
    target: str | Path,
    *,
    device: torch.device | str | None = None,
    seed: int = 0,
    cases: int = 24,
    quick: bool = False,
    timing: bool = True,
    sanitize: bool = True,
    call_seconds: float = 60.0,
    progress: Progress | None = None,
) -> KernelCheck:
    """Check a kernel against its reference, and time it: `target` is FILE.py or FILE.py:NAME.

    The file is executed in a process of its own. It defines `kernel`, `reference` (the same in plain PyTorch) and
    `inputs`, such as ("float[rows, width]", "int64[rows] < width").

    device: by default the first GPU, else the CPU. cases: random cases for each dtype, besides edge sizes, layouts and
    extreme values. quick: fewer sizes, no compiler. timing, sanitize: whether to time it, and to run C++ under
    AddressSanitizer. call_seconds: a call that takes longer hangs. progress: called with what is being done.

    Returns a KernelCheck: `ok`, `properties`, `failures`, `speeds`. UsageError: the file cannot be used.
    """
    split_target(str(target))
    on = as_device(device) if device is not None else torch.device("cuda" if torch.cuda.is_available() else "cpu")
    asked = Asked(
        target=str(target),
        mode="check",
        device=str(on),
        seed=as_whole_number(seed, "seed", least=0),
        cases=as_whole_number(cases, "cases", least=0),
        quick=quick,
        timing=timing,
        call_seconds=as_seconds(call_seconds, "call_seconds"),
        candidates=[],
        at="",
    )
    begun, said = time.perf_counter(), progress or (lambda text: None)
    run = _run(asked, said)
    properties = [*run.properties]
    if run.end is not None:
        properties.append(_of_crash(asked, run, said))
    if (checked := _sanitizer(asked, run, said, wanted=sanitize)) is not None:
        properties.append(checked)
    return KernelCheck(
        target=str(target),
        device=str(on),
        torch_version=torch.__version__,
        seed=seed,
        properties=tuple(properties),
        speeds=tuple(run.speeds),
        speed_reason="" if run.speeds else run.speed_reason or "the check did not get that far",
        notes=tuple(run.notes),
        seconds=time.perf_counter() - begun,
    )


@dataclass(frozen=True, kw_only=True)
class End:
    """How a process ended before its time."""

    what: str
    """'crashes with SIGSEGV at scale.py, line 3'."""
    hangs: bool = False


@dataclass
class Run:
    """What one process told, and how it ended."""

    properties: list[KernelProperty] = field(default_factory=list)
    speeds: list[KernelSpeed] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    speed_reason: str = ""
    extensions: list[str] = field(default_factory=list)
    at: CheckMessage = field(default_factory=dict)
    """The last message of what was about to be done."""
    end: End | None = None
    """None: it came to its end."""
    errors: str = ""
    """What it wrote to stderr."""

    def take(self, message: CheckMessage, progress: Progress) -> None:
        if "at" in message:
            self.at = message
            progress(message["text"] if message["at"] == "load" else f"{message['at']}: {message['text']}")
        elif "property" in message:
            self.properties.append(KernelProperty.from_json(message["property"]))
            self.extensions += message.get("extensions", [])
        elif "speed" in message:
            self.speeds.append(KernelSpeed.from_json(message["speed"]))
        elif "note" in message:
            self.notes.append(message["note"])
        elif "speed_reason" in message:
            self.speed_reason = message["speed_reason"]
        elif "error" in message:
            raise UsageError(**message["error"])
        elif "broken" in message:
            doing = self.at.get("text", "the start")
            raise TrialError(f"the check itself failed at {doing}: {message['broken']}", remedy="please report it")


def _run(asked: Asked, progress: Progress, *, library: str | None = None) -> Run:
    """One process, to its end or until it hangs. library: AddressSanitizer's, to run under it."""
    run = Run()
    command = [sys.executable, "-P", "-X", "faulthandler", "-m", MODULE, json.dumps(asked)]
    environment = kernel_environment(interprets_triton=asked["device"] == "cpu", sanitizer=library)
    with tempfile.TemporaryFile() as errors:
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, env=environment
        ) as process:
            try:
                run.end = _followed(process, run, progress)
            finally:
                process.kill()
        errors.seek(0)
        run.errors = errors.read().decode(errors="replace")
    if run.end is not None and not run.end.hangs:
        run.end = End(what=_how_it_died(process.returncode, run.errors))
    return run


def _followed(process: subprocess.Popen[bytes], run: Run, progress: Progress) -> End | None:
    """Reads its messages; None: it is done."""
    assert process.stdout is not None, "it is a pipe"
    lines: queue.Queue[bytes | None] = queue.Queue()
    threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
    silent_since, locks_seen = time.monotonic(), False
    while True:
        try:
            line = lines.get(timeout=POLL_SECONDS)
        except queue.Empty:
            silent = time.monotonic() - silent_since
            loading = run.at.get("at") == "load" and "building" not in run.at["text"]
            if loading and silent > LOCK_SECONDS and not locks_seen:
                locks_seen = True
                if locks := doctor.stale_locks(silent):
                    return End(what=f"hangs: {locks[0].text()}; remove that file", hangs=True)
            limit = run.at.get("seconds", ENDING_SECONDS + 600)
            if silent > limit:
                return End(what=f"hangs: no end after {limit:.0f} s", hangs=True)
            continue
        silent_since = time.monotonic()
        if line is None:
            process.wait()
            return End(what="")
        message = json.loads(line)
        if "done" in message:
            return None
        run.take(message, progress)


def _read(stream: IO[bytes], lines: queue.Queue[bytes | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _how_it_died(returncode: int, errors: str) -> str:
    """'crashes with SIGSEGV at scale.py, line 3': the signal, and the user's line, from Python's own fault handler."""
    if report := sanitizer.read_report(errors):
        return report
    places = re.findall(r'File "(?P<file>[^"]+)", line (?P<line>\d+)', errors)
    own = [f"{Path(file).name}, line {line}" for file, line in places if is_users_file(file)]
    at = f" at {own[0]}" if own else ""
    if returncode < 0:
        name = signal.Signals(-returncode).name if -returncode in set(signal.Signals) else f"signal {-returncode}"
        return f"crashes with {name}{at}" + _of_abort(errors)
    last = next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), "")
    return f"ends the process with exit code {returncode}{at}" + (f": {last}" if last else "")


def _of_abort(errors: str) -> str:
    """What the C library found, if it did."""
    found = re.search(
        r"^(?:free\(\)|malloc|realloc|double free|corrupted|munmap_chunk|munmap).*$", errors, re.MULTILINE
    )
    return f": {found[0]}; it has written outside of its memory" if found else ""


# a call that ended its process


def _of_crash(asked: Asked, run: Run, progress: Progress) -> KernelProperty:
    assert run.end is not None, "it crashed"
    check_name = run.at.get("at", "load")
    case = run.at.get("case")
    if case is None:
        doing = run.at.get("text", "starting")
        what = f"{doing}: {run.end.what}"
        return KernelProperty(name="load", verdict="failed", failed=1, failure=KernelFailure(what=what))
    at, end = _narrowed(asked, run, progress)
    failure = KernelFailure(what=end.what, case=at["text"], reproduce=at["reproduce"])
    return KernelProperty(name=check_name, verdict="failed", failed=1, failure=failure)


def _narrowed(asked: Asked, run: Run, progress: Progress) -> tuple[CheckMessage, End]:
    """The smallest case that ends its process in the same way, as far as a few processes find one."""
    assert run.end is not None, "it crashed"
    best, end = run.at, run.end
    if best["at"] not in ("forward", "memory", "non-finite", "gradient", "sanitizer"):
        return best, end
    for _ in range(1 if end.hangs else NARROWINGS):
        candidates = list(_smaller(best["case"]))
        seconds = min(asked["call_seconds"], HANG_SECONDS)
        more = Asked(**{**asked, "mode": "narrow", "candidates": candidates, "at": best["at"], "call_seconds": seconds})
        again = _run(more, lambda text: progress(f"smallest case: {text}"))
        if again.end is None or again.at.get("case") is None or again.end.hangs != end.hangs:
            break
        best, end = again.at, again.end
        if end.hangs:
            end = End(what=run.end.what, hangs=True)
    return best, end


def _smaller(case: CheckMessage) -> Iterator[CheckMessage]:
    """Cases with smaller sizes and ordinary layouts, the smallest first. The child leaves out what is not allowed."""
    plain = {**case, "layouts": ["contiguous"] * len(case["layouts"]), "values": "normal"}
    found = [plain]
    for name, size in case["sizes"].items():
        for less in sorted({0, 1, 2, 3, 4, 5, 8, 9, 16, 17, size // 2, size * 3 // 4, size - 2, size - 1}):
            if 0 <= less < size:
                sizes = {**case["sizes"], name: less}
                found += [{**plain, "sizes": sizes}, {**case, "sizes": sizes}]
    yield from sorted(found, key=lambda one: sum(one["sizes"].values()))


# AddressSanitizer


def _sanitizer(asked: Asked, run: Run, progress: Progress, *, wanted: bool) -> KernelProperty | None:
    """None: there is no extension of ours to run under it."""
    if not run.extensions or not asked["device"].startswith("cpu"):
        return None
    if not wanted:
        return KernelProperty(name="sanitizer", verdict="skipped", text="not asked for")
    library, reason = sanitizer.runtime()
    if library is None:
        return KernelProperty(name="sanitizer", verdict="skipped", text=reason)
    more = Asked(**{**asked, "mode": "sanitize"})
    found = _run(more, lambda text: progress(f"under AddressSanitizer: {text}"), library=library)
    passed = [one for one in found.properties if one.name == "sanitizer"]
    if found.end is None and passed:
        return passed[0]
    report = sanitizer.read_report(found.errors)
    if found.end is None or report is None or found.at.get("case") is None:
        why = found.end.what if found.end is not None else "its process ended early"
        return KernelProperty(name="sanitizer", verdict="skipped", text=f"it could not be run: {why}")
    failure = KernelFailure(what=report, case=found.at["text"], reproduce=found.at["reproduce"])
    return KernelProperty(name="sanitizer", verdict="failed", failed=1, failure=failure)
