"""The screen of a kernel's check."""

from __future__ import annotations

import json

from flatout.kernels import KernelCheck, KernelFailure, KernelProperty, KernelSpeed
from flatout.report.document import to_text
from flatout.report.kernel_text import kernel_document, kernel_text
from flatout.statistics import compare_paired
from flatout.timing import measurement

FAST, SLOW = [1.0e-3, 1.02e-3, 1.0e-3, 1.01e-3, 1.0e-3, 1.0e-3], [2e-3] * 6
SPEED = KernelSpeed(
    case="rows=8, float32",
    kernel=measurement("kernel", FAST),
    reference=measurement("reference", SLOW),
    compiled=None,
    compiled_reason="there is no C++ compiler",
    against_reference=compare_paired(SLOW, FAST),
    against_compiled=None,
    moved_bytes=1 << 20,
    flops=0,
    ceiling_seconds=0.5e-3,
    ceiling_reason="memory",
)
FAILURE = KernelFailure(what="output: element [8] is 1, expected 2", case="n=9", reproduce="kernel(torch.ones(9))")
FOUND = KernelCheck(
    target="scale.py",
    device="cpu",
    torch_version="2.13.0",
    seed=3,
    properties=(
        KernelProperty(name="forward", verdict="failed", cases=40, failed=7, failure=FAILURE),
        KernelProperty(name="memory", verdict="passed", cases=40, text="nothing outside is read or written"),
        KernelProperty(name="gradient", verdict="noted", text="no gradient: \x1b[31mits operator has none"),
    ),
    speeds=(SPEED,),
    notes=("2 cases were not checked",),
    seconds=3.2,
)


def test_the_screen() -> None:
    assert kernel_text(FOUND).splitlines() == [
        "kernel      scale.py · cpu · torch 2.13.0 · seed 3",
        "forward     FAILED   wrong in 7 of 40 cases, the smallest case: n=9",
        "                     output: element [8] is 1, expected 2",
        "                     reproduce: kernel(torch.ones(9))",
        "memory      passed   40 cases: nothing outside is read or written",
        "gradient    note     no gradient: [31mits operator has none",
        "speed       rows=8, float32: 1 ms (6 samples)",
        "              x1.99 (1.96–2.00) as fast as the reference, 2 ms",
        "              the compiled reference: unknown, because there is no C++ compiler",
        "              50% of the ceiling (500 µs for 1 MiB of inputs and outputs: memory)",
        "note        2 cases were not checked",
        "verdict     wrong: forward (3.2 s)",
    ]


def test_the_document_is_read_back() -> None:
    document = json.loads(to_text(kernel_document(FOUND)))
    assert document["ok"] is False
    assert document["speeds"][0]["share_of_ceiling"] == 0.5
    assert KernelSpeed.from_json(document["speeds"][0]) == SPEED
    assert tuple(KernelProperty.from_json(one) for one in document["properties"]) == FOUND.properties
    assert "output: element [8]" in FOUND._repr_html_()
