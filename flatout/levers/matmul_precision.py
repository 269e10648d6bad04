"""fp32 tensors, but products in fewer bits: TF32 on CUDA; on CPUs oneDNN, which may use bf16.

Whether oneDNN then takes fewer bits is its own choice, by shape and instruction set: at times the gain is only that
it computes in fp32 faster than the default. The proof shows which it was.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from flatout.levers.lever import Lever, Saving, Verdict, offer, refuse
from flatout.levers.observed import Observed
from flatout.levers.subject import Subject
from flatout.machine.description import Machine
from flatout.precision.matmul import matmul_precision

CONVERSION_SECONDS = 20e-6
"""Of one operation, where its tensors are small, at the most."""


class MatmulPrecision(Lever):
    """fp32 tensors with faster, less exact matrix products: TF32 on CUDA, oneDNN with bf16 on CPUs.

    On a CPU oneDNN chooses by shape and instruction set whether it uses fewer bits; at times the gain is only that
    its fp32 product is faster than the default. The proof shows which it was.
    """

    name = "matmul precision"
    plan_field = "matmul_precision"
    of_process = True
    cheap_to_switch = True

    def saving(self, machine: Machine, observed: Observed) -> Saving:
        dtype = "tf32" if observed.device.startswith("cuda") else "bf16"
        saved = 0.9 * observed.saved_by_dtype(machine, dtype)  # weights and activations stay fp32
        if not observed.device.startswith("cuda"):  # each product is converted, there and back
            cost = observed.share_of_operations(CONVERSION_SECONDS)
            return Saving(expected=0.3 * saved, least=-0.6 - cost, most=max(saved, 0.9 * observed.busy_share))
        return Saving(expected=saved, least=-0.1, most=max(saved, 0.9 * observed.busy_share))

    def applies(self, machine: Machine, observed: Observed) -> Verdict:
        if observed.matmul_precision != "highest":
            return refuse(f"the script sets it to {observed.matmul_precision!r} itself")
        if observed.device.startswith("cuda"):
            index = int(observed.device.partition(":")[2] or 0)
            gpu = next((gpu for gpu in machine.devices if gpu.index == index), None)
            if gpu is None or "tf32" not in gpu.fast_dtypes:
                return refuse("this GPU has no TF32")
            return offer("high", reason="this GPU has TF32")
        if "bf16" not in machine.cpu.fast_dtypes:
            return refuse("this CPU has no bf16 instructions")
        return offer("medium", reason="this CPU has bf16 instructions")

    def apply(self, subject: Subject, value: Any) -> AbstractContextManager[None]:
        return matmul_precision(value)

    def label(self, value: Any) -> str:
        return {"high": "TF32 matmul", "medium": "oneDNN matmul (may use bf16)"}.get(value, self.name)
