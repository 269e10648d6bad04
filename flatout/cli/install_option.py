"""`flatout check --install pip|conda`: the lines that install torch on this machine, and nothing else."""

from __future__ import annotations

from typing import Annotated

import typer

InstallOption = Annotated[
    str | None,
    typer.Option("--install", metavar="pip|conda", help="Print the lines that install torch on this machine."),
]
TorchOption = Annotated[
    str | None,
    typer.Option("--torch", metavar="VERSION", help="With --install: this version instead of the installed one."),
]


def print_install_lines(installer: str, torch: str | None, *, json: bool) -> int:
    """On stdout the commands alone, as comments what they are for. Exit code: 0, or 1 where they are unknown."""
    from flatout.machine.detect import detect
    from flatout.machine.torch_builds import install_advice
    from flatout.report.document import document, to_text
    from flatout.report.install_text import install_text

    advice = install_advice(detect(), installer, torch)
    print(to_text(document("install", advice.to_json())) if json else install_text(advice))
    return 0 if advice.lines else 1
