"""The server that tests' processes are forked from."""

from __future__ import annotations

import os
import signal

import pytest

from tests.processes import ForkServer


@pytest.mark.slow
def test_it_ends_though_another_process_holds_its_connection() -> None:
    server = ForkServer()
    assert server.pid
    forked = os.fork()
    if forked == 0:
        signal.pause()
        os._exit(0)
    try:
        server.close()
    finally:
        os.kill(forked, signal.SIGKILL)
        os.waitpid(forked, 0)
