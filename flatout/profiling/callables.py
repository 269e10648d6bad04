"""Profile any callable: `profile_callable(lambda: train_step(batch))`. Importing this imports torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from flatout.machine.device import CpuDevice, CudaDevice, Device
from flatout.machine.process_memory import peak_resident_bytes
from flatout.profiling.following import MOST_OPERATORS, OperatorFollower
from flatout.profiling.profile import Profile
from flatout.profiling.window import ProfilerWindow, Windows, steps_to_profile
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
    device = _device()
    timed = _timed(function, device)
    follower, not_followed = _followed(function, folder)
    if follower is not None and device.kind == "cuda" and "cuda" not in follower.devices:
        device = CpuDevice()
    windows = Windows(
        name=name,
        device=device.name,
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
    window = ProfilerWindow(on_gpu=device.kind == "cuda")
    if not calls:
        windows.obstacle = f"unknown, because one call has more than {MOST_OPERATORS:,} operators"
        return windows.profile()
    device.synchronize()
    window.start()
    windows.obstacle = window.obstacle
    if windows.obstacle:
        return windows.profile()
    seconds = []
    try:
        function()  # the profiler's first call is slower
        for number in range(calls):
            began = time.perf_counter()
            with torch.profiler.record_function(f"ProfilerStep#{number}"):
                function()
            device.synchronize()
            seconds.append(time.perf_counter() - began)
    finally:
        recording = window.stop(steps=len(seconds))
    windows.recording, windows.profiled_seconds = recording, seconds
    if trace is not None:
        window.export(trace)
    return windows.profile()


def _device() -> Device:
    """The GPU, where the function has started CUDA."""
    return CudaDevice(torch.cuda.current_device()) if torch.cuda.is_initialized() else CpuDevice()


def _timed(function: Callable[[], object], device: Device) -> list[float]:
    seconds: list[float] = []
    began = time.perf_counter()
    while len(seconds) < FEWEST_TIMED or (len(seconds) < MOST_TIMED and time.perf_counter() - began < TIMED_SECONDS):
        device.synchronize()
        start = time.perf_counter()
        function()
        device.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds


def _followed(function: Callable[[], object], folder: str) -> tuple[OperatorFollower | None, str]:
    """(None, why) where nothing may follow."""
    if current_dispatch_mode() is not None:
        return None, "unknown, because another dispatch mode is on"
    follower = OperatorFollower(prefer=folder)
    with follower:
        function()
    return follower, ""
