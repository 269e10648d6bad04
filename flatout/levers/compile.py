"""torch.compile, in place."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from flatout.levers.first_compilation import (
    compiler_is_there,
    headers_precompiled_meanwhile,
    in_our_cache,
    usual_compile_seconds,
)
from flatout.levers.lever import Lever, Saving, Value, Verdict, offer, refuse
from flatout.levers.model_call import call_of, calls_put_back, set_call, set_training_call, versions_allowed
from flatout.levers.observed import Observed
from flatout.levers.subject import Subject, Undo
from flatout.machine.description import Machine
from flatout.replaced import settings_changed
from flatout.torch_private.attributes import COMPILED_CALL, COMPILED_FROM, ORIGINAL_MODULE, plain_call
from flatout.torch_private.compiler import autograd_settings, inductor_settings, versions_tried_in_order

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

LITTLE_LONGER_SECONDS = 8.0
"""If compiling the whole model takes at most that much longer than its blocks, it is tried first, as it gains more: 6
to 25 % of a step in the public scripts whose long tunes tried both (`python -m benchmarks.search.short_and_long`)."""

CALL_SECONDS = 0.3e-3
"""What calling a compiled module takes, with its backward pass, however little it computes: 0.2 to 0.4 ms in tunes of
small networks on three kinds of processors, and beside an H100."""


class Compile(Lever):
    """torch.compile, in place: state dict keys and the module's type stay the same.

    `regional` compiles each repeated block once, which starts sooner; the other modes compile the whole model.
    Random numbers keep their eager order on the CPU, so dropout masks are the same. On the CPU the kernels of a graph
    are built together, which takes less time than torch's own way, one by one. The start-up cost is weighed against
    the gain.
    """

    name = "torch.compile"
    plan_field = "compile"
    acts_on_forward = True
    compiles = True
    surpassed_by: ClassVar[Mapping[Value, Value]] = {"regional": "default"}

    def saving(self, machine: Machine, observed: Observed) -> Saving:
        between = max(0.0, observed.busy_share - observed.product_share(machine))
        calls = 0.0
        if observed.step_seconds:
            calls = CALL_SECONDS * max(1, len(observed.modules)) / observed.step_seconds
        return Saving(expected=0.4 * between - calls, least=-0.75 - calls, most=0.9 * observed.busy_share)

    def applies(self, machine: Machine, observed: Observed) -> Verdict:
        if observed.is_compiled:
            return refuse("torch.compile is already used")
        if observed.differentiates_twice:
            return refuse(
                f"{observed.differentiates_twice}, and compiled code has no gradient that can be differentiated again"
            )
        if not observed.modules:
            return refuse("no module was called that could be compiled")
        if observed.device == "cpu" and not compiler_is_there():
            return refuse("no C++ compiler is installed (torch.compile on the CPU needs one; install g++)")
        values = ["default"]
        if any(module.repeated_block for module in observed.modules):
            longer = usual_compile_seconds(observed) - usual_compile_seconds(observed, "regional")
            values.insert(0 if longer > LITTLE_LONGER_SECONDS else 1, "regional")
        if observed.device.startswith("cuda"):
            place = 0 if observed.waits_for_launches else len(values)
            values[place:place] = ["reduce-overhead"]
            values.append("max-autotune")
        return offer(*values, reason="fuses the operations between matrix products")

    @contextlib.contextmanager
    def apply(self, subject: Subject, value: Value) -> Iterator[None]:
        with _as_eager(), versions_allowed(), headers_precompiled_meanwhile() as precompile:

            def compiled(module: Module) -> Undo[Module] | None:
                if all(parameter.device.type == "cpu" for parameter in module.parameters()):
                    precompile()
                return _compile(subject, module, str(value))

            with subject.modules.each(compiled):
                yield

    def nothing_in(self, model: Module, value: Value) -> str:
        if is_compiled(model):
            return "the model is compiled already, as it was given"
        return "the model has no repeated block" if value == "regional" and not repeated_blocks(model) else ""

    def wraps_blocks(self, value: Value) -> bool:
        return value == "regional"

    def label(self, value: Value) -> str:
        return self.name if value == "default" else f"torch.compile {value}"


@contextlib.contextmanager
def _as_eager() -> Iterator[None]:
    """Compiled code that behaves as eager code does: random numbers in the same order, and graphs that allow more than
    one backward pass, even if the script starts to do that late.

    Equal calls also run equal graphs. By default the graph used last is tried first, so after a batch of another size
    activation checkpointing could recompute with a graph that saves other tensors than the one in forward did.
    """
    with (
        settings_changed(inductor_settings(), fallback_random=True),
        settings_changed(autograd_settings(), donated_buffer=False),
        versions_tried_in_order(),
        in_our_cache(),
    ):
        yield


def _compile(subject: Subject, module: Module, mode: str) -> Undo[Module] | None:
    targets = repeated_blocks(module) if mode == "regional" else [module]
    # Blocks of one class share their compiled code. Where they differ in shape (a ResNet's), the compiler would treat
    # the second block's sizes as a dynamic dimension and generate slower code for all of them.
    differ = len(shapes_of(targets)) > 1
    undo = calls_put_back(targets)
    for target in targets:
        plain = call_of(target)
        compile_in_place(
            target,
            mode=None if mode in ("regional", "default") else mode,
            dynamic=False if differ else None,
        )
        set_training_call(subject, target, call_of(target), plain)
    return undo


def is_compiled(module: Module) -> bool:
    """By `module.compile()` or `torch.compile(module)`, other than by this lever."""
    return hasattr(getattr(module, COMPILED_CALL), COMPILED_FROM) or hasattr(module, ORIGINAL_MODULE)


def compile_in_place(module: Module, **options: Any) -> None:  # keywords of torch.compile
    """`module.compile(**options)`, which silently does nothing for torch's own modules, such as an nn.Sequential: those
    are called from a function of ours, which the compiler does trace."""
    import torch

    if not type(module).__module__.startswith("torch.nn."):
        module.compile(**options)
        return
    inside: Callable[..., object] = plain_call(module)

    def call(*args: object, **kwargs: object) -> object:
        return inside(*args, **kwargs)

    set_call(module, torch.compile(call, **options))


def repeated_blocks(module: Module) -> list[Module]:
    """The modules of the class that occurs most often side by side in one container, with weights of their own."""
    best: tuple[int, type[Module] | None] = (1, None)
    for container in module.modules():
        counts = Counter(type(child) for child in container.children() if any(True for _ in child.children()))
        for kind, count in counts.items():
            if count > best[0] and any(True for child in container.children() for _ in child.parameters()):
                best = (count, kind)
    return [] if best[1] is None else list(dict.fromkeys(_outermost(module, best[1])))


def shapes_of(modules: Sequence[Module]) -> set[tuple[torch.Size, ...]]:
    """The shapes of their parameters, each set of them once."""
    return {tuple(parameter.shape for parameter in module.parameters()) for module in modules}


def _outermost(module: Module, kind: type[Module]) -> Iterator[Module]:
    """The modules of a class below `module`, but none inside another: a Sequential may hold Sequentials."""
    for child in module.children():
        if type(child) is kind:
            yield child
        else:
            yield from _outermost(child, kind)
