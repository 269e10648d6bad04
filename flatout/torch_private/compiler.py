"""torch.compile from inside: TorchDynamo, Inductor and their settings. Importing this imports nothing of torch.

The functions that import the compiler say so; the others look only at what has been imported already.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from types import CodeType, ModuleType
from typing import Any

from flatout.torch_private.lookup import required

DYNAMO = "torch._dynamo"
"""The module that keeps torch's functions to know them again: what it must not take for torch's goes before."""

# what is and was traced in this process


def frames_traced() -> int:
    """Calls that torch.compile has looked at so far. `torch.compiler` has no counters."""
    known = sys.modules.get("torch._dynamo.utils")
    return 0 if known is None else int(known.counters["frames"]["total"])


def fx_trace_is_under_way() -> bool:
    """Is torch.fx tracing symbolically? `torch.compiler.is_compiling()` is False then."""
    tracer = sys.modules.get("torch.fx._symbolic_trace")
    return tracer is not None and bool(tracer.is_fx_symbolic_tracing())


def backend_was_made() -> bool:
    """Was torch.compile called, even if nothing has been traced yet? Only what it caches tells."""
    known = getattr(sys.modules.get("torch._dynamo.eval_frame"), "cached_backends", {})
    return any(backend is not None for backend in known.values())


def versions_compiled() -> int:
    """Graphs compiled so far. Imports the compiler."""
    counters: dict[str, Counter[str]] = required("torch._dynamo.utils.counters")
    return int(counters["stats"]["unique_graphs"])


@contextlib.contextmanager
def not_counted() -> Iterator[None]:
    """What is compiled meanwhile does not count in `frames_traced`. Imports the compiler."""
    counters: dict[str, Counter[str]] = required("torch._dynamo.utils.counters")
    frames = counters["frames"]
    before = dict(frames)
    try:
        yield
    finally:
        frames.clear()
        frames.update(before)


# its errors: torch.compiler has no public ones


def compile_errors() -> tuple[type[BaseException], ...]:
    """What fails while compiling raises one of these. Imports the compiler."""
    return required("torch._dynamo.exc.TorchDynamoException"), required("torch._inductor.exc.InductorError")


def is_compile_error(error: BaseException) -> bool:
    """Does it come from the compiler, and not from the program? Imports the compiler."""
    dynamo: type[BaseException] = required("torch._dynamo.exc.TorchDynamoException")
    return isinstance(error, dynamo) or type(error).__module__.startswith("torch._inductor")


def export_refusal(error: BaseException) -> str | None:
    """Why torch.export refuses the program as it is written; None where that is not what failed. Imports the compiler,
    which an export has imported."""
    refusal = required("torch._dynamo.exc.UserError")
    return str(error.msg) if isinstance(error, refusal) else None


# its settings: there is no public way to set one for a time


def dynamo_settings() -> ModuleType:
    """Imports the compiler."""
    settings: ModuleType = required("torch._dynamo.config")
    return settings


def inductor_settings() -> ModuleType:
    """Imports the compiler."""
    settings: ModuleType = required("torch._inductor.config")
    return settings


def autograd_settings() -> ModuleType:
    """Imports the compiler."""
    settings: ModuleType = required("torch._functorch.config")
    return settings


def options_of_mode(mode: str) -> dict[str, Any]:  # Any: as torch.compile takes them
    """Options that a mode of torch.compile stands for; it takes a mode or options, not both. Imports the compiler."""
    options: dict[str, Any] = required("torch._inductor.list_mode_options")(mode)
    return options


_lock = threading.Lock()
_in_order = 0


@contextlib.contextmanager
def versions_tried_in_order() -> Iterator[None]:
    """A call runs the first compiled version that fits, not the one that ran last: equal calls run equal graphs.

    Contexts may overlap; the last that ends sets torch's default again. What was set before the first cannot be asked
    for: torch has a function that sets this and none that reads it, so a script that set it itself before loses that.
    """
    global _in_order
    set_newest_first: Callable[[bool], None] = required("torch._C._dynamo.eval_frame._set_lru_cache")  # in C
    with _lock:
        _in_order += 1
        set_newest_first(False)
    try:
        yield
    finally:
        with _lock:
            _in_order -= 1
            if not _in_order:
                set_newest_first(True)


def pass_over_frames(*codes: CodeType) -> None:
    """torch.compile does not trace these, and starts with what they call; `torch.compiler.disable` also wraps the
    function, and what it calls."""
    strategy = required("torch._C._dynamo.eval_frame._FrameExecStrategy")  # in C, and loaded with torch
    action = required("torch._C._dynamo.eval_frame._FrameAction")
    set_strategy = required("torch._C._dynamo.eval_frame.set_code_exec_strategy")
    skipped = strategy(action.SKIP, action.DEFAULT)
    for code in codes:
        set_strategy(code, skipped)


# Inductor's files


def cpp_builder() -> ModuleType:
    """Its `run_compile_cmd` starts the C++ compiler. Imports the compiler."""
    module: ModuleType = required("torch._inductor.cpp_builder")
    return module


def codecache() -> ModuleType:
    """Imports the compiler."""
    module: ModuleType = required("torch._inductor.codecache")
    return module


HEADER_FOLDER, HEADER_LOCKS = "_HEADER_DIR", "_HEADER_LOCK_DIR"
"""Of `codecache`: where precompiled headers lie, which no setting says."""


# AOTInductor, which has no public name yet


def write_aoti(program: Any, path: str) -> None:  # Any: an ExportedProgram, whose import takes the compiler
    """Compile an exported program into a package at `path`. Imports the compiler."""
    required("torch._inductor.aoti_compile_and_package")(program, package_path=path)


def load_aoti(path: str) -> Callable[..., Any]:  # Any: what the program returns
    """The program of a package. Imports the compiler."""
    loaded: Callable[..., Any] = required("torch._inductor.aoti_load_package")(path)
    return loaded
