"""Attention that a model computes by hand, run by torch's fused kernel: the scores are never written to memory.

Such modules are recognized by their code: a forward, or a function that it calls, that takes a softmax between two
products. Each is traced by torch.compile's front end, without its code generator: the attention in the graph is
replaced (`attention_graph`), everything else runs unchanged, and torch's guards retrace it for another shape or mode.
"""

from __future__ import annotations

import contextlib
import dis
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import TYPE_CHECKING

from flatout.levers.lever import Lever, Saving, Value, Verdict, offer, refuse
from flatout.levers.model_call import Call, call_of, calls_put_back, set_training_call, versions_allowed
from flatout.levers.observed import Observed
from flatout.levers.subject import Subject, Undo
from flatout.machine.description import Machine

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
    names_value = False
    acts_on_forward = True
    compiles = True

    def saving(self, machine: Machine, observed: Observed) -> Saving:
        return Saving(expected=0.1 * observed.busy_share, least=-0.15, most=0.6 * observed.busy_share)

    def applies(self, machine: Machine, observed: Observed) -> Verdict:
        if observed.is_compiled:
            return refuse("torch.compile is already used, which fuses attention too")
        if not any(module.attention_by_hand for module in observed.modules):
            return refuse(NO_ATTENTION)
        if observed.differentiates_twice:
            return refuse(f"the kernel's gradients have none of their own: {observed.differentiates_twice}")
        return offer("fused", reason="there is a softmax between two matrix products")

    @contextlib.contextmanager
    def apply(self, subject: Subject, value: Value) -> Iterator[None]:
        with versions_allowed(), subject.modules.each(lambda module: _fuse(subject, module, self.name)):
            yield

    def nothing_in(self, model: Module, value: Value) -> str:
        return "" if attention_by_hand(model) else NO_ATTENTION


def attention_by_hand(model: Module) -> list[Module]:
    """The innermost modules of `model` whose own code takes a softmax between two products."""
    verdicts: dict[type, bool] = {}
    found = [module for module in model.modules() if _by_hand(module, verdicts)]
    known = {id(module) for module in found}
    return [one for one in found if not any(id(inner) in known for inner in one.modules() if inner is not one)]


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
    if not isinstance(function, FunctionType) or not depth:
        return
    if (function.__module__ or "").partition(".")[0] == "torch":  # None: made by exec
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


def _fuse(subject: Subject, model: Module, lever: str) -> Undo[Module] | None:
    import torch

    from flatout.levers.attention_graph import fuse_attention

    def backend(graph_module: GraphModule, examples: object) -> Call:
        if not fuse_attention(graph_module) and "softmax" in str(graph_module.code):
            why = "the weights are dropped out, returned or computed in a way that is not recognized"
            subject.note_incident(lever, why)
        return graph_module.forward

    targets = attention_by_hand(model)
    undo = calls_put_back(targets)
    for target in targets:
        plain = call_of(target)
        set_training_call(subject, target, torch.compile(plain, backend=backend), plain)
    return undo
