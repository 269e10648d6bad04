"""The kernel's time beside the reference's, the compiled reference's, and the least that this machine needs.

A kernel has to read its inputs and write its outputs once; the memory's measured bandwidth gives the time for that, the
measured products the time for the reference's matrix products. The longer of the two is the ceiling.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from flatout.errors import describe_error
from flatout.kernels.custom.cases import Case, case_text, grown
from flatout.kernels.custom.definition import Definition
from flatout.kernels.custom.drawn_inputs import draw
from flatout.kernels.custom.kernel_calls import outputs_of, synchronize
from flatout.kernels.custom.result import KernelSpeed
from flatout.machine.ceilings import Ceilings
from flatout.statistics import compare_paired
from flatout.timing import interleave

ELEMENTS, QUICK_ELEMENTS = 1 << 23, 1 << 20
"""Of all inputs together, and of all outputs: more than most caches hold; in a quick check less."""
ROUNDS, MOST_SECONDS, QUICK_SECONDS = 20, 6.0, 2.0
_GEMM = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
NO_CEILINGS = "the ceilings of this machine were not measured: flatout check --measure"


def timed_case(definition: Definition, dtype: str, *, quick: bool) -> Case:
    """The user's sizes, or large ones."""
    sizes = grown(definition, QUICK_ELEMENTS if quick else ELEMENTS, fixed=definition.timing)
    layouts = (definition.layouts[0],) * len(definition.arguments)
    return Case(sizes=sizes, dtype=dtype, layouts=layouts)


def speed_of(
    definition: Definition,
    case: Case,
    device: str,
    *,
    ceilings: Ceilings | None,
    backend: str,
    quick: bool,
    fingerprint: str,
) -> KernelSpeed:
    """Timed in turns with the reference, and the compiled one where a compiler is there (backend)."""
    # Without guard zones: they would be the same, but for a place in memory that no program has.
    values = draw(definition, case, device).values
    functions: dict[str, Callable[[], object]] = {
        "kernel": lambda: definition.kernel(*values),
        "reference": lambda: definition.reference(*values),
    }
    with torch.no_grad():
        compiled, reason = _compiled(definition, values, backend)
        if compiled is not None:
            functions["compiled"] = compiled
        seconds = QUICK_SECONDS if quick else MOST_SECONDS
        found = interleave(
            functions,
            ROUNDS,
            synchronize=lambda: synchronize(device),
            max_seconds=seconds,
            machine_fingerprint=fingerprint,
        )
        outputs = outputs_of(definition, definition.kernel(*values), values)
        flops = _flops(definition, values)
    kernel, reference, timed = found["kernel"], found["reference"], found.get("compiled")
    tensors = {id(one): one for one in (*values, *outputs) if isinstance(one, Tensor)}
    moved = sum(one.nbytes for one in tensors.values())
    ceiling, why = ceiling_seconds(moved, flops, case.dtype, ceilings)
    if ceilings is not None and device == "cpu" and ceilings.threads != torch.get_num_threads():
        why += f", measured with {ceilings.threads} threads where this ran with {torch.get_num_threads()}"
    return KernelSpeed(
        case=case_text(definition, case),
        kernel=kernel,
        reference=reference,
        compiled=timed,
        against_reference=compare_paired(reference.samples_seconds, kernel.samples_seconds),
        against_compiled=None if timed is None else compare_paired(timed.samples_seconds, kernel.samples_seconds),
        compiled_reason=reason,
        moved_bytes=moved,
        flops=flops,
        ceiling_seconds=ceiling,
        ceiling_reason=why,
    )


def _compiled(
    definition: Definition, values: tuple[object, ...], backend: str
) -> tuple[Callable[[], object] | None, str]:
    """(the compiled reference, why there is none)."""
    if backend != "inductor":
        return None, f"torch.compile was used with {backend} only"
    torch.compiler.reset()
    compiled = torch.compile(definition.reference, dynamic=False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compiled(*values)
    except Exception as error:  # of torch.compile, or the user's own code
        return None, f"the reference does not compile: {describe_error(error)}"
    return lambda: compiled(*values), ""


def _flops(definition: Definition, values: tuple[object, ...]) -> int:
    counting = FlopCounterMode(display=False)
    with counting:
        definition.reference(*values)
    return int(counting.get_total_flops())


def ceiling_seconds(moved_bytes: int, flops: int, dtype: str, ceilings: Ceilings | None) -> tuple[float | None, str]:
    """(the least time, why it is unknown or which ceiling it is)."""
    if ceilings is None:
        return None, NO_CEILINGS
    bandwidth = ceilings.memory_copy_bytes_per_second or ceilings.memory_read_bytes_per_second
    if bandwidth is None:
        return None, "the memory's bandwidth was not measured"
    moving = moved_bytes / bandwidth.value
    product = ceilings.gemm_flops_per_second.get(_GEMM.get(dtype, ""))
    computing = flops / product.value if product is not None else 0.0
    if flops and product is None and computing <= moving:
        return moving, f"memory alone: products in {dtype} were not measured"
    return (computing, "products") if computing > moving else (moving, "memory")
