"""The work of one training step: its operators, each with shapes, operations and bytes.

From an `OperatorFollower`, as a CPU called them, or as CUDA would.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from flatout.operator_bytes import moves_no_data
from flatout.profiling.operator_classes import operator_class
from flatout.profiling.profile import OperatorClass
from flatout.replaced import replaced

if TYPE_CHECKING:
    from flatout.profiling.following import FollowedOperator, OperatorFollower

Part = Literal["forward", "backward", "optimizer"]
HALF = ("bfloat16", "float16")
ATTENTION, DROPOUT = "(attention)", "(dropout)"
SCORES_AGAIN = 1.25
"""Its backward pass in one operator computes the scores again: five products instead of four."""
_NO_WORK_ON_TENSORS = ("prim::", "profiler::")
_NO_KERNEL = ("aten::_local_scalar_dense", "aten::ones_like", "aten::lift_fresh")


@dataclass(frozen=True, kw_only=True)
class Operator:
    """One operator with certain shapes, as often as a step calls it."""

    name: str
    operator_class: OperatorClass
    part: Part
    shapes: tuple[tuple[int, ...], ...] = ()
    """Of its tensor arguments; () where they are in lists."""
    dtype: str
    """Of its first floating point argument."""
    calls: float
    flops: float
    """Of all calls; 0: it has no products."""
    bytes: float
    """Of all calls: arguments and results, each once."""

    @property
    def half(self) -> bool:
        """Is it in a precision of 16 bits?"""
        return self.dtype in HALF

    @property
    def uncounted(self) -> bool:
        """May it have FLOPs that are unknown? Those of aten without a formula have none."""
        return not self.flops and not self.name.startswith(("aten::", "mkldnn"))

    @property
    def time_steps(self) -> float:
        """Of a recurrent layer's calls, one after the other. oneDNN's layers get [time, samples, features]; of others
        the longer of these two sizes is taken."""
        if not self.shapes or not self.shapes[0]:
            return self.calls
        sizes = self.shapes[0][:2]
        return self.calls * (sizes[0] if "mkldnn" in self.name else max(sizes))


@dataclass(frozen=True, kw_only=True)
class StepOperators:
    """Those of a script's step, as it took it."""

    operators: tuple[Operator, ...]
    samples: int | None
    """That it drew from a loader; None: it was not seen."""
    device: str
    tf32: bool
    """May its fp32 products run as TF32?"""
    fault: str
    """Why operators, or their FLOPs, are missing; ''."""
    rolled_back: Mapping[str, str]
    """Levers that could not be applied, and why."""

    def as_on_cuda(self) -> tuple[Operator, ...]:
        """With the optimizer's updates for all weights at once, as torch makes them there."""
        kept = [one for one in self.operators if one.part != "optimizer"]
        updates: dict[str, Operator] = {}
        for one in self.operators:
            if one.part == "optimizer":
                before = updates.get(one.name)
                moved = one.bytes if before is None else before.bytes + one.bytes
                updates[one.name] = replace(one, shapes=(), calls=1.0, bytes=moved)
        return (*kept, *updates.values())


def summed(operators: Iterable[Operator]) -> tuple[Operator, ...]:
    """Those that are alike, as one with all their calls."""
    found: dict[tuple[object, ...], Operator] = {}
    for one in operators:
        key = one.name, one.part, one.shapes, one.dtype
        before = found.get(key)
        found[key] = (
            one
            if before is None
            else replace(
                before, calls=before.calls + one.calls, flops=before.flops + one.flops, bytes=before.bytes + one.bytes
            )
        )
    return tuple(found.values())


@contextlib.contextmanager
def marked(follower: OperatorFollower) -> Iterator[None]:
    """Know which operators are of one attention or dropout: a CPU may compute in many what CUDA does in one."""
    from torch.nn import functional

    numbers = itertools.count()

    def within(name: str) -> Callable[[Callable[..., object]], Callable[..., object]]:
        def make(original: Callable[..., object]) -> Callable[..., object]:
            @functools.wraps(original)
            def call(*args: object, **kwargs: object) -> object:
                with follower.within(f"{name}{next(numbers)}"):  # a module, or none, may call it several times
                    return original(*args, **kwargs)

            return call

        return make

    with (
        replaced(functional, "scaled_dot_product_attention", within(ATTENTION)),
        replaced(functional, "dropout", within(DROPOUT)),
    ):
        yield


def as_one(operators: Iterable[FollowedOperator]) -> tuple[Operator, ...]:
    """Operators of a step that was followed on a CPU, `marked`, as CUDA would call them: attention and dropout are one
    in each direction."""
    apart: list[FollowedOperator] = []
    together: dict[tuple[str, str], list[FollowedOperator]] = {}
    for one in operators:
        name = one.origin.module.rpartition(".")[2]
        if name.startswith((ATTENTION, DROPOUT)) and one.phase in ("forward", "backward", "other"):
            together.setdefault((one.origin.module, one.phase), []).append(one)
        else:
            apart.append(one)
    return summed((*of_followed(apart), *(_fused(name, same) for (name, _), same in together.items())))


def _fused(module: str, same: Sequence[FollowedOperator]) -> Operator:
    """One call of attention, or dropout, in one direction."""
    backward = same[0].phase == "backward"
    flops = sum(one.flops or 0.0 for one in same)
    products = [one for one in same if one.flops]
    if ATTENTION in module and flops:
        return Operator(
            name="aten::_scaled_dot_product_attention" + "_backward" * backward,
            operator_class="attention",
            part="backward" if backward else "forward",
            shapes=products[0].shapes,
            dtype=products[0].dtype,
            calls=1.0,
            flops=flops * (SCORES_AGAIN if backward and len(products) > 1 else 1.0),
            bytes=0.0,
        )
    largest = max(same, key=lambda one: one.size_bytes)
    return Operator(
        name="aten::native_dropout" + "_backward" * backward,
        operator_class="pointwise",
        part="backward" if backward else "forward",
        shapes=largest.shapes,
        dtype=largest.dtype,
        calls=1.0,
        flops=0.0,
        bytes=largest.size_bytes,
    )


def of_followed(operators: Iterable[FollowedOperator]) -> Iterator[Operator]:
    for one in operators:
        if _is_nothing(one.name) or one.phase in ("data", "copies", "communication", "evaluation"):
            continue
        update = one.phase == "optimizer"
        yield Operator(
            name=one.name,
            operator_class="optimizer" if update else operator_class(one.name),
            part="optimizer" if update else "backward" if one.phase == "backward" else "forward",
            shapes=one.shapes,
            dtype=one.dtype,
            calls=1.0,
            flops=one.flops or 0.0,
            bytes=one.size_bytes,
        )


def _is_nothing(name: str) -> bool:
    """Does it launch no kernel?"""
    if name in _NO_KERNEL or name.startswith(_NO_WORK_ON_TENSORS) or operator_class(name) == "communication":
        return True
    return moves_no_data(name)
