"""The worked examples, and that of the docs, pass their own check."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest
import torch

import flatout
from flatout.errors import MachineError
from flatout.kernels.custom.definition import read_definition

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "kernels"


def passes(file: Path, names: set[str]) -> None:
    """In every property, among them these."""
    found = flatout.kernels.check(file, quick=True, timing=False, device="cpu")
    assert found.failures == ()
    passed = {one.name for one in found.properties if one.verdict == "passed"}
    assert passed >= {"forward", "memory", "repeatable", "operator", *names}


def needs_compiler() -> None:
    if subprocess.run(["g++", "--version"], check=False, capture_output=True).returncode:
        pytest.skip("no C++ compiler")


def test_every_example_is_tested() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {"rms_norm.py", "rms_norm_cuda.py", "softmax_triton.py"}


@pytest.mark.slow
def test_cpp() -> None:
    needs_compiler()
    passes(EXAMPLES / "rms_norm.py", {"build", "gradient", "compile", "sanitizer"})


@pytest.mark.slow
def test_triton() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    passes(EXAMPLES / "softmax_triton.py", {"gradient", "compile"})


@pytest.mark.slow
def test_that_of_the_docs(tmp_path: Path) -> None:
    needs_compiler()
    page = (ROOT / "docs" / "how-to" / "kernels.md").read_text()
    match = re.search(r'^```python title="squares.py"\n(.*?)^```', page, re.MULTILINE | re.DOTALL)
    assert match is not None
    (tmp_path / "squares.py").write_text(match[1])
    passes(tmp_path / "squares.py", {"build", "sanitizer"})


def test_cuda_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(MachineError, match="torch is a build for the CPU"):
        read_definition(str(EXAMPLES / "rms_norm_cuda.py"))
