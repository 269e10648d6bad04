import json
from dataclasses import replace
from pathlib import Path

import pytest

from flatout.diagnose.finding import Finding, Severity
from flatout.machine.description import Gpu, Machine
from flatout.report.machine_text import check_text, exit_code, machine_line, verdict

MACHINE = Machine.from_json(json.loads((Path(__file__).parents[1] / "recorded" / "machine_two_cores.json").read_text()))


def finding(severity: Severity) -> Finding:
    return Finding(
        name="x", severity=severity, title="a title", evidence="seen", remedy="fix it", next_command="fix -x"
    )


def test_a_machine_in_one_line() -> None:
    line = machine_line(MACHINE)
    assert line.startswith("2 cores AMD EPYC (bf16, int8), 23.5 GiB · ceilings: fp32 ")
    assert "bf16 " in line
    assert line.endswith("GB/s")
    assert "ceilings" not in machine_line(MACHINE.with_ceilings(None))
    assert MACHINE.ceilings is not None
    busy = machine_line(MACHINE.with_ceilings(replace(MACHINE.ceilings, contended=True)))
    assert busy.endswith("(too low: others used it)")


def test_every_ceiling_is_shown_with_its_spread_or_its_reason() -> None:
    text = check_text(MACHINE, [])
    rows = [line for line in text.splitlines() if "%" in line]
    assert len(rows) == 8
    assert all("% to +" in row for row in rows)
    assert "not measured: to and from a GPU (no GPU that torch can use)" in text
    assert max(map(len, text.splitlines())) <= 110
    assert "flatout check --measure" in check_text(MACHINE.with_ceilings(None), [])


def test_a_gpu_is_described() -> None:
    gpu = Gpu(
        name="NVIDIA H200",
        index=0,
        compute_capability=(9, 0),
        memory_total_bytes=140 * 1024**3,
        memory_free_bytes=139 * 1024**3,
        multiprocessors=132,
        fast_dtypes=("bf16", "fp8"),
    )
    versions = replace(MACHINE.versions, cuda="13.0", cudnn="9.1", nccl="2.2", driver="580", driver_cuda="13.0")
    text = check_text(replace(MACHINE, devices=(gpu,), no_devices_reason=None, versions=versions), [])
    assert "NVIDIA H200, compute capability 9.0, 132 multiprocessors, 140 GiB, 139 GiB free; fast in bf16, fp8" in text
    assert "CUDA 13.0, cuDNN 9.1, NCCL 2.2" in text
    unknown = Gpu(name="Some GPU", index=1)
    assert "gpu 1       Some GPU\n" in check_text(replace(MACHINE, devices=(unknown,)), [])


@pytest.mark.parametrize(
    ("severities", "code", "words"),
    [
        ([], 0, "fine"),
        (["note"], 0, "fine"),
        (["note", "warning"], 2, "usable, with 1 problem to fix"),
        (["warning", "warning"], 2, "usable, with 2 problems to fix"),
        (["warning", "unusable"], 1, "unusable until that is fixed"),
    ],
)
def test_the_verdict_and_the_exit_code(severities: list[Severity], code: int, words: str) -> None:
    findings = [finding(severity) for severity in severities]
    assert (exit_code(findings), verdict(findings)) == (code, words)


def test_a_finding_says_what_was_seen_and_what_to_do() -> None:
    assert check_text(MACHINE, [finding("warning")]).endswith(
        "warning     a title\n            seen\n            do: fix it\n            next: fix -x\n"
        "verdict     usable, with 1 problem to fix"
    )
