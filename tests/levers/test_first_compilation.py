"""A first compilation: what is expected of it, in which order values are tried, and no half of a file."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from torch._inductor import cpp_builder

from flatout.levers import first_compilation
from flatout.levers.catalogue import LEVERS
from flatout.levers.first_compilation import headers_precompiled_meanwhile, in_our_cache, usual_compile_seconds
from flatout.levers.observed import ModuleSeen, Observed
from flatout.machine.detect import detect
from tests.processes import Python


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path


def writing(text: str, target: Path, then: str = ":") -> str:
    """A compiler's command."""
    return shlex.join(["sh", "-c", f'printf {text} > "$2"; {then}', "sh", "-o", str(target)])


def test_a_product_has_its_name_when_it_is_whole(cache: Path) -> None:
    target = cache / "a kernel.so"
    with in_our_cache():
        cpp_builder.run_compile_cmd(writing("whole", target), str(cache))
    assert target.read_text() == "whole"
    assert [path.name for path in cache.iterdir()] == [target.name]


def test_a_compiler_that_is_killed_leaves_nothing_under_the_name(cache: Path) -> None:
    target = cache / "kernel.so"
    with in_our_cache(), pytest.raises(Exception, match="ompile"):
        cpp_builder.run_compile_cmd(writing("ha", target, "kill -9 $$"), str(cache))
    assert not target.exists()
    with in_our_cache():
        cpp_builder.run_compile_cmd(writing("whole", target), str(cache))
    assert target.read_text() == "whole"


def test_afterwards_torchs_own_function_is_back(cache: Path) -> None:
    before = cpp_builder.run_compile_cmd
    with in_our_cache():
        assert cpp_builder.run_compile_cmd is not before
    assert cpp_builder.run_compile_cmd is before
    with pytest.raises(Exception, match="ompile"):
        cpp_builder.run_compile_cmd("false", str(cache))


def test_whether_the_compiler_knows_an_instruction_set_is_seen_from_its_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []

    class Set:
        def __init__(self, flags: str) -> None:
            self.flags = flags

        def build_arch_flags(self) -> str:
            return self.flags

        def check_build(self, code: str) -> bool:
            built.append(self.flags)
            return False

    monkeypatch.setattr(first_compilation, "instruction_sets", lambda: Set)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    with in_our_cache():
        assert Set("-DKNOWN").check_build("code")
        assert not Set("-munknown-instructions").check_build("code")  # torch's own check has the last word
    assert built == ["-munknown-instructions"]
    assert not Set("-DKNOWN").check_build("code")


def test_headers_are_precompiled_meanwhile_where_there_are_none(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def precompile() -> None:
        done.append("precompiled")
        raise OSError("no space left on device")  # the kernel that needs them reports it

    monkeypatch.setattr(first_compilation, "precompile_headers", precompile)
    with headers_precompiled_meanwhile():
        pass
    assert not done
    with headers_precompiled_meanwhile() as begin:
        begin()
        begin()
    assert done == ["precompiled"]
    (cache / "precompiled_headers").mkdir()
    (cache / "precompiled_headers" / "x.h.gch").write_bytes(b"")
    with headers_precompiled_meanwhile() as begin:
        begin()
    assert done == ["precompiled"]


KERNEL = """
import os, pathlib, torch
from flatout.levers.first_compilation import headers_precompiled_meanwhile, in_our_cache
cache = pathlib.Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
model, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()), torch.randn(3, 4)
def written():
    return {path: path.stat().st_mtime_ns for path in cache.rglob("*.gch")}
with in_our_cache():
    with headers_precompiled_meanwhile() as begin:
        begin()
    before = written()
    assert torch.allclose(torch.compile(model)(x), model(x), atol=1e-6)
assert before and written() == before, (before, written())
"""


@pytest.mark.slow
def test_a_kernel_finds_the_headers_that_were_precompiled(cache: Path, python: Python) -> None:
    """In a process of its own: torch remembers which headers it has precompiled, wherever they are."""
    (cache / "kernel.py").write_text(KERNEL)
    done = python("kernel.py", cwd=cache)
    assert done.returncode == 0, done.stderr


def seen(blocks: int, operations: int, shapes: int = 1) -> Observed:
    module = ModuleSeen(kind="Net", parameters=10, repeated_block="Block", repeated_blocks=blocks, block_shapes=shapes)
    return Observed(device="cpu", modules=(module,), operations_per_step=operations)


def test_headers_that_are_there_need_no_time(cache: Path) -> None:
    before = usual_compile_seconds(seen(4, 800))
    (cache / "precompiled_headers" / "ab").mkdir(parents=True)
    assert usual_compile_seconds(seen(4, 800)) == before  # a folder is no header: its compiler may have been killed
    (cache / "precompiled_headers" / "ab" / "x.h.gch").write_bytes(b"")
    assert usual_compile_seconds(seen(4, 800)) < before


@pytest.mark.parametrize(
    ("blocks", "operations", "shapes", "first"),
    [(4, 400, 1, "default"), (3, 900, 1, "default"), (12, 3000, 1, "regional"), (12, 3000, 10, "default")],
)
def test_a_whole_model_comes_first_where_it_takes_little_longer(
    blocks: int, operations: int, shapes: int, first: str
) -> None:
    """Blocks of other shapes are compiled each by itself."""
    lever = next(one for one in LEVERS if one.name == "torch.compile")
    verdict = lever.applies(detect(), seen(blocks, operations, shapes))
    assert verdict.values[0] == first
    assert set(verdict.values) == {"default", "regional"}
