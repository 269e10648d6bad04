"""AddressSanitizer's reports, read; and, slowly, a kernel that writes past its output, found by it."""

from __future__ import annotations

from pathlib import Path

import pytest

import flatout
from flatout.kernels.custom import sanitizer

GCC = """=================================================================
==29489==ERROR: AddressSanitizer: heap-buffer-overflow on address 0x6090000003a0 at pc 0x7f08 bp 0x7ffd sp 0x7ffd
WRITE of size 4 at 0x6090000003a0 thread T0
    #0 0x7f08e27d2113 in at::Tensor::numel() const /x/site-packages/torch/include/ATen/core/TensorBase.h:4
    #1 0x7f08e27d2113 in scaled(at::Tensor const&) /home/me/scaled.cpp:11
    #2 0x7f08e27da8e7 in main /home/me/other.cpp:23
0x6090000003a0 is located 0 bytes to the right of 32-byte region [0x609000000380,0x6090000003a0)
"""
CLANG = """==7==ERROR: AddressSanitizer: heap-buffer-overflow on address 0x60 at pc 0x7f bp 0x7f sp 0x7f
READ of size 8 at 0x60 thread T3
    #0 0x7f in scaled /home/me/scaled.cpp:7:12
0x60 is located 12 bytes before 64-byte region [0x61,0x62)
"""
SOURCE = """
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

torch::stable::Tensor scaled(const torch::stable::Tensor x) {
  auto y = torch::stable::empty_like(x);
  const float* from = x.const_data_ptr<float>();
  float* to = y.mutable_data_ptr<float>();
  const int64_t n = x.numel();
  for (int64_t i = 0; i < n; i += 4)
    for (int64_t j = i; j < i + 4; ++j) to[j] = j < n ? 2 * from[j] : 0;
  return y;
}

STABLE_TORCH_LIBRARY(flatout_test_past, m) { m.def("scaled(Tensor x) -> Tensor"); }
STABLE_TORCH_LIBRARY_IMPL(flatout_test_past, CPU, m) { m.impl("scaled", TORCH_BOX(&scaled)); }
"""
FILE = """
import flatout
from pathlib import Path

kernel = flatout.kernels.load(Path(__file__).with_name("scaled.cpp")).scaled
reference = lambda x: 2 * x
inputs, dtypes, layouts, gradient = ("float[n]",), "float32", "contiguous", False
"""


def test_a_report_becomes_a_sentence() -> None:
    assert sanitizer.read_report(GCC) == (
        "writes 4 bytes outside of its memory at scaled.cpp:11, in scaled, right after a block of 32 bytes "
        "(AddressSanitizer: heap-buffer-overflow)"
    )
    assert sanitizer.read_report(CLANG) == (
        "reads 8 bytes outside of its memory at scaled.cpp:7, in scaled, 12 bytes before a block of 64 bytes "
        "(AddressSanitizer: heap-buffer-overflow)"
    )
    assert sanitizer.read_report("Segmentation fault") is None


def test_without_a_compiler_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert sanitizer.runtime() == (None, "there is no C++ compiler 'no-such-compiler'")


@pytest.mark.slow
def test_a_kernel_that_writes_past_its_output_is_found_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, reason = sanitizer.runtime()
    if library is None:
        pytest.skip(reason)
    monkeypatch.setenv("FLATOUT_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "scaled.cpp").write_text(SOURCE)
    (tmp_path / "past.py").write_text(FILE)
    found = flatout.kernels.check(tmp_path / "past.py", quick=True, timing=False, device="cpu")
    wrong = {one.name: one.failure for one in found.failures}
    failure = wrong["sanitizer"]
    assert failure is not None
    assert failure.what.startswith("writes 4 bytes outside of its memory at scaled.cpp:12, in scaled, right after")
    assert failure.case == "n=1, float32"
    assert failure.reproduce == "torch.manual_seed(0); x = torch.randn((1,)); kernel(x)"
    assert not found.ok
