"""A script's own torch.compile. What it has traced and guards must not change under it, and nothing of ours may be
compiled in place of the script's functions."""

from __future__ import annotations

from typing import Any

from flatout.torch_private.compiler import backend_was_made, frames_traced, pass_over_frames


def compile_was_asked_for() -> bool:
    """Has the script called torch.compile, or had it trace anything? An optimizer alone imports it too."""
    return frames_traced() > 0 or backend_was_made()


def never_compiled(*functions: Any) -> None:
    """torch.compile passes over the frames of these and starts with what they call.

    A wrapper around all modules would otherwise be what is compiled: all of them would share the one cache of its code
    (torch gives up on the ninth), and stand in tracebacks without their own frames.
    """
    pass_over_frames(*(function.__code__ for function in functions))
