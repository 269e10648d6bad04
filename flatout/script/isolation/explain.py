"""Why a script that works by itself may fail in a trial: no network, or a port that another trial uses."""

from __future__ import annotations

import errno
from collections.abc import Iterator

from .modes import Isolation

_UNREACHABLE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ECONNREFUSED, errno.ETIMEDOUT)
_NETWORK_LIBRARIES = ("aiohttp", "httpcore", "httpx", "requests", "urllib3")
_NETWORK_ERRORS = ("Connect", "NameResolution", "NewConnection", "MaxRetry", "Timeout")


def explain_failure(error: BaseException | None, isolation: Isolation) -> str:
    """'' where the failure has nothing to do with the isolation of trials."""
    chain = list(_chain(error))
    if isolation.network == "loopback" and any(_wants_network(link) for link in chain):
        return (
            "a trial has no network, only a loopback interface of its own; "
            "if the script needs the network, pass --allow-network on the command line"
        )
    if isolation.network == "machine" and any(_wants_port(link) for link in chain):
        return (
            "with --allow-network all trials share the machine's ports, and two of them run at once while they are "
            "compared; without that option each has its own"
        )
    return ""


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and those that led to it."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        link = waiting.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        reason = getattr(link, "reason", None)  # urllib.error.URLError
        waiting += [link.__cause__, link.__context__, reason if isinstance(reason, BaseException) else None]


def _wants_network(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno in _UNREACHABLE:
        return True
    kinds = type(error).__mro__
    if any(kind.__module__ == "socket" and kind.__name__ == "gaierror" for kind in kinds):
        return True
    return any(
        kind.__module__.partition(".")[0] in _NETWORK_LIBRARIES and kind.__name__.startswith(_NETWORK_ERRORS)
        for kind in kinds
    )


def _wants_port(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return True
    return any(kind.__name__ == "DistNetworkError" for kind in type(error).__mro__)
