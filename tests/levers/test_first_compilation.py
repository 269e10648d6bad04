"""A first compilation: what is expected of it, in which order values are tried, and no half of a file."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from torch._inductor import cpp_builder

from flatout.levers.catalogue import LEVERS
from flatout.levers.first_compilation import in_our_cache, usual_compile_seconds
from flatout.levers.observed import ModuleSeen, Observed
from flatout.machine.detect import detect


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


def seen(blocks: int, operations: int) -> Observed:
    module = ModuleSeen(kind="Net", parameters=10, repeated_block="Block", repeated_blocks=blocks)
    return Observed(device="cpu", modules=(module,), operations_per_step=operations)


def test_headers_that_are_there_need_no_time(cache: Path) -> None:
    before = usual_compile_seconds(seen(4, 800))
    (cache / "precompiled_headers" / "ab").mkdir(parents=True)
    assert usual_compile_seconds(seen(4, 800)) == before  # a folder is no header: its compiler may have been killed
    (cache / "precompiled_headers" / "ab" / "x.h.gch").write_bytes(b"")
    assert usual_compile_seconds(seen(4, 800)) < before - 5


@pytest.mark.parametrize(
    ("blocks", "operations", "first"), [(4, 400, "default"), (3, 900, "default"), (12, 3000, "regional")]
)
def test_a_whole_model_comes_first_where_it_takes_little_longer(blocks: int, operations: int, first: str) -> None:
    lever = next(one for one in LEVERS if one.name == "torch.compile")
    verdict = lever.applies(detect(), seen(blocks, operations))
    assert verdict.values[0] == first
    assert set(verdict.values) == {"default", "regional"}
