"""fp32 tensors, but products in fewer bits: TF32 on CUDA; on CPUs oneDNN, which may use bf16."""

from __future__ import annotations

from contextlib import AbstractContextManager

from flatout.levers.lever import Lever, Saving, Value, Verdict, offer, refuse
from flatout.levers.observed import Observed
from flatout.levers.subject import Subject
from flatout.machine.description import Machine
from flatout.precision.matmul import matmul_precision

CONVERSION_SECONDS = 20e-6
"""The most that one operation takes, where its tensors are small."""

AFFECTED = {"float32", "complex64"}
"""Products of other types stay as they are."""


class MatmulPrecision(Lever):
    """fp32 tensors with faster, less exact matrix products: TF32 on CUDA, oneDNN with bf16 on CPUs.

    On a CPU oneDNN chooses by shape and instruction set whether it uses fewer bits; sometimes the gain is only that
    its fp32 product is faster than the default. The proof shows which it was.
    """

    name = "matmul precision"
    plan_field = "matmul_precision"
    recompiles = True
    of_process = True
    cheap_to_switch = True

    def saving(self, machine: Machine, observed: Observed) -> Saving:
        dtype = "tf32" if observed.device.startswith("cuda") else "bf16"
        saved = 0.9 * observed.saved_by_dtype(machine, dtype)  # weights and activations stay fp32
        if not observed.device.startswith("cuda"):  # each product is converted to bf16 and back
            cost = observed.share_of_operations(CONVERSION_SECONDS)
            return Saving(expected=0.3 * saved, least=-0.6 - cost, most=max(saved, 0.9 * observed.busy_share))
        return Saving(expected=saved, least=-0.1, most=max(saved, 0.9 * observed.busy_share))

    def applies(self, machine: Machine, observed: Observed) -> Verdict:
        if observed.matmul_precision != "highest":
            return refuse(f"it is already set to {observed.matmul_precision!r}")
        dtypes = {dtype for module in observed.modules for dtype in module.dtypes}
        if dtypes and not dtypes & AFFECTED:
            return refuse("the model's weights are not fp32")
        if observed.device.startswith("cuda"):
            gpu = machine.gpu(observed.device)
            if gpu is None or "tf32" not in gpu.fast_dtypes:
                return refuse("this GPU has no TF32")
            return offer("high", reason="this GPU has TF32")
        if "bf16" not in machine.cpu.fast_dtypes:
            return refuse("this CPU has no bf16 instructions")
        return offer("medium", reason="this CPU has bf16 instructions")

    def apply(self, subject: Subject, value: Value) -> AbstractContextManager[None]:
        return matmul_precision(str(value))

    def label(self, value: Value) -> str:
        return {"high": "TF32 matmul", "medium": "oneDNN matmul (may use bf16)"}.get(str(value), self.name)
