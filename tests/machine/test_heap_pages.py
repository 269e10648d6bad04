"""The heap in huge pages: where the system gives them on request."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flatout.machine import heap_pages
from flatout.machine.heap_pages import MADV_COLLAPSE, MADV_HUGEPAGE, MADV_NOHUGEPAGE, HeapPages, given_on_request

SCRIPT = """
import torch
from flatout.levers.allocator import LEAST_GROWTH, RetainMemory
from flatout.levers.subject import Subject

def huge_bytes():
    lines = open("/proc/self/smaps").read().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("AnonHugePages:"))

model, subject = torch.nn.Linear(4, 4), Subject()
optimizer = torch.optim.SGD(model.parameters())
subject.optimizers.add(optimizer)
with RetainMemory().apply(subject, "retain"):
    found = []
    for size in (1, LEAST_GROWTH, 1, 1):
        optimizer.step()
        torch.ones(size // 2)
        found.append(huge_bytes())
    assert not subject.in_use, "the run would watch every step"
print(found[1] < found[2], found[2] == found[3], found[2])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="it is about Linux")
@pytest.mark.skipif(not given_on_request(), reason="this system gives huge pages to all memory, or to none")
@pytest.mark.slow
def test_a_heap_that_has_grown_is_moved_once() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    grew, stayed, size = done.stdout.split()
    if size == "0":
        pytest.skip("this kernel does not move pages, or has no huge ones left")
    assert (grew, stayed) == ("True", "True")


def test_whole_pages_of_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    page, end, requests = 2 << 20, [0], list[tuple[int, int, int]]()

    class Sbrk:
        def __call__(self, increment: int) -> int:
            return end[0]

    class Madvise:
        def __call__(self, *request: int) -> int:
            requests.append(request)  # type: ignore[arg-type]
            return -1  # no huge pages left, say

    monkeypatch.setattr(heap_pages, "_heap_begin", lambda: 5 * page + 1)
    monkeypatch.setattr(heap_pages, "_huge_page_bytes", lambda: page)
    monkeypatch.setattr(
        heap_pages.ctypes, "CDLL", lambda name: type("Lib", (), {"sbrk": Sbrk(), "madvise": Madvise()})()
    )
    pages = HeapPages()
    end[0] = 6 * page + 9
    assert pages.new_bytes == 9
    pages.move()
    assert requests == []
    end[0] = 9 * page + 9
    pages.move()
    end[0] = 11 * page
    pages.move()
    pages.move()
    pages.close()
    assert requests == [
        *((6 * page, 3 * page, advice) for advice in (MADV_HUGEPAGE, MADV_COLLAPSE)),
        *((9 * page, 2 * page, advice) for advice in (MADV_HUGEPAGE, MADV_COLLAPSE)),
        (6 * page, 5 * page, MADV_NOHUGEPAGE),
    ]


@pytest.mark.parametrize(("text", "given"), [("always [madvise] never", True), ("[always] madvise never", False)])
def test_the_systems_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, given: bool) -> None:
    monkeypatch.setattr(heap_pages, "SETTINGS", tmp_path)
    assert not given_on_request()
    (tmp_path / "enabled").write_text(text)
    assert given_on_request() is given
    (tmp_path / "hpage_pmd_size").write_text("524288\n")
    assert heap_pages._huge_page_bytes() == 524288


def test_a_mapped_file_whose_name_is_not_utf8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap_pages, "MAPS", tmp_path / "maps")
    (tmp_path / "maps").write_bytes(b"5600-5610 rw-p 0 00:00 0 /opt/\xe9\n7f00-7f10 rw-p 0 00:00 0 [heap]\n")
    assert heap_pages._heap_begin() == 0x7F00


def test_no_heap_and_no_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap_pages, "given_on_request", lambda: True)
    monkeypatch.setattr(heap_pages, "MAPS", tmp_path / "maps")
    assert heap_pages.heap_pages() is None
    (tmp_path / "maps").write_text("7f00-7f10 rw-p 00000000 00:00 0    [stack]\n")
    assert heap_pages.heap_pages() is None
    monkeypatch.setattr(sys, "platform", "darwin")
    assert heap_pages.heap_pages() is None
