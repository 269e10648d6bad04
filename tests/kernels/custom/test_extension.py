"""Extensions are built once, found again, built anew when a header changes, and their errors are explained."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import flatout
from flatout.errors import MachineError, UsageError
from flatout.kernels.custom import extension, extension_build

# torch's stable headers: they compile in a second, torch/extension.h in half a minute
SOURCE = """
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include "factor.h"

torch::stable::Tensor scaled(const torch::stable::Tensor x) {
  auto y = torch::stable::empty_like(x);
  const float* from = x.const_data_ptr<float>();
  float* to = y.mutable_data_ptr<float>();
  for (int64_t i = 0; i < x.numel(); ++i) to[i] = FACTOR * from[i];
  return y;
}

STABLE_TORCH_LIBRARY(NAMESPACE, m) { m.def("scaled(Tensor x) -> Tensor"); }
STABLE_TORCH_LIBRARY_IMPL(NAMESPACE, CPU, m) { m.impl("scaled", TORCH_BOX(&scaled)); }
"""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLATOUT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(extension, "_loaded", {})


@pytest.fixture
def stages() -> Iterator[list[str]]:
    seen: list[str] = []
    with extension_build.watched_builds(lambda stage, name: seen.append(stage)):
        yield seen


def needs_compiler() -> None:
    if subprocess.run(["g++", "--version"], check=False, capture_output=True).returncode:
        pytest.skip("no C++ compiler")


@pytest.mark.slow
def test_a_source_is_built_once_and_again_after_a_change_of_its_header(tmp_path: Path, stages: list[str]) -> None:
    needs_compiler()
    source, header = tmp_path / "scaled.cpp", tmp_path / "factor.h"
    header.write_text("#define FACTOR 2\n#define NAMESPACE flatout_test_two\n")
    source.write_text(SOURCE.replace("NAMESPACE,", "flatout_test_two,"))
    found = flatout.kernels.load(source)
    assert found is torch.ops.flatout_test_two
    assert found.scaled(torch.ones(2)).tolist() == [2, 2]
    assert stages == ["building", "built", "loaded"]
    assert flatout.kernels.load(source) is found, "this process has it"
    kept = extension_build.built(*_asked(source))
    assert stages == ["building", "built", "loaded"], "another process finds it"
    header.write_text("#define FACTOR 3\n")
    assert extension_build.built(*_asked(source)) != kept
    assert stages[3:] == ["building", "built"]


def _asked(source: Path) -> tuple[extension_build.Build, str]:
    build = extension_build.Build(
        name=source.stem,
        units=(extension._unit(source),),
        functions=(),
        cxx_flags=(),
        cuda_flags=(),
        link_flags=(),
        include_dirs=(),
    )
    return build, extension_build.key_of(build)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ('#include "no_such_header.h"\n', "no_such_header.h is not where the compiler looks; pass its folder"),
        ("int f() { return undeclared; }\n", r"source.cpp:1:18: error: .*; likely cause: a name is not declared"),
        ("int g();\nint f() { return g(); }\n", r"undefined symbol: _Z1gv; likely cause: no source defines g\(\)"),
        ("int f() { return 1; }\n", "defines neither functions for Python nor operators; pass functions"),
    ],
)
def test_a_source_that_does_not_build(source: str, said: str, stages: list[str]) -> None:
    needs_compiler()
    with pytest.raises(UsageError, match=f"(?s){said}"):
        flatout.kernels.load(source)
    assert stages[-1] == "failed"


def test_a_bound_function_needs_python_s_headers_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_compiler()
    monkeypatch.setattr(extension_build.sysconfig, "get_paths", lambda: {"include": "/no/such/folder"})
    with pytest.raises(UsageError, match="likely cause: Python's headers are not installed; apt install python3-dev"):
        flatout.kernels.load("#include <Python.h>\nint f() { return 1; }\n")


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(MachineError, match=r"there is no C\+\+ compiler 'no-such-compiler'"):
        flatout.kernels.load("int f() { return 1; }\n")


def test_cuda_without_a_build_of_torch_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(MachineError, match=r"torch is a build for the CPU; a \.cu file needs a build with CUDA"):
        flatout.kernels.load("__global__ void f() {}\n")


def test_a_folder_that_others_can_write_is_refused(tmp_path: Path) -> None:
    needs_compiler()
    folder = tmp_path / "cache" / "extensions"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    with pytest.raises(MachineError, match="others can write"):
        flatout.kernels.load("int f() { return 1; }\n")


@pytest.mark.parametrize(
    ("sources", "options", "said"),
    [
        ((), {}, "there are no sources"),
        ((3,), {}, "a source is 3"),
        (("scale.txt",), {}, "a source is 'scale.txt'"),
        (("scale.cpp",), {}, "cannot read scale.cpp: No such file.*looked in"),
        (("int f();\n",), {"name": "my kernel"}, "name is 'my kernel'"),
        (("int f();\n",), {"functions": "f"}, "functions is 'f'"),
        (("int f();\n",), {"cxx_flags": [1]}, "cxx_flags is"),
    ],
)
def test_what_cannot_be_built_is_refused(sources: tuple[object, ...], options: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        flatout.kernels.load(*sources, **options)  # type: ignore[arg-type]
