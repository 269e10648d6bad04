"""Signals as requests: they call a function, which decides what to do."""

from __future__ import annotations

import contextlib
import functools
import signal
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import NoReturn

_ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))  # Windows: one


@contextlib.contextmanager
def told_of(handle: Callable[[int, FrameType | None], None], *signals: signal.Signals) -> Iterator[None]:
    """Within, these signals call `handle`. Only in the main thread: Python allows no handlers in others.

    Ctrl-C is left alone if the program has its own handler for it, or ignores it (a background job).
    """
    mine = threading.current_thread() is threading.main_thread()
    plain = mine and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    before = {one: signal.signal(one, handle) for one in signals if mine and (plain or one != signal.SIGINT)}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler if handler is not None else signal.SIG_DFL)


@contextlib.contextmanager
def signals_as_exits() -> Iterator[None]:
    """Within, the first SIGTERM or SIGHUP raises SystemExit with a shell's exit code, 128 + its number; later ones wait
    for what is being cleared up. A signal that is ignored (nohup) stays so."""
    heeded = [one for one in _ENDING if signal.getsignal(one) is not signal.SIG_IGN]

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        for one in heeded:
            signal.signal(one, signal.SIG_IGN)
        raise SystemExit(128 + number)

    with told_of(leave, *heeded):
        yield


@contextlib.contextmanager
def ctrl_c_is_ours() -> Iterator[None]:
    """Processes that are started within ignore Ctrl-C, which a terminal sends to all of them, while they load too: this
    program ends them. Only in the main thread."""
    mine = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if mine else None
    try:
        yield
    finally:
        if mine:  # None: a handler that was not installed from Python, and cannot be from there
            signal.signal(signal.SIGINT, before if before is not None else signal.SIG_DFL)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Within, calls of the program's own signal handlers are deferred; they are made at the end.

    For work that must not be seen half done. Only in the main thread: Python calls handlers in no other.
    """
    wanted: list[tuple[int, FrameType | None]] = []
    before: dict[signal.Signals | int, Callable[[int, FrameType | None], object]] = {}
    if threading.current_thread() is threading.main_thread():
        for one in signal.valid_signals():
            if callable(handler := signal.getsignal(one)):
                before[one] = handler
                signal.signal(one, lambda number, frame: wanted.append((number, frame)))
    try:
        yield
    finally:
        for caught, handler in before.items():
            signal.signal(caught, handler)
        for number, frame in wanted:
            before[number](number, frame)


@contextlib.contextmanager
def own_errors_suppressed() -> Iterator[None]:
    """Suppresses errors, but for what a signal handler of the program's own raises meanwhile."""
    try:
        yield
    except Exception as error:
        if raised_by_handler(error):
            raise


def raised_by_handler(error: BaseException) -> bool:
    """Did one of the program's own signal handlers raise it? Python calls them between any two operations of the main
    thread, so also within a function that nothing else leaves by an exception."""
    codes = {_code_of(signal.getsignal(one)) for one in signal.valid_signals()} - {None}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False


def _code_of(handler: object) -> CodeType | None:
    """None: it is no function of Python's, nor an object that one calls."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    found = getattr(handler, "__code__", None) or getattr(type(handler).__call__, "__code__", None)
    return found if isinstance(found, CodeType) else None
