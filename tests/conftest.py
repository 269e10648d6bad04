"""A test that hangs must say so, not stop everything: each has an alarm."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

TEST_SECONDS = 240


@pytest.fixture(autouse=True)
def _alarm() -> Iterator[None]:
    def fail(*_: object) -> None:
        raise TimeoutError(f"the test took more than {TEST_SECONDS} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(TEST_SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
