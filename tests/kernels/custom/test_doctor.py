"""What breaks builds: recognized from the machine, and from what compilers and loaders have really said."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flatout.errors import MachineError, UsageError
from flatout.kernels.custom import doctor
from flatout.kernels.native import cpp_command

PYTHON_H = """In file included from torch/csrc/Types.h:3,
                 from torch/extension.h:5:
torch/csrc/python_headers.h:12:10: fatal error: Python.h: No such file or directory
   12 | #include <Python.h>
compilation terminated."""
UNDECLARED = """scale.cpp: In function 'at::Tensor scale(const at::Tensor&)':
scale.cpp:7:10: error: 'factor' was not declared in this scope
    7 |   return factor * x;"""
UNDEFINED = """/usr/bin/ld: scale.o: in function `scale(at::Tensor)':
scale.cpp:(.text+0x1d): undefined reference to `helper(float)'
collect2: error: ld returned 1 exit status"""
NEW_HOST = """/usr/local/cuda/include/crt/host_config.h:143:2: error: #error -- unsupported GNU version! later than
13 are not supported!"""
OF_TORCH = "scale.cpp:4:28: error: 'const class at::Tensor' has no member named 'ndimension2'"


@pytest.mark.parametrize(
    ("output", "first", "cause"),
    [
        (PYTHON_H, "torch/csrc/python_headers.h:12:10: fatal error: Python.h", "Python's headers are not installed"),
        (UNDECLARED, "scale.cpp:7:10: error: 'factor' was not declared", "a name is not declared"),
        (
            UNDEFINED,
            "scale.cpp:(.text+0x1d): undefined reference",
            "helper(float) is declared, but no source defines it",
        ),
        (NEW_HOST, "/usr/local/cuda/include/crt/host_config.h:143:2", "this nvcc does not work with"),
        (OF_TORCH, "scale.cpp:4:28: error", "torch 2.13 has no such function"),
        ("nvcc fatal   : Unsupported gpu architecture 'compute_121'", "nvcc fatal", "the architecture compute_121"),
        ('a.cu(3): error: identifier "q" is undefined', "a.cu(3): error", None),
        ("/usr/bin/ld: cannot find -lcudart: No such file", "/usr/bin/ld: cannot find -l", "the library cudart"),
        ("x.cpp:1:10: fatal error: 'mine.h' file not found", "x.cpp:1:10", "the header mine.h is not where"),
        ("x.cpp:1:10: fatal error: cuda_runtime.h: No such file or directory", "x.cpp", "header of the CUDA toolkit"),
        ("c++: fatal error: Killed signal terminated program cc1plus", "c++: fatal", "ran out of memory"),
        ("x.cpp:9:1: fatal error: closing x.o: No space left on device", "x.cpp:9:1", "the disk is full"),
    ],
)
def test_a_build_that_failed(output: str, first: str, cause: str | None) -> None:
    assert doctor.first_error(output).startswith(first)
    found = doctor.cause_of_build(output, "2.13")
    assert (cause is None) is (found is None)
    assert cause is None or (found is not None and cause in found.what and found.remedy)


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        ("a.so: undefined symbol: _ZN2at4_ops3add4callERKNS_6TensorE", "torch 2.13 has no at::_ops"),
        ("a.so: undefined symbol: _Z6helperf", "no source defines helper(float)"),
        ("libstdc++.so.6: version `GLIBCXX_3.4.32' not found (required by a.so)", "older than the compiler"),
        ("dynamic module does not define module export function (PyInit_a)", "neither functions for Python nor"),
        ("libcudart.so.13: cannot open shared object file: No such file", "libcudart.so.13 is not installed"),
        ("Only a single TORCH_LIBRARY can be used to register the namespace", "of the same namespace already"),
        ("invalid ELF header", "the system cannot load"),
    ],
)
def test_a_library_that_does_not_load(said: str, cause: str) -> None:
    assert cause in doctor.cause_of_import(said, "2.13").what


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    with pytest.raises(MachineError, match=r"no C\+\+ compiler 'no-such-compiler -m64'.*apt install"):
        cpp_command()
    monkeypatch.setenv("CXX", "g++ 'x")
    with pytest.raises(UsageError, match="CXX is"):
        cpp_command()


def test_nvcc_and_torch_disagree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MachineError, match="torch is a build for the CPU"):
        doctor.nvcc_command(None)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(MachineError, match=r"no nvcc.*install the CUDA toolkit 13\.0"):
        doctor.nvcc_command("13.0")
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho Cuda compilation tools, release 12.4, V12.4.131\n")
    nvcc.chmod(0o700)
    assert doctor.nvcc_command("12.8") == [str(nvcc)]
    with pytest.raises(MachineError, match=r"is CUDA 12\.4; torch was built with CUDA 13\.0"):
        doctor.nvcc_command("13.0")


def test_architectures() -> None:
    h100 = [(9, 0)]
    assert doctor.architecture_flags("", h100) == ["-gencode=arch=compute_90,code=sm_90"]
    assert len(doctor.architecture_flags("8.0;9.0a+PTX", h100)) == 3
    assert doctor.architecture_flags("8.0 8.6", []) != []
    assert doctor.architecture_flags("8.0+PTX", h100)
    with pytest.raises(UsageError, match=r"this GPU has compute capability 9.0; add 9.0 to it"):
        doctor.architecture_flags("8.0;8.6", h100)
    with pytest.raises(UsageError, match="has 'Hopper'"):
        doctor.architecture_flags("Hopper", h100)


def test_a_lock_that_a_killed_build_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "py311_cpu" / "scale" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    assert doctor.stale_locks(60) == [], "it is new"
    os.utime(lock, (time.time() - 7300,) * 2)
    (found,) = doctor.stale_locks(60)
    assert found.path == str(lock)
    assert re.search("left 2 h 2 min ago by a build that was killed", found.text())


@pytest.mark.skipif(sys.platform != "linux", reason="needs the folders of other processes")
def test_a_lock_of_a_build_that_goes_on_is_not_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "scale" / "lock"
    lock.parent.mkdir()
    lock.touch()
    os.utime(lock, (time.time() - 7300,) * 2)
    ninja = tmp_path / "ninja"
    ninja.symlink_to("/bin/sleep")
    with subprocess.Popen([str(ninja), "60"], cwd=lock.parent) as building:
        try:
            assert doctor.stale_locks(60) == []
        finally:
            building.kill()
    assert len(doctor.stale_locks(60)) == 1
