import subprocess
import sys

import pytest

from flatout.machine.heap_pieces import _glibc

IN_A_PROCESS_OF_ITS_OWN = """
from flatout.machine.heap_pieces import fill_freed_pieces
held = [bytes(size % 3000 + 600) for size in range(0, 400_000, 700)]
del held[::2]
first = fill_freed_pieces({most})
print(first.before, first.after, first.taken)
"""
needs_glibc = pytest.mark.skipif(_glibc() is None, reason="malloc is not glibc's")


def _filled(most: int) -> tuple[int, int, int]:
    code = IN_A_PROCESS_OF_ITS_OWN.format(most=most)
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after, taken = map(int, found.stdout.split())
    return before, after, taken


@needs_glibc
def test_hardly_a_freed_piece_is_left() -> None:
    before, after, taken = _filled(8 << 20)
    assert before > 200_000
    assert after < before / 20
    assert taken > before / 2


@needs_glibc
def test_no_more_is_held_than_was_allowed() -> None:
    before, after, taken = _filled(100_000)
    assert taken < 100_000 + (96 << 10)
    assert after > before / 4
