"""A script's own torch.compile: what it has traced and guards must not change, and nothing of ours may be compiled in
place of the script's functions."""

from __future__ import annotations

from types import CodeType
from typing import Protocol

from flatout.torch_private.compiler import backend_was_made, frames_traced, pass_over_frames


class _Function(Protocol):
    """A function or a method."""

    @property
    def __code__(self) -> CodeType: ...


def compile_was_asked_for() -> bool:
    """Has the script called torch.compile, or has anything been traced? Its import proves nothing: optimizers import
    it."""
    return frames_traced() > 0 or backend_was_made()


def never_compiled(*functions: _Function) -> None:
    """Make torch.compile skip the frames of these and start with what they call.

    Otherwise a wrapper around all modules would be compiled instead of them: all would share the cache of its code
    (torch gives up on the ninth), and tracebacks would lack their frames.
    """
    pass_over_frames(*(function.__code__ for function in functions))
