"""The scripts, and what each of them says of itself in the comments at its top.

    # subject: missing-zero-grad          the name of the finding that a faulty script asks for
    # also: python-time                   names that a reader would accept as well (optional)
    # follows: loss-not-falling           what the fault leads to: true, but not the answer (optional)
    # thread: https://github.com/...      the report that the situation was taken from, or 'own'
    # steps: 240                          calls of Optimizer.step
    # gain: yes                           whether the corrected version is faster
    # device: cpu                         or cuda
    # needs: matplotlib                   packages besides torch, numpy and scikit-learn, or 'amx' (optional)
    # what: ...                           the fault in a sentence; `tricky: ...` where there is none

A line of a faulty script that a finding may name ends with `# <- here`. A pair `<name>/faulty.py`, `<name>/healthy.py`
differs by the fix alone. The scripts in `healthy/` look suspicious and are fine. Those under `held_out/` were written
without knowing how the checks decide.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flatout.machine.detect import detect

CORPUS = Path(__file__).parent / "corpus"
HELD_OUT = Path(__file__).parent / "held_out"
MARK = re.compile(r"# <- here$")
HEADER = re.compile(r"# ([a-z]+): (.*)")
AMX = "amx"
"""A need that is no package: the fault is this processor's."""
Role = Literal["faulty", "healthy", "alone"]
"""'healthy' is the corrected version of a faulty script; 'alone' has no other version."""

_SUBJECTS = """
starved-loader per-sample-fetch worker-restart slow-transform pageable-copies repeated-to hidden-sync model-on-cpu
mixed-devices fp32-matmul unaligned-shapes padding-waste tiny-batch recompilations graph-breaks fp16-without-scaler
clip-before-unscale clip-before-backward missing-zero-grad scheduler-order accumulation-not-averaged
accumulation-without-no-sync evaluation-with-grad evaluation-in-train-mode training-in-eval-mode
parameters-not-in-optimizer modules-made-in-forward needless-retain-graph needless-find-unused-parameters
data-parallel channels-last-missing cudnn-benchmark-changing-shapes denormals thread-oversubscription huge-softmax
unfused-attention memory-leak allocator-churn costly-checkpointing graph-kept-by-logging anomaly-mode python-time
plotting-time logging-time disk-time no-seed loss-not-falling vanishing-gradients exploding-gradients half-weights
optimizer-made-in-each-step zero-grad-fills reserved-unused slower-on-gpu hand-written-layer debug-mode
wrong-lstm-gradients fused-sgd-in-16-bits
"""
SUBJECTS = frozenset(_SUBJECTS.split())
"""Names of findings that accuse a script."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """One script of the corpus."""

    path: Path
    name: str
    """Such as 'missing-zero-grad/faulty', 'healthy/gan', 'gpu/hidden-sync/healthy'."""
    role: Role
    subject: str | None
    """None: alone."""
    also: frozenset[str]
    follows: frozenset[str]
    thread: str | None
    """None: not taken from a report."""
    steps: int
    faster_when_fixed: bool
    device: str
    """'cpu' or 'cuda'."""
    needs: tuple[str, ...]
    marked_lines: tuple[int, ...]

    @property
    def pair(self) -> str:
        """What both versions of a script share."""
        return self.name.rpartition("/")[0]

    @property
    def accepted(self) -> frozenset[str]:
        return self.also if self.subject is None else self.also | {self.subject}

    @property
    def fingerprint(self) -> str:
        """Changes with the text of the script."""
        return hashlib.sha256(self.path.read_bytes()).hexdigest()[:16]

    def why_not_here(self, gpu: bool) -> str | None:
        """Why it cannot run on this machine; None if it can."""
        if self.device == "cuda" and not gpu:
            return "it needs a GPU"
        if AMX in self.needs and "amx_bf16" not in detect().cpu.features:
            return "it needs a processor with AMX"
        packages = [need for need in self.needs if need != AMX]
        missing = [package for package in packages if importlib.util.find_spec(package) is None]
        return f"it needs the package {missing[0]}" if missing else None


def read(path: Path, root: Path = CORPUS) -> Script:
    """Its name is relative to the root. Raises KeyError or ValueError if its header is incomplete."""
    text = path.read_text()
    header = _header(text)
    alone = path.parent.name == "healthy"
    return Script(
        path=path,
        name=path.relative_to(root).with_suffix("").as_posix(),
        role="alone" if alone else "faulty" if path.stem == "faulty" else "healthy",
        subject=None if alone else header["subject"],
        also=frozenset(_list(header.get("also", ""))),
        follows=frozenset(_list(header.get("follows", ""))),
        thread=None if header.get("thread", "own") == "own" else header["thread"],
        steps=int(header["steps"]),
        faster_when_fixed=not alone and {"yes": True, "no": False}[header["gain"]],
        device=header["device"],
        needs=tuple(_list(header.get("needs", ""))),
        marked_lines=tuple(number for number, line in enumerate(text.splitlines(), 1) if MARK.search(line)),
    )


def _header(text: str) -> dict[str, str]:
    comments = text.partition("\n\n")[0].splitlines()
    return {found[1]: found[2] for line in comments if (found := HEADER.fullmatch(line))}


def _list(text: str) -> list[str]:
    return [word for word in re.split(r"[,\s]+", text) if word]


def scripts(root: Path = CORPUS) -> list[Script]:
    return [read(path, root) for path in sorted(root.rglob("*.py"))]
