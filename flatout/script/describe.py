"""Turn the live handles of a watched script into an `Observed` value."""

from __future__ import annotations

import ast
import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from flatout.data.fetch import obstacle_to_batching
from flatout.levers.attention import attention_by_hand
from flatout.levers.call_site import before_step
from flatout.levers.chunked_loss import widest_output
from flatout.levers.compile import repeated_blocks, shapes_of
from flatout.levers.fused_optimizer import see_optimizer
from flatout.levers.observed import LoaderSeen, ModuleSeen, Observed
from flatout.levers.subject import Subject
from flatout.parameters import names_of_types
from flatout.precision.denormals import flushed_here
from flatout.precision.matmul import current_matmul_precision
from flatout.script.device_calls import device_name
from flatout.script.spans import KINDS, StepRow
from flatout.signals import raised_by_handler
from flatout.torch_private.attributes import COMPILED_CALL
from flatout.tracebacks import is_users_file

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.utils.data import DataLoader

NOT_AS_NOW = 0
"""As `threads_at_start`: the script set the number by an environment variable, before torch was imported."""
GRADIENTS_OF_GRADIENTS = (rb"create_graph", rb"autograd\.functional", rb"autograd import functional", rb"gradgradcheck")
ORDERS = (
    rb"non_blocking", rb"cuda\.stream", rb"Stream\(", rb"_stream", rb"cuda import", rb"CUDAGraph", rb"cuda\.graph",
    rb"graphed_callables", rb"data_ptr", rb"cuda_array_interface", rb"dlpack", rb"cupy", rb"numba", rb"ctypes",
    rb"cpp_extension", rb"load_inline",
)  # fmt: skip
GRADIENTS = (rb"\.grad\b|clip_grad|get_total_norm|'grad'|\"grad\"",)
OPTIMIZER_STATE = (rb"exp_avg|\.state\[|\.state\.(?:items|values|get)\b",)
GRAPHS = (rb"CUDAGraph", rb"cuda\.graph", rb"cuda import graph", rb"graphed_callables")


class WatchedLoop(Protocol):
    """What is known of a loop besides its handles."""

    subject: Subject
    saw_autocast: bool
    saw_scaler: bool
    saw_create_graph: bool
    gradients_zeroed: bool | None

    @property
    def step_kind(self) -> str | None: ...

    @property
    def saw_compile(self) -> bool: ...


def observe(
    watch: WatchedLoop,
    *,
    threads_at_start: int | None,
    rows: Sequence[StepRow],
    loaders: bool = True,
    lengths: bool = True,
) -> Observed:
    """What is known of the loop now. rows: the steps of a window; empty: nothing was timed.

    lengths=False leaves the lengths of data sets unknown, as reading one runs the script's code; loaders=False omits
    loaders.
    """
    import torch

    from flatout.torch_private.dispatch import without_torch_function

    subject = watch.subject
    faults = [row.page_faults for row in rows if row.page_faults is not None]
    with without_torch_function():  # the script's own modes must not see our operations
        return Observed(
            device=device_name(subject),
            step_kind=watch.step_kind or "unknown",
            step_seconds=statistics.median(row.seconds for row in rows) if rows else None,
            breakdown_seconds=breakdown(rows),
            optimizers=tuple(
                replace(see_optimizer(one), made_at=subject.made_at.get(id(one), "")) for one in subject.optimizers
            ),
            loaders=tuple(_see_loader(loader, lengths) for loader in subject.loaders) if loaders else (),
            modules=tuple(_see_module(module) for module in subject.modules),
            threads=torch.get_num_threads(),
            threads_set_by_script=threads_at_start is not None and torch.get_num_threads() != threads_at_start,
            autocast_in_script=watch.saw_autocast,
            scaler_in_script=watch.saw_scaler,
            compiled_in_script=watch.saw_compile,
            matmul_precision=current_matmul_precision(),
            flush_denormals=flushed_here(),
            cudnn_benchmark=torch.backends.cudnn.benchmark,
            names_device=names_device(getattr(sys.modules.get("__main__"), "__file__", None)),
            deterministic_algorithms=torch.are_deterministic_algorithms_enabled(),
            differentiates_twice=_differentiates_twice(watch),
            gradients_zeroed=watch.gradients_zeroed,
            reads_gradients=_mention_of(GRADIENTS),
            reads_optimizer_state=_mention_of(OPTIMIZER_STATE),
            update_obstacle=_update_obstacle(watch),
            captures_graphs=_mention_of(GRAPHS),
            orders_device_work=_mention_of(ORDERS),
            backwards_per_step=statistics.mean(row.backwards for row in rows) if rows else None,
            page_faults_per_step=float(statistics.median(faults)) if faults else None,
        )


def breakdown(rows: Sequence[StepRow]) -> dict[str, float]:
    """Mean seconds of each part over typical steps: those within 3x the median, without evaluation.

    Means of parts add up to the mean step; medians would not: they are scaled to the median step. Evaluation comes on
    top, on average over all steps, unless the median step has some, as that of a generator that makes fakes without
    gradients: then it is one of the parts (see `evaluation_in_step`).
    """
    if not rows:
        return {}
    middle = statistics.median(row.seconds for row in rows)
    typical = [row for row in rows if row.seconds <= 3 * middle]
    without = [row for row in typical if not row.parts.get("evaluation")]
    on_top = 2 * len(without) >= len(typical)
    parts = {
        kind: statistics.fmean(row.parts.get(kind, 0.0) for row in (without if on_top else typical)) for kind in KINDS
    }
    scale = middle / max(1e-12, sum(parts.values()))
    parts = {kind: scale * seconds for kind, seconds in parts.items()}
    if on_top:  # the first row has what is not known yet to be called in every step
        parts["evaluation"] = statistics.fmean(row.parts.get("evaluation", 0.0) for row in rows[1:] or rows)
    return parts


def _see_loader(loader: DataLoader[object], lengths: bool) -> LoaderSeen:
    obstacle = "the loader does no batching itself"
    if loader.batch_sampler is not None:
        obstacle = obstacle_to_batching(loader.dataset, loader.collate_fn)
    length = _length(loader.dataset) if lengths else None
    return LoaderSeen(
        dataset=type(loader.dataset).__name__,
        samples=length,
        batch_size=loader.batch_size,
        workers=loader.num_workers,
        pin_memory=bool(loader.pin_memory),
        persistent_workers=bool(loader.persistent_workers),
        fetch="" if obstacle else "batched",
        fetch_obstacle=obstacle,
        batches_per_epoch=_length(loader) if length is not None else None,
    )


def _length(data: object) -> int | None:
    """None where it is not known: data sets and samplers of a script may have no length, or raise anything."""
    try:
        return len(data)  # type: ignore[arg-type]
    except Exception as error:
        if raised_by_handler(error):
            raise
        return None


def _see_module(module: nn.Module) -> ModuleSeen:
    import torch
    from torch.nn import BatchNorm1d, BatchNorm2d, BatchNorm3d

    inner = list(module.modules())
    blocks = repeated_blocks(module)
    convolutions = [m for m in inner if isinstance(m, torch.nn.Conv2d)]
    return ModuleSeen(
        kind=type(module).__name__,
        parameters=sum(p.numel() for p in module.parameters()),
        convolutions=len(convolutions),
        linears=sum(isinstance(m, torch.nn.Linear) for m in inner),
        batch_norms=sum(isinstance(m, (BatchNorm1d, BatchNorm2d, BatchNorm3d)) for m in inner),
        dtypes=names_of_types(p.dtype for p in module.parameters()),
        repeated_block=type(blocks[0]).__name__ if len(blocks) > 1 else "",
        repeated_blocks=len(blocks),
        block_shapes=max(1, len(shapes_of(blocks))),
        channels_last=any(_is_channels_last(m.weight) for m in convolutions),
        compiled=getattr(module, COMPILED_CALL) is not None,
        widest_output=widest_output(module),
        attention_by_hand=next((type(one).__name__ for one in attention_by_hand(module)), ""),
    )


def _differentiates_twice(watch: WatchedLoop) -> str:
    """Where the script computes gradients of gradients, or may do so later; '' if nothing suggests it."""
    if watch.saw_create_graph:
        return "the script computes gradients with create_graph"
    return _mention_of(GRADIENTS_OF_GRADIENTS)


def _update_obstacle(watch: WatchedLoop) -> str:
    """Called within the script's optimizer step, after its backward pass."""
    site = before_step(sys._getframe())
    if site.obstacle:
        return site.obstacle
    from flatout.levers.updating_passes import pass_obstacle

    return pass_obstacle(site.optimizers, watch.subject)


def _mention_of(patterns: Sequence[bytes]) -> str:
    """'train.py mentions' what the first of these finds; '' where none finds anything in a file of the script's."""
    for file in own_source_files():
        try:
            source = Path(file).read_bytes()
        except OSError:
            continue
        found = next((match for one in patterns if (match := re.search(one, source)) is not None), None)
        if found is not None:
            return f"{Path(file).name} mentions {found.group().decode().split()[-1]}"
    return ""


def own_source_files() -> list[str]:
    """Source files of the script and of the modules in its folder that it has imported."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if script is None:
        return []
    folder = str(Path(script).resolve().parent)
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    beside = [file for file in files if isinstance(file, str) and file.startswith(folder + "/")]
    return [script, *(file for file in beside if is_users_file(file) and file.endswith(".py"))]


def names_device(file: str | None) -> bool:
    """Does this source mention devices, in a name, an argument or a string? False where it cannot be read."""
    try:
        tree = ast.parse(Path(file or "").read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return False
    return any(_mentions_device(node) for node in ast.walk(tree))


def _mentions_device(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value.partition(":")[0] in ("cpu", "cuda", "mps", "xpu") or node.value == "--device"
    words = [getattr(node, name, None) for name in ("id", "attr", "arg")]
    return any(isinstance(word, str) and ("device" in word.lower() or word == "cuda") for word in words)


def _is_channels_last(weight: Tensor) -> bool:
    import torch

    return weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()


def allows_tf32() -> bool:
    """May this process's fp32 products run as TF32?"""
    return "torch" in sys.modules and current_matmul_precision() != "highest"
