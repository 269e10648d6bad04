"""Attention that a model computes by hand, run by torch's fused kernel: the scores are never written to memory.

Such modules are recognized by their code: a forward, or a function that it calls, that takes a softmax between two
products. Each is traced by torch.compile's front end, without its code generator: the attention in the graph is
replaced (`attention_graph`), everything else runs unchanged, and torch's guards retrace it for another shape or mode.
"""

from __future__ import annotations

import contextlib
import dis
import weakref
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import TYPE_CHECKING

from flatout.levers.lever import Lever, Saving, Value, Verdict, offer, refuse
from flatout.levers.model_call import Call, set_call, set_training_call, versions_allowed
from flatout.levers.observed import Observed
from flatout.levers.subject import Subject, Undo
from flatout.machine.description import Machine
from flatout.torch_private.attributes import COMPILED_CALL, plain_call

if TYPE_CHECKING:
    from torch.fx import GraphModule
    from torch.nn import Module

PRODUCTS = {"matmul", "bmm", "einsum"}
HF_IMPLEMENTATION, EAGER = "_attn_implementation", "eager"
"""Of the configuration of a transformers model, whose modules hold the code of all implementations."""
NO_ATTENTION = "no module computes attention by hand"
DEPTH = 3
"""A forward, a method that it calls, a function that the method calls."""


class FusedAttention(Lever):
    """Compute `softmax(q @ k.T) @ v`, written by hand in a model, with torch's fused kernel.

    The matrix of attention weights is never written to memory. Modules that apply dropout to the weights or return
    them are left alone.
    """

    name = "fused attention"
    plan_field = "attention"
    acts_on_forward = True
    compiles = True

    def saving(self, machine: Machine, observed: Observed) -> Saving:
        return Saving(expected=0.1 * observed.busy_share, least=-0.15, most=0.6 * observed.busy_share)

    def applies(self, machine: Machine, observed: Observed) -> Verdict:
        if observed.compiled_in_script or any(module.compiled for module in observed.modules):
            return refuse("torch.compile is already used, which fuses attention too")
        if not any(module.attention_by_hand for module in observed.modules):
            return refuse(NO_ATTENTION)
        if observed.differentiates_twice:
            return refuse(f"the kernel's gradients have none of their own: {observed.differentiates_twice}")
        return offer("fused", reason="there is a softmax between two matrix products")

    @contextlib.contextmanager
    def apply(self, subject: Subject, value: Value) -> Iterator[None]:
        def report(why: str) -> None:
            subject.note_incident(self.name, why)

        with versions_allowed(), subject.modules.each(lambda module: _fuse(subject, module, report)):
            yield

    def nothing_in(self, model: Module, value: Value) -> str:
        return "" if attention_by_hand(model) else NO_ATTENTION

    def label(self, value: Value) -> str:
        return self.name


def attention_by_hand(model: Module) -> list[Module]:
    """The innermost modules of `model` whose own code takes a softmax between two products."""
    verdicts: dict[type, bool] = {}
    found = [module for module in model.modules() if _by_hand(module, verdicts)]
    known = {id(module) for module in found}
    return [module for module in found if not any(id(inner) in known for inner in _below(module))]


def _below(module: Module) -> Iterator[Module]:
    return (inner for inner in module.modules() if inner is not module)


def _by_hand(module: Module, verdicts: dict[type, bool]) -> bool:
    if getattr(getattr(module, "config", None), HF_IMPLEMENTATION, EAGER) != EAGER:
        return False
    kind = type(module)
    if kind not in verdicts:
        names: set[str] = set()
        _names(getattr(kind, "forward", None), module, names, DEPTH)
        if any(type(child).__name__ == "Softmax" for child in module.children()):
            names.add("softmax")
        verdicts[kind] = "softmax" in names and bool(names & PRODUCTS)
    return verdicts[kind]


def _names(function: object, module: Module, names: set[str], depth: int) -> None:
    """Add the names that a function uses, `@` as 'matmul', and those of the script's functions that it calls."""
    function = getattr(function, "__func__", function)
    if not isinstance(function, FunctionType) or not depth or _is_torchs(function):
        return
    code: CodeType = function.__code__
    names |= set(code.co_names)
    if any(one.opname == "BINARY_OP" and one.argrepr.startswith("@") for one in dis.get_instructions(code)):
        names.add("matmul")
    for name in code.co_names:
        called = function.__globals__.get(name)
        if not isinstance(called, FunctionType):
            called = getattr(type(module), name, None)
        if called is not function:
            _names(called, module, names, depth - 1)


def _is_torchs(function: FunctionType) -> bool:
    return (function.__module__ or "").partition(".")[0] == "torch"  # None: made by exec


def _fuse(subject: Subject, model: Module, report: Callable[[str], None]) -> Undo[Module] | None:
    import torch

    from flatout.levers.attention_graph import fuse_attention

    def backend(graph_module: GraphModule, examples: object) -> Call:
        if not fuse_attention(graph_module) and "softmax" in str(graph_module.code):
            report("the weights are dropped out, returned or computed in a way that is not recognized")
        return graph_module.forward

    targets = attention_by_hand(model)
    before: list[Call | None] = [getattr(target, COMPILED_CALL) for target in targets]
    for target, call in zip(targets, before, strict=True):
        plain: Call = call or plain_call(target)
        set_training_call(subject, target, torch.compile(plain, backend=backend), plain)

    changed = [(weakref.ref(target), call) for target, call in zip(targets, before, strict=True)]

    def undo(model: Module) -> None:  # of what was changed: the model may have other layers by now
        for reference, call in changed:
            if (target := reference()) is not None:
                set_call(target, call)

    return undo if targets else None
