"""Which failures of a script come from how a trial is kept apart from the machine."""

from __future__ import annotations

import errno
import socket
import urllib.error

import pytest

from flatout.script.isolation import Isolation, explain_failure

ALONE = Isolation(mode="overlay", reason="", network="loopback")
SHARED = Isolation(mode="overlay", reason="", network="machine")


def caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


class ConnectTimeout(OSError):
    __module__ = "requests.exceptions"


@pytest.mark.parametrize(
    "error",
    [
        socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"),
        OSError(errno.ENETUNREACH, "Network is unreachable"),
        urllib.error.URLError(ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")),
        caused(RuntimeError("no tracking server"), ConnectTimeout("timed out")),
    ],
)
def test_a_script_that_misses_the_network_is_told_the_option(error: BaseException) -> None:
    assert "pass --allow-network" in explain_failure(error, ALONE)
    assert explain_failure(error, SHARED) == ""


def test_a_port_that_two_trials_want_is_explained() -> None:
    error = OSError(errno.EADDRINUSE, "Address already in use")
    assert "two of them run at once" in explain_failure(error, SHARED)
    assert explain_failure(error, ALONE) == ""


@pytest.mark.parametrize("error", [None, ValueError("x"), FileNotFoundError(errno.ENOENT, "no such file")])
def test_other_failures_are_the_scripts_own(error: BaseException | None) -> None:
    assert explain_failure(error, ALONE) == explain_failure(error, SHARED) == ""


def test_a_chain_that_bites_its_tail_ends() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert explain_failure(first, ALONE) == ""
