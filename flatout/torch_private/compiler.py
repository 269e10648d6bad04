"""torch.compile from inside: TorchDynamo, Inductor and their settings. Importing this imports nothing of torch.

Functions that import the compiler say so; the others only inspect what is already imported.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, TypeVar

from flatout.torch_private.lookup import Private, required

F = TypeVar("F", bound=Callable[..., object])

DYNAMO = "torch._dynamo"
"""On import it records torch's functions in order to recognize them later, so patches must be removed before."""

# what is being traced, and what was traced so far


def frames_traced() -> int:
    """Frames that torch.compile has seen so far; no public equivalent."""
    known = sys.modules.get("torch._dynamo.utils")
    return 0 if known is None else int(known.counters["frames"]["total"])


def fx_trace_is_under_way() -> bool:
    """True while torch.fx traces symbolically, where the public `torch.compiler.is_compiling()` is False."""
    tracer = sys.modules.get("torch.fx._symbolic_trace")
    return tracer is not None and bool(tracer.is_fx_symbolic_tracing())


def compile_was_asked_for() -> bool:
    """Has torch.compile been called, or anything been traced? Its import proves nothing: optimizers import it. No
    public equivalent."""
    backends = getattr(sys.modules.get("torch._dynamo.eval_frame"), "cached_backends", {})
    return frames_traced() > 0 or any(backend is not None for backend in backends.values())


def versions_compiled() -> int:
    """Graphs compiled so far; no public equivalent."""
    known = sys.modules.get("torch._dynamo.utils")
    return 0 if known is None else int(known.counters["stats"]["unique_graphs"])


def compilations() -> int:
    """Attempts to compile a frame so far; no public equivalent."""
    return sum(_frame_compilations().values())


def compiled_versions() -> int:
    """The most versions that one frame was compiled to; no public equivalent."""
    return max(_frame_compilations().values(), default=0)


def _frame_compilations() -> dict[object, int]:
    return dict(getattr(sys.modules.get("torch._dynamo.convert_frame"), "FRAME_COMPILE_COUNTER", {}))


def compiling_seconds() -> float | None:
    """Spent in compiling frames so far; None where this torch does not keep it. No public equivalent."""
    known = sys.modules.get("torch._dynamo.utils")
    kept = getattr(known, "compilation_time_metrics", None)
    if kept is None:
        return None if known is not None else 0.0
    times = kept.get("_compile.compile_inner") or kept.get("entire_frame_compile") or ()
    return float(sum(times))


def graph_breaks() -> list[tuple[str, list[tuple[str, int]]]]:
    """(reason, the source lines that led to it from the outermost on) of every graph break so far, also of those in a
    loop, for which a whole function is left uncompiled; no public equivalent."""
    known = sys.modules.get("torch._dynamo.utils")
    kept = getattr(known, "graph_break_reasons", ())
    found = [(str(one.reason), [(at.filename, int(at.lineno or 0)) for at in one.user_stack]) for one in kept]
    for one in getattr(known, "get_compilation_metrics", list)():
        if one.fail_type is not None and one.fail_user_frame_filename and one.fail_user_frame_lineno:
            first = (str(one.fail_reason or one.fail_type).strip().splitlines() or [""])[0]
            place = (one.fail_user_frame_filename, int(one.fail_user_frame_lineno))
            found.append((f"{first} (so {one.co_name} is not compiled at all)", [place]))
    return found


@contextlib.contextmanager
def not_counted() -> Iterator[None]:
    """Excludes what is compiled in this context from `frames_traced`. Imports the compiler."""
    counters: dict[str, Counter[str]] = required("torch._dynamo.utils.counters")
    frames = counters["frames"]
    before = dict(frames)
    try:
        yield
    finally:
        frames.clear()
        frames.update(before)


# errors, none of which is public


def compile_errors() -> tuple[type[BaseException], ...]:
    """The errors that compiling raises. Imports the compiler."""
    return required("torch._dynamo.exc.TorchDynamoException"), required("torch._inductor.exc.InductorError")


def is_compile_error(error: BaseException) -> bool:
    """True if the compiler raised it, not the program. Imports the compiler."""
    dynamo: type[BaseException] = required("torch._dynamo.exc.TorchDynamoException")
    return isinstance(error, dynamo) or type(error).__module__.startswith("torch._inductor")


def export_refusal(error: BaseException) -> str | None:
    """Why torch.export rejects the program; None for any other error. Imports the compiler, which an export has done
    already."""
    refusal = required("torch._dynamo.exc.UserError")
    return str(error.msg) if isinstance(error, refusal) else None


# settings, which have no public API


def dynamo_settings() -> ModuleType:
    """Imports the compiler."""
    settings: ModuleType = sys.modules.get("torch._dynamo.config") or required("torch._dynamo.config")
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
    """The options of a mode of torch.compile, which accepts either a mode or options. Imports the compiler."""
    options: dict[str, object] = required("torch._inductor.list_mode_options")(mode)
    return options


_lock = threading.Lock()
_in_order = 0


@contextlib.contextmanager
def versions_tried_in_order() -> Iterator[None]:
    """A call runs the first compiled version that fits, not the most recently used one: equal calls run equal graphs.

    Contexts may overlap; the last one to end sets torch's default. The value from before cannot be restored, because
    torch has a function that sets it but none that reads it: a script that has set it to False itself gets True.
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


def run_when_traced(function: F) -> F:
    """Tracing calls it and takes its result as a constant. The public `torch.compiler.assume_constant_result` does the
    same, but imports the compiler. Seen in torch 2.11 to 2.15."""
    vars(function)["_dynamo_marked_constant"] = True
    return function


def never_compiled(*functions: Any) -> None:  # Any: with a `__code__`, which no type of a callable has
    """Make torch.compile skip the frames of these and start with what they call; the public `torch.compiler.disable`
    wraps the function, too.

    Otherwise a wrapper around all modules would be compiled instead of them: all would share the cache of its code
    (torch gives up on the ninth), and tracebacks would lack their frames.
    """
    strategy = required("torch._C._dynamo.eval_frame._FrameExecStrategy")  # in C, and loaded with torch
    action = required("torch._C._dynamo.eval_frame._FrameAction")
    set_strategy = required("torch._C._dynamo.eval_frame.set_code_exec_strategy")
    skipped = strategy(action.SKIP, action.DEFAULT)
    for function in functions:
        set_strategy(function.__code__, skipped)


# Inductor's files


def cpp_builder() -> ModuleType:
    """Its `run_compile_cmd` runs the C++ compiler. Imports torch's compiler."""
    module: ModuleType = required("torch._inductor.cpp_builder")
    return module


def codecache() -> ModuleType:
    """Imports the compiler."""
    module: ModuleType = required("torch._inductor.codecache")
    return module


HEADER_FOLDER, HEADER_LOCKS = "_HEADER_DIR", "_HEADER_LOCK_DIR"
"""Of `codecache`: the folder of the precompiled headers; no setting changes it."""


def instruction_sets() -> type:
    """The class of the processor's instruction sets; `check_build` builds a library to see whether the C++ compiler
    supports one. Imports torch's compiler."""
    found: type = required("torch._inductor.cpu_vec_isa.VecISA")
    return found


_SMALLEST_KERNEL = """
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C" void kernel(float* out) { at::vec::Vectorized<float>(0).store(out); }
"""


def precompile_headers() -> None:
    """The headers that all kernels for the CPU include, if this has not been done. No kernel is built. Imports the
    compiler."""
    load = required("torch._inductor.codecache.CppPythonBindingsCodeCache.load_pybinding_async")
    load(["float*"], _SMALLEST_KERNEL, "cpu", submit_fn=lambda build: None)


# how Inductor builds kernels for the CPU


def compiler_of_kernels() -> type:
    """The class through which a compiled graph has its kernels built: `cpp_pybinding` begins to build one and returns
    a `later_kernel`, which the graph waits for where `compile_threads` are more than one. Imports the compiler."""
    found: type = required("torch._inductor.async_compile.AsyncCompile")
    return found


def compile_threads() -> int:
    """How many of Inductor's files are built at a time. Imports the compiler."""
    return int(required("torch._inductor.async_compile.get_compile_threads")())


def later_kernel(load: Callable[[], object]) -> object:
    """What a graph waits for. Imports the compiler."""
    later: object = required("torch._inductor.codecache.LambdaFuture")(load)
    return later


def built_kernels(source: str, module: str) -> Callable[[], ModuleType]:
    """Begins to build a Python module of this name, as `cpp_pybinding` builds that of one kernel; the result waits for
    it and loads it. Imports the compiler."""
    cache = required("torch._inductor.codecache.CppPythonBindingsCodeCache")
    of_module: Private = type("KernelsTogether", (cache,), {"cache": {}, "entry_function": module})
    submit = required("torch._inductor.async_compile.AsyncCompile.submit")
    load: Callable[[], ModuleType] = of_module.load_async(source, "cpu", submit_fn=submit)
    return load


# AOTInductor, which is not public yet


def write_aoti(program: Private, path: str) -> None:
    """Compile an exported program into a package at `path`. Imports the compiler."""
    required("torch._inductor.aoti_compile_and_package")(program, package_path=path)


def load_aoti(path: str) -> Callable[..., object]:
    """The program in a package. Imports the compiler."""
    loaded: Callable[..., object] = required("torch._inductor.aoti_load_package")(path)
    return loaded
