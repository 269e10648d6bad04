"""A script's own torch.compile. What it has traced and guards must not change under it, and nothing of ours may be
compiled in place of the script's functions."""

from __future__ import annotations

import sys
from types import CodeType
from typing import Protocol


class _Function(Protocol):
    """A function or a method."""

    @property
    def __code__(self) -> CodeType: ...


def compile_was_asked_for() -> bool:
    """Has the script called torch.compile, or had it trace anything? An optimizer alone imports it too."""
    frames = sys.modules.get("torch._dynamo.utils")
    backends = getattr(sys.modules.get("torch._dynamo.eval_frame"), "cached_backends", {})
    traced = frames is not None and frames.counters["frames"]["total"] > 0
    return traced or any(backend is not None for backend in backends.values())


def never_compiled(*functions: _Function) -> None:
    """torch.compile passes over the frames of these and starts with what they call.

    A wrapper around all modules would otherwise be what is compiled: all of them would share the one cache of its code
    (torch gives up on the ninth), and stand in tracebacks without their own frames.
    """
    import torch._C._dynamo.eval_frame as frames  # the part in C, which is loaded with torch

    skipped = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    for function in functions:
        frames.set_code_exec_strategy(function.__code__, skipped)
