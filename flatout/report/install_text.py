"""The lines that install torch, with what they are for as comments: they can be pasted into a shell."""

from __future__ import annotations

from flatout.machine.torch_builds import InstallAdvice


def install_text(advice: InstallAdvice) -> str:
    """For people and shells."""
    if not advice.lines:
        return f"# torch {advice.torch}: unknown, because {advice.reason}"
    return "\n".join(
        [f"# torch {advice.torch}: {advice.reason}", *advice.lines, *(f"# source: {one}" for one in advice.sources)]
    )
