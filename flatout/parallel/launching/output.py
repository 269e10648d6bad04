"""The output of several ranks on two streams: whole lines, each with its rank.

A thread reads each pipe. Lines are passed on as bytes, whatever their encoding, and never torn: one waits for its end.
A progress bar redraws its line after a carriage return: on a terminal, the newest bar is drawn below the lines;
elsewhere it is a line of its own every ten seconds, and when it is done.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Iterator

from flatout.parallel.launching.failure import HEADER

READ_BYTES = 1 << 16
TAIL_BYTES = 1 << 16
"""Of a rank's stderr that is kept, to find its traceback in."""
LONGEST_LINE_BYTES = 1 << 24
"""A line that is longer is passed on in pieces."""
BAR_SECONDS = 10.0
"""Between two states of a progress bar, where the output is no terminal."""
REDRAW_SECONDS = 0.1
IDLE_SECONDS = 0.5
"""A pipe that a process outside holds open is left after nothing has come for so long."""
TALK_SECONDS = 5.0
"""The same of one that goes on talking, not counting the time in which what it says is being written."""
HURRIED_SECONDS = 1.0
BLOCKED_SECONDS = 1.0
"""A reader that has read nothing for so long is not waited for by what ends ranks."""
_CLEAR_LINE = b"\r\x1b[K"


class Screen:
    """What is drawn below the lines of a terminal, which both streams share."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.bar = b""
        self.drawn_at = 0.0


class Sink:
    """Where lines go: a descriptor of this process."""

    def __init__(self, descriptor: int, screen: Screen | None) -> None:
        self._descriptor = descriptor
        self._screen = screen
        self.lock = screen.lock if screen is not None else threading.RLock()
        self.gone = False
        """Has its reader gone away?"""

    @property
    def is_terminal(self) -> bool:
        return self._screen is not None

    def write(self, lines: bytes) -> None:
        """All of it, before anything else."""
        with self.lock:
            if self._screen is not None and self._screen.bar:
                lines = b"".join((_CLEAR_LINE, lines, self._screen.bar))
            self._write(lines)

    def draw(self, bar: bytes) -> None:
        """Show it below the lines, in the place of the one before; b'': none."""
        assert self._screen is not None
        with self.lock:
            now = time.monotonic()
            if bar and now - self._screen.drawn_at < REDRAW_SECONDS:
                return
            with contextlib.suppress(OSError):
                bar = bar[: os.get_terminal_size(self._descriptor).columns - 1]
            self._write(_CLEAR_LINE + bar if bar or self._screen.bar else b"")
            self._screen.bar, self._screen.drawn_at = bar, now

    def _write(self, content: bytes) -> None:
        view = memoryview(content)
        while view and not self.gone:
            try:
                view = view[os.write(self._descriptor, view) :]
            except BlockingIOError:  # whoever started us made it non-blocking
                time.sleep(0.005)
            except OSError:
                self.gone = True

    def is_ready(self, seconds: float) -> bool:
        """Within so many seconds: can a line be written to it without waiting for its reader? The lock is held."""
        try:
            return bool(select.select([], [self._descriptor], [], seconds)[1])
        except (OSError, ValueError):  # it is closed, or no descriptor
            return True

    def close(self) -> None:
        if self._screen is not None and self.lock.acquire(timeout=BLOCKED_SECONDS):
            try:
                if self._screen.bar:
                    self.draw(b"")
            finally:
                self.lock.release()


class Stream:
    """One pipe of one rank, until its end."""

    def __init__(self, descriptor: int, sink: Sink, prefix: bytes) -> None:
        self._descriptor, self._sink, self._prefix = descriptor, sink, prefix
        self._pieces: list[bytes] = []
        """Of the line that has no end yet."""
        self._size = 0
        self._bar = b""
        self._bar_at = 0.0
        self._draws = False
        self.tail = b""
        """The end of what came."""
        self.traceback_at: float | None = None
        """When the last traceback began, by the monotonic clock."""
        self.heard_at = time.monotonic()
        self.writes = False
        """Is it passing something on, however slowly that is read?"""
        self.thread = threading.Thread(target=self._read, daemon=True, name=f"flatout-output-{descriptor}")
        self.thread.start()

    def _read(self) -> None:
        try:
            while (data := os.read(self._descriptor, READ_BYTES)) and not self._sink.gone:
                self.heard_at, self.writes = time.monotonic(), True
                self._note(data)
                self._pass_on(data)
                self.writes = False
        except OSError:  # the descriptor was closed
            pass
        finally:
            self._finish()
            with contextlib.suppress(OSError):
                os.close(self._descriptor)  # after its reader, the rank's own writes fail as they would without us

    def _note(self, data: bytes) -> None:
        if HEADER in self.tail[-len(HEADER) :] + data:
            self.traceback_at = self.heard_at
        self.tail = (self.tail + data)[-TAIL_BYTES:]

    def _pass_on(self, data: bytes) -> None:
        if not self._prefix:
            self._sink.write(data)
            return
        head, newline, rest = data.rpartition(b"\n")
        if newline:
            self._write_lines(b"".join((*self._pieces, head)))
            self._pieces, self._size = [rest], len(rest)
        else:
            self._pieces.append(rest)
            self._size += len(rest)
        if b"\r" in rest:
            self._show_bar()
        if self._size > LONGEST_LINE_BYTES:
            self._finish()

    def _write_lines(self, lines: bytes) -> None:
        """Lines without the last one's newline."""
        if b"\r" in lines:
            lines = b"\n".join(map(self._last_state, lines.split(b"\n")))
        if self._draws:
            self._sink.draw(b"")
            self._draws = False
        elif self._bar:  # the state of a bar that was written as a line is not written again when the bar is done
            first, newline, others = lines.partition(b"\n")
            if first == self._bar:
                self._bar = b""
                if not newline:
                    return
                lines = others
        self._bar = b""
        self._sink.write(b"".join((self._prefix, lines.replace(b"\n", b"\n" + self._prefix), b"\n")))

    def _last_state(self, line: bytes) -> bytes:
        """What of a line that was redrawn is seen in the end."""
        text = line.rstrip(b"\r")
        return text[text.rfind(b"\r") + 1 :]

    def _show_bar(self) -> None:
        line = b"".join(self._pieces)
        text = line.rstrip(b"\r")
        place = text.rfind(b"\r")
        self._pieces, self._size = [line[place:] if place >= 0 else line], len(line) - max(place, 0)
        bar = text[place + 1 :]
        if not bar.strip() or bar == self._bar:
            return
        if self._sink.is_terminal:
            self._bar, self._draws = bar, True
            self._sink.draw(self._prefix + bar)
            return
        now = time.monotonic()
        if now - self._bar_at >= BAR_SECONDS:
            self._bar, self._bar_at = bar, now
            self._sink.write(b"".join((self._prefix, bar, b"\n")))

    def _finish(self) -> None:
        rest = b"".join(self._pieces)
        self._pieces, self._size = [], 0
        if rest.strip(b"\r"):
            self._write_lines(rest)
        elif self._draws:
            self._sink.draw(b"")
            self._draws = False


class Output:
    """Both streams of all ranks of this machine."""

    def __init__(self, stdout: int = 1, stderr: int = 2) -> None:
        both = os.isatty(stdout) and os.isatty(stderr)
        shared = Screen() if both else None
        self.stdout = Sink(stdout, shared or (Screen() if os.isatty(stdout) else None))
        self.stderr = Sink(stderr, shared or (Screen() if os.isatty(stderr) else None))
        self._streams: list[Stream] = []

    def follow(self, descriptor: int, *, error: bool, prefix: bytes) -> Stream:
        """Pass on what is read there, which is closed at its end; b'' as prefix: as it comes."""
        stream = Stream(descriptor, self.stderr if error else self.stdout, prefix)
        self._streams.append(stream)
        return stream

    @property
    def reader_gone(self) -> bool:
        return self.stdout.gone

    @contextlib.contextmanager
    def between_lines(self) -> Iterator[bool]:
        """Within, this thread may write to stderr; False: nobody has read it for long, and this thread, which passes
        signals on, must not wait."""
        if not self.stderr.lock.acquire(timeout=BLOCKED_SECONDS):
            yield False
            return
        try:
            ready = self.stderr.is_ready(BLOCKED_SECONDS)
            if ready:
                self.stderr.close()
            yield ready
        finally:
            self.stderr.lock.release()

    def drain(self, *, hurried: Callable[[], bool] = lambda: False) -> None:
        """Wait for the end of all pipes, but not for a process outside that holds one open and says nothing, nor for
        long for one that goes on talking. hurried: a signal has come; what nobody reads is left."""
        began = time.monotonic()
        talked = 0.0
        while waiting := [one for one in self._streams if one.thread.is_alive()]:
            now = time.monotonic()
            writes = any(one.writes for one in waiting)
            if not writes and all(now - one.heard_at > IDLE_SECONDS for one in waiting):
                break
            if talked > TALK_SECONDS or (hurried() and now - began > HURRIED_SECONDS):
                break
            waiting[0].thread.join(0.02)
            talked += 0.0 if writes else time.monotonic() - now
        self._streams = [one for one in self._streams if one.thread.is_alive()]
        self.stdout.close()
        self.stderr.close()
