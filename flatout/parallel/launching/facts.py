"""What has to be alike on all machines of a job, and what differs between them."""

from __future__ import annotations

import hashlib
import platform
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flatout import __version__
from flatout.errors import FlatoutError, MachineError, UsageError
from flatout.machine.detect import torch_version
from flatout.parallel.launch_request import Launch

SHORT = 12
"""Hexadecimal digits of a digest that are shown."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """One machine, as far as its ranks have to go with those of others."""

    host: str
    ranks: int
    gpus: int | None
    """None: not looked for."""
    python: str
    """3.11, without the last part: those differ in bugs only."""
    torch: str | None
    flatout: str
    script: str | None
    """Digest of the file; None: there is none to compare."""
    plan: str | None


def facts_of(request: Launch, *, gpus: int | None) -> Facts:
    """This machine's, for that job."""
    return Facts(
        host=socket.gethostname() or "unnamed",
        ranks=request.nproc_per_node,
        gpus=gpus,
        python=".".join(platform.python_version_tuple()[:2]),
        torch=torch_version(),
        flatout=__version__,
        script=_digest(request.script),
        plan=_digest(request.plan),
    )


def _digest(path: Path | None) -> str | None:
    try:
        return None if path is None else hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def first_difference(machines: Sequence[tuple[int, Facts]]) -> FlatoutError | None:
    """Between machine 0, which is the first, and any of the others; None: they are alike."""
    (_, zero), *others = machines
    for number, other in others:
        if (found := _difference(zero, other, f"machine {number} ({other.host})")) is not None:
            return found
    return None


def _difference(zero: Facts, other: Facts, name: str) -> FlatoutError | None:
    here = f"machine 0 ({zero.host})"
    for package, its, ours in (
        ("Python", other.python, zero.python),
        ("torch", other.torch, zero.torch),
        ("Flatout", other.flatout, zero.flatout),
    ):
        if its != ours:
            return MachineError(
                f"{name} has {package} {its or '(none)'}, {here} has {ours or '(none)'}",
                limit="ranks that train together run the same versions",
                remedy=f"install the same {package} on both",
            )
    for what, its, ours, remedy in (
        ("script", other.script, zero.script, "copy one of the two"),
        ("plan", other.plan, zero.plan, "copy flatout.toml from one to the other"),
    ):
        if its != ours:
            return UsageError(
                f"{name} has another {what} ({_short(its)}) than {here} ({_short(ours)})",
                limit=f"all ranks run the same {what}",
                remedy=f"{remedy}, or put it on a file system that both share",
            )
    if other.ranks != zero.ranks:
        least = min(other.ranks, zero.ranks)
        return UsageError(
            f"{name} would start {_counted(other)}, {here} {_counted(zero)}",
            limit="each machine starts the same number",
            remedy=f"pass --nproc-per-node {least} on all machines",
        )
    return None


def _short(digest: str | None) -> str:
    return digest[:SHORT] if digest else "none"


def _counted(facts: Facts) -> str:
    gpus = "" if facts.gpus is None else f" and has {facts.gpus} GPU{'s' * (facts.gpus != 1)}"
    return f"{facts.ranks} rank{'s' * (facts.ranks != 1)}{gpus}"
