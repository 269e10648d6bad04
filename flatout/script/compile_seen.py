"""Has a script asked for torch.compile? From then on what it traces and guards must not change under it."""

from __future__ import annotations

import sys


def compile_was_asked_for() -> bool:
    """Has the script called torch.compile, or had it trace anything? An optimizer alone imports it too."""
    frames = sys.modules.get("torch._dynamo.utils")
    backends = getattr(sys.modules.get("torch._dynamo.eval_frame"), "cached_backends", {})
    traced = frames is not None and frames.counters["frames"]["total"] > 0
    return traced or any(backend is not None for backend in backends.values())
