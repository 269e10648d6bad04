"""A script's own torch.compile: what it has traced and guards must not change, and nothing of ours may be compiled in
place of the script's functions."""

from __future__ import annotations

import sys
from types import CodeType
from typing import Protocol


class _Function(Protocol):
    """A function or a method."""

    @property
    def __code__(self) -> CodeType: ...


def compile_was_asked_for() -> bool:
    """Has the script called torch.compile, or has anything been traced? Its import proves nothing: optimizers import
    it."""
    frames = sys.modules.get("torch._dynamo.utils")
    backends = getattr(sys.modules.get("torch._dynamo.eval_frame"), "cached_backends", {})
    traced = frames is not None and frames.counters["frames"]["total"] > 0
    return traced or any(backend is not None for backend in backends.values())


def never_compiled(*functions: _Function) -> None:
    """Make torch.compile skip the frames of these and start with what they call.

    Otherwise a wrapper around all modules would be compiled instead of them: all would share the cache of its code
    (torch gives up on the ninth), and tracebacks would lack their frames.
    """
    import torch._C._dynamo.eval_frame as frames  # the part in C, which is loaded with torch

    skipped = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    for function in functions:
        frames.set_code_exec_strategy(function.__code__, skipped)
