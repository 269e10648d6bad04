"""A made-up profile on one screen, and as a document."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flatout.machine.description import Machine
from flatout.profiling.profile import (
    CollectiveRow,
    Communication,
    IdleCause,
    KernelRow,
    LineRow,
    MatrixUnits,
    ModuleRow,
    OperatorRow,
    Profile,
    RooflineRow,
    StepParts,
    WaitRow,
)
from flatout.report.profile_text import ScriptProfile, profile_document, profile_text, script_text, verdict
from flatout.script.entry import Target
from flatout.script.process_record import ProcessRecord
from flatout.script.profile_trial import ProfileWatched, RankProfile

MACHINE = Machine.from_json(json.loads((Path(__file__).parents[1] / "recorded" / "machine_two_cores.json").read_text()))
HOSTILE = "<b>\x1b[31mred\x07"


def operator(name: str, seconds: float, *, flops: float | None = None, line: str = "train.py:3") -> OperatorRow:
    return OperatorRow(
        name=name,
        operator_class="matmul" if flops else "pointwise",
        shapes="[8, 16] [16, 4]",
        dtype="float32",
        calls=2,
        seconds=seconds,
        host_seconds=seconds,
        phase="forward",
        module="Net.fc",
        line=line,
        device="cpu",
        flops=flops,
        bytes=1e6,
    )


def ceiling(kind: str, seconds: float, share: float | None) -> RooflineRow:
    products = kind == "matmul"
    return RooflineRow(
        operator_class="matmul" if products else "pointwise",
        dtype="fp32" if products else "",
        seconds=seconds,
        share=seconds / 8e-3,
        flops=2.4e8 if products else None,
        bytes=1e6,
        attained_flops_per_second=4e10 if products else None,
        attained_bytes_per_second=1e9,
        bound=None if share is None else "compute" if products else "memory",
        ceiling_name="fp32 products" if products else "memory copy",
        ceiling=None if share is None else 1e11 if products else 1e10,
        share_of_ceiling=share,
        reason=""
        if share is not None
        else "unknown, because this machine's ceilings were not measured (flatout check --measure)",
    )


PROFILE = Profile(
    name="train.py",
    device="cpu",
    step_kind="optimizer",
    steps=5,
    timed_steps=20,
    warm_up_steps=3,
    step_seconds=10e-3,
    samples_seconds=(10e-3,) * 20,
    profiled_step_seconds=10.1e-3,
    parts=StepParts(
        data=1e-3, copies=0, forward=3e-3, backward=4e-3, optimizer=1e-3, communication=0, idle=0, other=1e-3
    ),
    operators=(operator("aten::addmm", 6e-3, flops=2.4e8), operator("aten::relu", 2e-3, line="train.py:9")),
    modules=(
        ModuleRow(path="Net", kind="Net", depth=0, calls=1, forward_seconds=3e-3, backward_seconds=4e-3),
        ModuleRow(path="Net.fc", kind="Linear", depth=1, calls=1, forward_seconds=2e-3, backward_seconds=4e-3),
    ),
    lines=(LineRow(file="train.py", line=3, seconds=6e-3, share=0.75, text="return self.fc(x)"),),
    roofline=(ceiling("matmul", 6e-3, 0.4), ceiling("pointwise", 2e-3, 0.1)),
    matrix_units=MatrixUnits(
        unit="AMX", product_seconds=6e-3, seconds_on_units=0.0, share=0.0, rest=(("fp32: AMX takes bf16", 6e-3),)
    ),
    samples_per_step=64,
    flops=2.4e8,
    reasons={"tokens_per_step": "unknown, because"},
)


def script(profile: Profile | None, *, steps: int = 30, status: int | None = None) -> ScriptProfile:
    watched = ProfileWatched(
        target=Target(path="train.py", arguments=("--lr", "0.1")),
        status=status,
        step_kind="optimizer",
        steps=steps,
        profile=profile,
        observed=None,
        behaviour=None,
        tf32=False,
        trace=None,
        errors="",
    )
    return ScriptProfile(watched=watched, profile=profile, machine=MACHINE)


def test_one_screen() -> None:
    text = script_text(script(PROFILE))
    lines = text.splitlines()
    assert len(lines) <= 45
    assert lines[0].startswith("script     train.py --lr 0.1 · 5 steps profiled, 20 timed without the profiler")
    assert "6,400 samples/s" in lines[0]
    assert lines[1] == (
        "verdict    59% of a step of 10 ms is matrix products at 40% of this processor's measured fp32 rate"
    )
    assert "parts      10 ms = data 1 + forward 3 + backward 4 + optimizer 1 + other 1 ms" in text
    assert "   75%  train.py:3  return self.fc(x)" in text
    assert "fc (Linear)  2 ms forward + 4 ms backward" in text
    assert "   75%  addmm" in text
    assert "40%: 40 GFLOP/s of 100 GFLOP/s (fp32 products)" in text
    assert "0% of the time of products on AMX" in text
    assert "100% not: fp32: AMX takes bf16" in text
    assert "a step took 10.1 ms under the profiler, 10 ms without (+1%)" in text
    assert "flatout tune train.py --lr 0.1" in text


def test_rows_are_cut_on_a_screen_alone() -> None:
    long = replace(script(PROFILE), watched=replace(script(PROFILE).watched, target=Target.from_command(["x" * 200])))
    assert script_text(long).splitlines()[0].endswith("…")
    assert "…" not in script_text(long, width=None).splitlines()[0]
    assert script_text(long, width=None).splitlines()[0].startswith(f"script     {'x' * 200} · ")


def test_operators_by_shape_and_by_line() -> None:
    assert "addmm [8, 16] [16, 4] float32" in profile_text(PROFILE, by="shape")
    by_line = profile_text(PROFILE, by="line")
    assert "train.py:3" in by_line.split("operators")[1].splitlines()[0]


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"data": 7e-3, "forward": 3e-3}, "70% of a step of 10 ms waits for its loader; 59% is matrix products"),
        ({"idle": 8e-3, "forward": 2e-3}, "80% of a step of 10 ms leaves the GPU without work"),
        ({"communication": 9e-3, "forward": 1e-3}, "90% of a step of 10 ms is communication between ranks"),
    ],
)
def test_the_verdict_names_what_takes_most(parts: dict[str, float], words: str) -> None:
    none = dict.fromkeys(("data", "copies", "forward", "backward", "optimizer", "communication", "idle", "other"), 0.0)
    assert verdict(replace(PROFILE, parts=StepParts(**{**none, **parts}))).startswith(words)


def test_without_ceilings_the_rate_is_given() -> None:
    plain = replace(PROFILE, roofline=(ceiling("matmul", 6e-3, None),))
    assert verdict(plain) == "59% of a step of 10 ms is matrix products at 40 GFLOP/s"
    assert "flatout check --measure" in script_text(script(plain))


def test_python_that_takes_most_of_a_step_is_named() -> None:
    slow = replace(PROFILE, step_seconds=100e-3, profiled_step_seconds=101e-3)
    assert verdict(slow).startswith("91% of a step of 100 ms is outside of torch's operators; 5.9% is matrix products")
    unsure = replace(slow, profiled_step_seconds=150e-3)  # what the profiler adds is outside of operators too
    assert verdict(unsure).startswith("4.0% of a step of 100 ms is the backward pass")


def test_a_step_on_a_gpu() -> None:
    kernel = KernelRow(name="sgemm", kind="kernel", calls=2, seconds=6e-3, operator="aten::addmm")
    copy = KernelRow(name="Memcpy HtoD", kind="copy", calls=1, seconds=1e-3, bytes=12e6)
    cause = IdleCause(cause="host late", seconds=2e-3, evidence="the host did not queue")
    wait = WaitRow(operator="aten::_local_scalar_dense", line="train.py:12", calls=2, seconds=3e-3)
    found = replace(PROFILE, device="cuda:0", kernels=(kernel, copy), idle_causes=(cause,), waits=(wait,))
    text = profile_text(found)
    assert "2 x sgemm (aten::addmm)" in text
    assert "1 x Memcpy HtoD (copy, 12 GB/s)" in text
    assert "idle       2 ms: host late: the host did not queue" in text
    assert "waits          3 ms  2 x _local_scalar_dense  train.py:12" in text
    assert "of this GPU's measured fp32 rate" in text


def test_what_is_unknown_says_why() -> None:
    nothing = Profile(
        name="train.py",
        device="cpu",
        step_kind="optimizer",
        steps=0,
        timed_steps=0,
        warm_up_steps=1,
        step_seconds=None,
        profiled_step_seconds=None,
        parts=None,
        reasons={"parts": "the script ended", "operators": "nothing was profiled"},
    )
    assert verdict(nothing) == "unknown, because the script ended"
    assert "operators  nothing was profiled" in profile_text(nothing)


def test_files_that_were_written_have_a_size(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for path in (tmp_path / "trace.json", tmp_path / "logs" / "a", tmp_path / "logs" / "b"):
        path.write_bytes(b"x" * 2048)
    files = [("trace", tmp_path / "trace.json"), ("TensorBoard", tmp_path / "logs"), ("other", tmp_path / "absent")]
    text = script_text(script(PROFILE), files=files)
    assert "trace.json (2 KiB)" in text
    assert "logs (4 KiB)" in text
    assert "absent (unknown size)" in text
    assert "flatout profile --trace" not in text


def test_ranks_are_below_the_profile_of_the_first() -> None:
    exchanged = Communication(
        total_seconds=5e-3,
        exposed_seconds=2e-3,
        overlapped_seconds=3e-3,
        collectives=(CollectiveRow(name="gloo:all_reduce", calls=2, seconds=6e-3),),
    )
    ranks = tuple(
        RankProfile(
            name=f"rank {number}",
            record=ProcessRecord(
                pid=number,
                rank=number,
                ranks=3,
                started_at=float(number),
                steps=15,
                step_seconds=10e-3,
                device="cpu",
                peak_resident_bytes=1 << 20,
                ended=True,
                exposed_unknown_because="unknown, because it compiles",
            ),
            profile=None if number else replace(PROFILE, communication=exchanged),
            fault="" if number < 1 else "ValueError: planted",
        )
        for number in range(2)
    )
    found = script(PROFILE)
    found = replace(found, watched=replace(found.watched, ranks=ranks, rank_notes=("2 of 3 ranks were profiled",)))
    text = " ".join(script_text(found).split())
    assert "rank 0 exchanges for 5 ms of a profiled step: 2 ms exposed, 3 ms overlapped (2 x gloo:all_reduce)" in text
    assert "rank 1 could not be profiled: ValueError: planted" in text
    assert "waits for other ranks: unknown, because it compiles" in text
    assert "note 2 of 3 ranks were profiled" in text
    assert "next flatout run train.py" in text  # not tune, which refuses
    document: Any = profile_document(found)
    assert [one["name"] for one in document["processes"]] == ["rank 0", "rank 1"]
    assert document["rank_profiles"][0]["profile"]["communication"]["overlapped_seconds"] == 3e-3
    assert "processes" not in profile_document(script(PROFILE))
    again = Profile.from_json(json.loads(json.dumps(document["rank_profiles"][0]["profile"])))
    assert again.communication == exchanged


def test_without_a_step() -> None:
    text = script_text(script(None, steps=0, status=0))
    assert "no training step found" in text
    assert "processes that it starts" in text


def test_names_of_the_script_stay_inert() -> None:
    line = LineRow(file=f"{HOSTILE}.py", line=1, seconds=1e-3, share=0.5, text=f"x = '{HOSTILE}'")
    module = replace(PROFILE.modules[1], path=f"Net.{HOSTILE}", kind=HOSTILE)
    text = profile_text(replace(PROFILE, lines=(line,), modules=(module,), name=HOSTILE, notes=(HOSTILE,)))
    assert not [letter for letter in text if letter != "\n" and not letter.isprintable()]


def test_the_document_holds_it_all_and_is_read_back() -> None:
    found = json.loads(json.dumps(profile_document(script(PROFILE))))
    assert set(found) == {
        *("flatout", "script", "steps", "step_kind", "profile", "observed", "behaviour", "findings", "machine"),
    }
    assert Profile.from_json(found["profile"]) == PROFILE
    assert found["script"]["arguments"] is None
    assert profile_document(script(PROFILE), include_private=True)["script"]["arguments"] == ["--lr", "0.1"]  # type: ignore[index]
