"""The formats: what each needs here, how its file is written, and how it is loaded and run for the check.

pt2          torch.export's program; for torch in Python
aoti         AOTInductor: that program compiled to machine code, for this kind of processor; Python or C++
onnx         for onnxruntime and others; needs no torch
executorch   for phones and microcontrollers; C++ only; sizes are fixed, since memory is planned ahead of time
torchscript  legacy: deprecated by torch, and its trace does not detect Python branches
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from flatout.environment import cpp_compiler
from flatout.errors import MachineError, UsageError
from flatout.infer.exporting.check import Runner, copied
from flatout.infer.exporting.fresh_inputs import Example
from flatout.infer.exporting.plain_outputs import named_tensors
from flatout.infer.exporting.report import Dynamic, Format
from flatout.infer.exporting.trace import Traced
from flatout.infer.output_tensors import is_tensor
from flatout.levers.first_compilation import compiler_is_there
from flatout.torch_private.compiler import load_aoti, write_aoti

ONNX_BYTES_IN_ONE_FILE = 2**31 - 2**26
"""Larger weights go to a second file: an ONNX file is limited to 2 GiB, and the graph needs some of it."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every format is made from."""

    model: nn.Module
    """In eval mode, with plain outputs."""
    example: Example
    dynamic: Dynamic
    traced: Traced | None
    """None for a format that does its own tracing."""
    outputs: tuple[tuple[str, Tensor], ...]
    """The module's own on the example."""
    weight_bytes: int

    @property
    def varying(self) -> tuple[str, ...]:
        """The sizes that may differ from the example's."""
        sizes = [self.example.sizes_named(one, self.dynamic).values() for one in self.example.tensors.values()]
        return tuple(name for name in ("batch", "length") if any(name in one for one in sizes))


@dataclass(frozen=True, kw_only=True)
class Exporter:
    """One format. `needs` raises MachineError where something is missing here."""

    suffix: str
    needs: Callable[[], None] = lambda: None
    write: Callable[[Job, Path], None]
    load: Callable[[Job, Path], Runner]
    shares_trace: bool = True
    safe_past: bool = True
    """At sizes where the module itself fails, its file raises an error too or computes something; False: it may read
    memory that is not its own."""
    notes: tuple[str, ...] = ()


def _called(module: Callable[..., object]) -> Runner:
    return lambda args, kwargs: module(*args, **kwargs)


def _program(job: Job) -> Traced:
    assert job.traced is not None, "this format is made from a trace"
    return job.traced


def _needs_compiler() -> None:
    if not compiler_is_there():
        what, remedy = f"no C++ compiler was found ({cpp_compiler()})", "install g++, or name one in CXX"
        raise MachineError(what, limit="AOTInductor compiles the C++ that it writes", remedy=remedy)


def _needs_onnx() -> None:
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
    if missing:
        what = f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed"
        limit = "ONNX files are written with onnx and onnxscript and verified with onnxruntime"
        raise MachineError(what, limit=limit, remedy=f"pip install {' '.join(missing)}")


def _write_onnx(job: Job, path: Path) -> None:
    _check_onnx_kinds(job)
    traced = _program(job)
    # One for each tensor; constants are no inputs of an ONNX graph.
    names = [traced.example.sizes_named(one, job.dynamic) for one in traced.example.tensors.values()]
    program = torch.onnx.export(
        traced.program, dynamo=True, verbose=False, output_names=_output_names(job), dynamic_shapes=names
    )
    assert program is not None, "with dynamo=True and no file name the program is returned"
    program.save(path, external_data=job.weight_bytes > ONNX_BYTES_IN_ONE_FILE)


def _output_names(job: Job) -> list[str]:
    """Of the outputs, none of them also an input's."""
    taken = {name for name in _input_names(job) if name}
    names: list[str] = []
    for name, _ in job.outputs:
        free = name
        while free in taken:
            free = f"output_{free}"
        taken.add(free)
        names.append(free)
    return names


def _input_names(job: Job) -> list[str | None]:
    """The program's names of the call's leaves, in order; None for what is a constant of the file."""
    names = _program(job).program.graph_signature.user_inputs
    return [name if isinstance(name, str) else None for name in names]


def _check_onnx_kinds(job: Job) -> None:
    """onnxruntime is handed numpy arrays, which have no bfloat16."""
    found = {*job.example.tensors.items(), *job.outputs}
    wide = sorted(name for name, tensor in found if tensor.dtype is torch.bfloat16)
    if wide:
        limit = "onnxruntime is handed numpy arrays, which have no bfloat16, so the file could not be verified"
        raise UsageError(f"{', '.join(wide[:3])} is bfloat16", limit=limit, remedy="export model.float()")


def _load_onnx(job: Job, path: Path) -> Runner:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # what ends in an error is raised; the rest is for its makers
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    taken = [one.name for one in session.get_inputs()]
    names = [name for name in _input_names(job) if name]
    if len(taken) == len(names):  # the order is that of the call; a name changes where an input is an output too
        names = taken

    def run(args: tuple[object, ...], kwargs: dict[str, object]) -> list[Tensor]:
        call = Example(args=args, kwargs=kwargs, batch=None, length=None)
        arrays = [tensor.detach().cpu().numpy() for tensor in call.tensors.values()]
        fed = {name: array for name, array in zip(names, arrays, strict=True) if name in taken}
        return [torch.from_numpy(array) for array in session.run(None, fed)]

    return run


def _needs_executorch() -> None:
    if importlib.util.find_spec("executorch") is None:
        limit = "its files are written, and verified in its runtime, by that package"
        raise MachineError("executorch is not installed", limit=limit, remedy="pip install executorch")


def _write_executorch(job: Job, path: Path) -> None:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    if job.varying:
        limit = "memory for an executorch file is planned before it runs, for one size"
        remedy = "export at the example's sizes: dynamic='none', or allow_fixed"
        raise UsageError(f"{' and '.join(job.varying)} may vary", limit=limit, remedy=remedy)
    lowered = to_edge_transform_and_lower(_program(job).program, partitioner=[XnnpackPartitioner()])
    path.write_bytes(lowered.to_executorch().buffer)


def _load_executorch(job: Job, path: Path) -> Runner:
    from executorch.runtime import Runtime

    program = Runtime.get().load_program(path)  # the method refers to its memory
    method = program.load_method("forward")

    def run(args: tuple[object, ...], kwargs: dict[str, object]) -> list[Tensor]:
        assert program is not None
        call = Example(args=args, kwargs=kwargs, batch=None, length=None)
        fed = [tensor.detach().cpu().contiguous() for tensor in call.tensors.values()]
        return [one.clone() for one in method.execute(fed)]

    return run


def _write_torchscript(job: Job, path: Path) -> None:
    from flatout.torch_private.dispatch import tree_leaves

    constants = [leaf for leaf in tree_leaves((job.example.args, job.example.kwargs)) if not is_tensor(leaf)]
    if any(leaf is not None for leaf in constants):
        limit = "TorchScript's trace takes tensors only"
        remedy = "use pt2, or fix the other inputs in a wrapper's forward"
        raise UsageError(f"an input is {constants[0]!r}", limit=limit, remedy=remedy)
    example = copied(job.example)  # tracing runs the module, which may write to its inputs
    call: dict[str, object] = {"example_inputs": example.args}
    if example.kwargs:
        call = {"example_kwarg_inputs": example.kwargs}
    handle = job.model.register_forward_hook(lambda _module, _inputs, output: _one_level(output))
    try:
        traced = torch.jit.trace(job.model, **call, strict=False, check_trace=False)
    finally:
        handle.remove()
    torch.jit.save(traced, str(path))


def _one_level(output: object) -> object:
    """TorchScript's dicts hold tensors alone: what is nested gets a longer name."""
    return dict(named_tensors(output)) if isinstance(output, dict) else output


LEGACY = "legacy: torch has deprecated TorchScript; use pt2 for Python, aoti or onnx elsewhere"
HERE_ONLY = "machine code for this kind of processor, read by the torch release that made it"
XNNPACK = "products run by XNNPACK, on the CPU of the device"

EXPORTERS: dict[Format, Exporter] = {
    "pt2": Exporter(
        suffix=".pt2",
        write=lambda job, path: torch.export.save(_program(job).program, path),
        load=lambda job, path: _called(torch.export.load(path).module()),
    ),
    "aoti": Exporter(
        suffix=".aoti.pt2",
        needs=_needs_compiler,
        write=lambda job, path: write_aoti(_program(job).program, str(path)),
        load=lambda job, path: _called(load_aoti(str(path))),
        safe_past=False,
        notes=(HERE_ONLY,),
    ),
    "onnx": Exporter(suffix=".onnx", needs=_needs_onnx, write=_write_onnx, load=_load_onnx),
    "executorch": Exporter(
        suffix=".pte", needs=_needs_executorch, write=_write_executorch, load=_load_executorch, notes=(XNNPACK,)
    ),
    "torchscript": Exporter(
        suffix=".torchscript.pt",
        write=_write_torchscript,
        load=lambda job, path: _called(torch.jit.load(str(path))),
        shares_trace=False,
        notes=(LEGACY,),
    ),
}
"""Every format, the plainest first."""
