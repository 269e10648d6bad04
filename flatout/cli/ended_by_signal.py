"""SIGTERM and SIGHUP end a verb as Ctrl-C does: trials are ended and their folders removed on the way out."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

_ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))  # Windows: one


@contextlib.contextmanager
def signals_as_exits() -> Iterator[None]:
    """Within, the first such signal raises SystemExit with a shell's exit code, 128 + its number; later ones wait
    for what is being cleared up. A signal that is ignored (nohup) stays so."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        for other in before:
            signal.signal(other, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = {number: signal.getsignal(number) for number in _ENDING}
    before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
