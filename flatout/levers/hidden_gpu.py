"""Hide the GPU from a script whose model the CPU would train faster."""

from __future__ import annotations

from flatout.levers.lever import Lever, Saving, Value, Verdict, offer, refuse
from flatout.levers.observed import Observed
from flatout.machine.description import Machine

OPERATION_SECONDS = 5e-6
"""The overhead of an operation on a CPU, including its part of the backward pass."""
MOST_FLOPS, USUAL_FLOPS = 200e9, 30e9
"""Per second, in fp32 on one core: more than any current core reaches, and what small products reach."""


class HiddenGpu(Lever):
    """Hide the GPU from a script whose steps are too small for it.

    Launching an operation on a GPU takes some microseconds whatever its size, so a small model can be faster on the
    CPU. A script that checks whether there is a GPU then trains on the CPU. One that does not check fails in its
    trial, and the lever is dropped.
    """

    name = "trained on the CPU"
    plan_field = "device"
    names_value = False
    switch = "process"
    comes_first = True

    def saving(self, machine: Machine, observed: Observed) -> Saving:
        flops, step_seconds = observed.flops_per_step, observed.step_seconds
        if not flops or not step_seconds:
            return Saving(expected=-0.5, least=-50.0, most=0.5)
        cores = machine.cpu.available_cores
        operations = (observed.operations_per_step or 0) * OPERATION_SECONDS

        def saved(flops_per_second: float, operations_seconds: float) -> float:
            return 1 - (flops / (cores * flops_per_second) + operations_seconds) / step_seconds

        return Saving(
            expected=saved(USUAL_FLOPS, operations),
            least=saved(USUAL_FLOPS / 10, 3 * operations),
            most=saved(MOST_FLOPS, operations / 5),
            why="its products alone take about as long on this processor",
        )

    def applies(self, machine: Machine, observed: Observed) -> Verdict:
        if not observed.device.startswith("cuda"):
            return refuse("the model is on the CPU")
        if observed.autocast_in_script or observed.scaler_in_script:
            return refuse("the script's mixed precision is for the GPU: on the CPU the numbers would differ")
        if observed.orders_device_work or observed.captures_graphs:
            return refuse(observed.orders_device_work or observed.captures_graphs)
        return offer("cpu", reason="its steps are too small for the GPU to pay")

    def environment(self, value: Value) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": ""}

    def takes(self, value: Value) -> bool:
        return bool(value == "cpu")
