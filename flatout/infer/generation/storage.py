"""In how many bits a decoder's matrices are held, as a plan says it."""

from __future__ import annotations

from typing import Literal

from flatout.errors import PlanError
from flatout.plan import Plan

Storage = Literal["fp32", "bf16", "int8", "int4"]


def storage_of(plan: Plan) -> Storage:
    """int8 and int4 where the plan holds weights so, else its precision; without one: fp32, which changes nothing."""
    if plan.precision == "fp16":
        limit = "generation holds weights in fp32, bf16, int8 or int4"
        raise PlanError("precision is 'fp16'", limit=limit, remedy="set precision = 'bf16'")
    return plan.weights or plan.precision or "fp32"


def storage_of_head(storage: Storage) -> Storage:
    """In 4 bits the head would cost more exactness than all blocks together, and is a small part of a large model."""
    return "int8" if storage == "int4" else storage
