import subprocess
import sys

import pytest

from flatout.machine.heap_pieces import LARGEST_PIECE, _glibc

IN_A_PROCESS_OF_ITS_OWN = """
from flatout.machine.heap_pieces import fill_freed_pieces
held = [bytes(size % 3000 + 600) for size in range(0, 400_000, 700)]
del held[::2]
print(*(fill_freed_pieces(most_bytes) for most_bytes in {limits}))
"""
SMALL_PIECES_GIVEN_BACK = sum(range(24, 1033, 16))
"""One of each size that was tried and lay behind the heap: malloc keeps it for the thread, and hands it out next."""
needs_glibc = pytest.mark.skipif(_glibc() is None, reason="malloc is not glibc's")


def _taken(*limits: int) -> list[int]:
    code = IN_A_PROCESS_OF_ITS_OWN.format(limits=limits)
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [int(word) for word in found.stdout.split()]


@needs_glibc
def test_hardly_a_freed_piece_is_left() -> None:
    first, second = _taken(8 << 20, 16 << 20)
    assert first > 300_000
    assert second - SMALL_PIECES_GIVEN_BACK < first / 20


@needs_glibc
def test_no_more_is_held_than_was_allowed_and_once_a_process() -> None:
    first, second, other_limit = _taken(100_000, 100_000, 8 << 20)
    assert 100_000 <= first < 100_000 + LARGEST_PIECE
    assert second == first  # the same answer: had it been carried out again, less would be left now
    assert other_limit > 200_000
