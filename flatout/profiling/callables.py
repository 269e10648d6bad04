"""Profile any callable: `profile_callable(lambda: train_step(batch))`. Importing this imports torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from flatout.machine.device import wait_for_gpus
from flatout.machine.process_memory import peak_resident_bytes
from flatout.profiling.attribution import runs_compiled_code
from flatout.profiling.following import MOST_OPERATORS, OperatorFollower
from flatout.profiling.profile import Profile
from flatout.profiling.recorded_events import Recording
from flatout.profiling.window import COMPILED, ProfilerWindow, Windows, step_label, steps_to_profile
from flatout.torch_private.compiler import compile_was_asked_for
from flatout.torch_private.dispatch import current_dispatch_mode

WARM_UP_CALLS = 3
FEWEST_TIMED, MOST_TIMED, TIMED_SECONDS = 5, 50, 0.5
NO_LOADER = "unknown, because a callable does not say how many samples it takes"


def profile_callable(
    function: Callable[[], object], *, steps: int, name: str, folder: str, trace: Path | None = None
) -> Profile:
    """Call it a few times: to warm up, timed, followed operator by operator, and under torch's profiler.

    folder: what lines of code are named relative to. trace: where to write a Chrome trace. What the function raises
    passes through.
    """
    for _ in range(WARM_UP_CALLS):
        function()
    timed = _timed(function)
    follower, not_followed = _followed(function, folder)
    windows = Windows(
        name=name,
        device=_device_name(follower, None),
        step_kind="call",
        asked=steps,
        warm_up_steps=WARM_UP_CALLS,
        timed_seconds=timed,
        follower=follower,
        folder=folder,
        peak_resident_bytes=peak_resident_bytes(),
        reasons=dict.fromkeys(("samples_per_step", "tokens_per_step"), NO_LOADER),
    )
    if not_followed:
        windows.reasons |= dict.fromkeys(("lines", "modules", "flops", "bytes"), not_followed)
    calls = steps_to_profile(steps, follower.count if follower is not None else None)
    window = ProfilerWindow(on_gpu=torch.cuda.is_initialized())
    if not calls:
        windows.obstacle = f"unknown, because one call has more than {MOST_OPERATORS:,} operators"
        return windows.profile()
    wait_for_gpus()
    window.start()
    windows.obstacle = window.obstacle
    if windows.obstacle:
        return windows.profile()
    seconds = []
    try:
        function()  # the profiler's first call is slower
        for number in range(calls):
            began = time.perf_counter()
            with step_label(number):
                function()
            wait_for_gpus()
            seconds.append(time.perf_counter() - began)
    finally:
        recording = window.stop(steps=len(seconds))
    windows.obstacle = window.obstacle
    if recording is None:
        return windows.profile()
    windows.recording, windows.profiled_seconds = recording, seconds
    windows.device = _device_name(follower, recording)
    if trace is not None:
        window.export(trace)
    return windows.profile()


def _device_name(follower: OperatorFollower | None, recording: Recording | None) -> str:
    """'cpu', or the GPU that operators ran on. Those of a CUDA graph are not followed; their kernels are seen."""
    if not torch.cuda.is_initialized():
        return "cpu"
    current = torch.cuda.current_device()
    seen = sorted(one.index for one in follower.devices if one.type == "cuda") if follower is not None else []
    if follower is not None and not seen and not (recording is not None and recording.kernels):
        return "cpu"
    return f"cuda:{current if current in seen or not seen else seen[0]}"


def _timed(function: Callable[[], object]) -> list[float]:
    seconds: list[float] = []
    began = time.perf_counter()
    while len(seconds) < FEWEST_TIMED or (len(seconds) < MOST_TIMED and time.perf_counter() - began < TIMED_SECONDS):
        wait_for_gpus()
        start = time.perf_counter()
        function()
        wait_for_gpus()
        seconds.append(time.perf_counter() - start)
    return seconds


def _followed(function: Callable[[], object], folder: str) -> tuple[OperatorFollower | None, str]:
    """(None, why) where nothing may follow: compiled code would be compiled again with what follows in it."""
    if current_dispatch_mode() is not None:
        return None, "unknown, because another dispatch mode is on"
    if compile_was_asked_for() and _runs_compiled_code(function):
        return None, COMPILED
    follower = OperatorFollower(prefer=folder)
    with follower:
        function()
    return follower, ""


def _runs_compiled_code(function: Callable[[], object]) -> bool:
    window = ProfilerWindow(on_gpu=False)
    window.start()
    try:
        function()
    finally:
        recording = window.stop()
    return recording is not None and runs_compiled_code(recording)
