"""The CPU kernels of a compiled graph in a few files: the same numbers, fewer compilers, and none of it in the way."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from flatout.levers import kernels_together
from flatout.levers.kernels_together import ONE_KERNEL, compiled_together, one_source, shared_out
from tests.processes import Python

SOURCE = """
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C"  void  kernel(const float* in_ptr0, float* out_ptr0) { out_ptr0[0] = in_ptr0[0]; }
"""
TEMPLATE = """
#include <torch/csrc/inductor/cpp_prefix.h>
template <bool accumulates> inline void kernel_micro_gemm() {}
extern "C" void kernel(float* out_ptr0) { kernel_micro_gemm<true>(); }
"""


class Graph:
    """Asks for kernels as a compiled graph does, and waits for them."""

    def cpp_pybinding(self, argtypes: Sequence[str], source: str) -> Later:
        alone.append(source)
        return Later(lambda: f"alone {source}")


class Later:
    def __init__(self, load: Callable[[], object]) -> None:
        self.result = load


alone: list[str] = []


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sources that are built together."""
    sources: list[str] = []

    def built_kernels(source: str, module: str) -> Callable[[], object]:
        sources.append(source)
        names = [f"kernel_{i}" for i in range(source.count("#define kernel"))]
        module = type("Module", (), {name: f"{len(sources)}.{name[-1]}" for name in names})
        return lambda: module

    alone.clear()
    monkeypatch.setattr(kernels_together, "compiler_of_kernels", lambda: Graph)
    monkeypatch.setattr(kernels_together, "compile_threads", lambda: 2)
    monkeypatch.setattr(kernels_together, "later_kernel", Later)
    monkeypatch.setattr(kernels_together, "built_kernels", built_kernels)
    return sources


def kernel(number: int, size: int = 0) -> str:
    return SOURCE.replace("in_ptr0[0];", f"in_ptr0[0] + {number};" + " " * size)


def test_groups_are_of_about_the_same_size() -> None:
    assert shared_out([5, 1, 1, 1, 1, 1], 2) == [[0], [1, 2, 3, 4, 5]]
    assert shared_out([1, 1], 4) == [[0], [1]]
    assert shared_out([], 2) == []


def test_a_source_holds_each_kernel_under_a_name_of_its_own() -> None:
    source = one_source([kernel(1), kernel(2)])
    assert source.count("#include <torch/csrc/inductor/cpp_prefix.h>") == 1
    assert source.index("#define kernel kernel_0") < source.index("+ 1;") < source.index("#undef kernel")
    assert '{"kernel_1", call_kernel_1, METH_VARARGS, ""}' in source
    assert "PyInit_kernels" in source


def test_only_a_source_with_nothing_but_the_kernel_is_built_with_others() -> None:
    assert ONE_KERNEL.fullmatch(SOURCE)
    assert not ONE_KERNEL.fullmatch(TEMPLATE)
    assert not ONE_KERNEL.fullmatch("#include <ATen/record_function.h>\n" + SOURCE)


def test_each_graph_gets_its_kernels(built: list[str]) -> None:
    with compiled_together():
        one, other = Graph(), Graph()
        first = [one.cpp_pybinding([], kernel(i, size=i)) for i in range(4)]
        second = [other.cpp_pybinding([], kernel(i)) for i in range(2)]
        assert built == []  # nothing before a graph waits
        assert len({str(later.result()) for later in first}) == 4
        assert len(built) == 2
        assert [later.result() for later in second] == ["3.0", "4.0"]
    assert alone == []
    assert Graph().cpp_pybinding([], SOURCE).result() == f"alone {SOURCE}"


def test_many_kernels_take_more_files(built: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_together, "MOST_IN_A_FILE", 3)
    with compiled_together():
        graph = Graph()
        laters = [graph.cpp_pybinding([], kernel(i)) for i in range(7)]
        assert len({str(later.result()) for later in laters}) == 7
    assert sorted(source.count("#define kernel") for source in built) == [2, 2, 3]


def test_the_same_kernel_is_found_where_its_source_was(built: list[str]) -> None:
    with compiled_together():
        graph = Graph()
        laters = [graph.cpp_pybinding([], kernel(i, size=100 * (i % 3))) for i in range(7)]
        places = [str(later.result()).split(".") for later in laters]
    for i, (_, number) in enumerate(places):
        holds = [one for one in built if f"+ {i};" in one]
        assert len(holds) == 1
        assert holds[0].index(f"#define kernel kernel_{number}\n") < holds[0].index(f"+ {i};")


def test_what_is_asked_for_later_is_built_later(built: list[str]) -> None:
    with compiled_together():
        graph = Graph()
        before = [graph.cpp_pybinding([], kernel(i)) for i in range(2)]
        before[0].result()
        after = [graph.cpp_pybinding([], kernel(i)) for i in range(2, 4)]
        assert len(built) == 2
        after[0].result()
    assert len(built) == 4


def test_a_graph_is_freed_once_it_has_its_kernels(built: list[str]) -> None:
    with compiled_together():
        graph = Graph()
        later = [graph.cpp_pybinding([], kernel(i)) for i in range(2)]
        later[0].result()
        freed = weakref.ref(graph)
        del graph
        assert freed() is None
        assert later[1].result() == "2.0"


def test_a_kernel_of_its_own_is_built_as_ever(built: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with compiled_together():
        graph = Graph()
        assert graph.cpp_pybinding([], TEMPLATE).result() == f"alone {TEMPLATE}"
        assert graph.cpp_pybinding([], SOURCE).result() == f"alone {SOURCE}"  # no other to build it with
        monkeypatch.setattr(kernels_together, "compile_threads", lambda: 1)
        assert graph.cpp_pybinding([], kernel(1)).result() == f"alone {kernel(1)}"  # graphs do not wait then
    assert built == []


def test_where_it_fails_each_is_built_alone(built: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(source: str, module: str) -> Any:
        raise OSError("no space left")

    monkeypatch.setattr(kernels_together, "built_kernels", fails)
    with compiled_together():
        graph = Graph()
        laters = [graph.cpp_pybinding([], kernel(i)) for i in range(3)]
        assert [later.result() for later in laters] == [f"alone {kernel(i)}" for i in range(3)]


COMPILED = """
import contextlib, os, sys, torch
from torch import nn
from torch._inductor import config, cpp_builder
from flatout.levers.first_compilation import in_our_cache
from flatout.levers.kernels_together import compiled_together

runs = []
run = cpp_builder.run_compile_cmd
def counted(command, cwd):
    runs.append(command)
    run(command, cwd)
cpp_builder.run_compile_cmd = counted
config.compile_threads, config.fallback_random = 2, True

def step(x, scale: float, times: int):
    y = nn.functional.gelu(nn.functional.layer_norm(x, x.shape[-1:])) * scale
    z = nn.functional.dropout(torch.softmax(y @ y.T, -1), 0.5)
    for _ in range(times):
        z = z @ torch.sin(z).cumsum(0)
    return (z.amax(0) * torch.arange(z.shape[1])).to(torch.bfloat16).float().sum() + x[:, :2].double().std().float()

def numbers(x):
    torch.manual_seed(0)
    x = x.clone().requires_grad_()
    loss = torch.compile(step, dynamic=True)(x, 0.7, 2)
    loss.backward()
    return loss.detach(), x.grad

torch.manual_seed(1)
inputs = [torch.randn(48, 33), torch.randn(17, 33)]
with in_our_cache() if sys.argv[1] == "together" else contextlib.nullcontext():
    found = [numbers(x) for x in inputs]
torch.save((found, sum("main.cpp" in command for command in runs)), sys.argv[2])
"""


@pytest.mark.slow
def test_compiled_graphs_give_the_same_numbers_from_fewer_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python: Python
) -> None:
    import torch

    (tmp_path / "step.py").write_text(COMPILED)
    results = {}
    for how, place in (("alone", "alone"), ("together", "together"), ("together", "again")):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / how))
        done = python("step.py", how, f"{place}.pt", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        results[place] = torch.load(tmp_path / f"{place}.pt", weights_only=True)
    plain, files = results["alone"]
    for place in ("together", "again"):
        for one, other in zip(results[place][0], plain, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True)), place
    assert results["again"][1] == 0
    assert results["together"][1] < files / 2, files
