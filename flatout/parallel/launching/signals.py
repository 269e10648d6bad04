"""Signals that end a job, as messages: the first asks for its end, later ones hurry it."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

from flatout.parallel.launching.messages import Signalled
from flatout.signals import told_of


class Signals:
    """Those that arrived since they were last asked for."""

    def __init__(self) -> None:
        self._arrived: list[int] = []
        self._count = 0
        self._read, self._write = os.pipe()  # wakes a wait, which a signal would not end
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Within, they are noted; one that is ignored (nohup) stays so. In the main thread only."""
        names = [name for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
        wanted = [getattr(signal, name) for name in names]
        with told_of(self._note, *(one for one in wanted if signal.getsignal(one) is not signal.SIG_IGN)):
            yield

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._arrived.append(number)
        with contextlib.suppress(OSError):
            os.write(self._write, b"!")

    @property
    def came(self) -> bool:
        """Has there been any?"""
        return self._count > 0 or bool(self._arrived)

    def taken(self) -> list[Signalled]:
        """Each once."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._read, 1024)
        found = []
        while self._arrived:
            found.append(Signalled(signal=self._arrived.pop(0), at_once=self._count > 0))
            self._count += 1
        return found

    def descriptors(self) -> Iterator[int]:
        yield self._read

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)
