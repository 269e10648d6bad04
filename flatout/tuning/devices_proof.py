"""Does a script train on several devices as on one? The same steps on one and on all of them, as trials, compared.

    proof = prove_devices(target, 2, settings)
    proof.verdict, proof.reason

Three runs from the same seed: on one device, which writes its state at some steps; on one device with every weight
moved by one rounding error, which shows how much of a difference rounding explains; and on all devices. At the steps
that are compared each run continues from the first one's state, and gradients, updates and losses are compared as in a
tune's proof (`flatout.tuning.proof`), with the same limits. The samples in every batch are compared by their indices.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from flatout.errors import ScriptError
from flatout.script.child_command import child_command
from flatout.script.entry import Target
from flatout.script.replicas.recorded import NO_STEPS
from flatout.script.replicas.settings import LOSSES, RECORD, Facts, Recording, Settings
from flatout.script.replicas.starting import DevicesRequest, ranks_prepared, start_ranks
from flatout.script.work_folder import work_folder
from flatout.tuning import proof as judge
from flatout.tuning.numerics import Numerics

STEPS, CHECK_EVERY = 40, 8
QUIET = (("WANDB_MODE", "offline"), ("TORCH_CPP_LOG_LEVEL", "ERROR"))
"""Nothing is sent to tracking services; no warning that a trial without a network finds no name of its own."""
Verdict = Literal["equal to rounding", "different", "not comparable"]


@dataclass(frozen=True, kw_only=True)
class DevicesProof:
    """What the runs on one and on several devices showed."""

    verdict: Verdict
    reason: str
    """What differs, or why it cannot be compared; '' where they are equal."""
    devices: int
    steps: int
    samples_equal: bool
    """Had every batch the same samples in the same order?"""
    losses: tuple[float | None, ...]
    """Of each step, on one device."""
    losses_on_all: tuple[float | None, ...]
    largest_loss_difference: float | None
    """Relative; of the step where it is largest."""
    rounding_loss_difference: float | None
    """The same, of the run whose weights were moved by a rounding error."""
    largest_gradient_difference: float | None
    """Of one parameter, relative to its size, at the steps that start from the same state."""
    rounding_gradient_difference: float | None
    without_dropout: bool = False
    """Was dropout left out in all runs, because ranks draw other masks than one device?"""
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}


@dataclass(frozen=True, kw_only=True)
class _Run:
    numerics: Numerics
    order: int
    autocast: bool
    """Does the script compute in 16 bits?"""
    facts: Facts | None


def prove_devices(target: Target, devices: int, settings: Settings, *, steps: int = STEPS) -> DevicesProof:
    """Raises ScriptError where the script fails or trains nothing, and what a rank raises that refuses to go on."""
    found = _compared(target, devices, settings, steps, without_dropout=False)
    if not found.random:
        return found.proof
    without = _compared(target, devices, settings, steps, without_dropout=True)
    if without.random:
        return found.proof
    return replace(without.proof, without_dropout=True)


@dataclass(frozen=True, kw_only=True)
class _Compared:
    proof: DevicesProof
    random: bool
    """Did the model draw random numbers?"""


def _compared(target: Target, devices: int, settings: Settings, steps: int, *, without_dropout: bool) -> _Compared:
    def told(steps: int, role: Literal["reference", "checked"], ulps: int = 0) -> Recording:
        checks = tuple(sorted({*range(0, steps, min(CHECK_EVERY, max(1, steps // 2))), steps - 1}))
        return Recording(
            steps=steps,
            role=role,
            nudge_ulps=ulps,
            without_dropout=without_dropout,
            reference=str(reference),
            checks=checks,
        )

    with work_folder() as reference:
        plain = _recorded(target, 1, settings, told(steps, "reference"))
        if plain.numerics.ended:  # compared runs stop before the script's end, where it might do something else
            steps = plain.numerics.steps - 1
            if steps < 1:
                raise ScriptError(
                    f"the script makes {plain.numerics.steps + 1} training steps",
                    limit="two after the first one are needed to compare",
                    remedy="give it more to do",
                )
            for old in reference.glob("*.pt"):
                old.unlink()
            plain = _recorded(target, 1, settings, told(steps, "reference"))
        ulps = int(judge.FP32_TO_16_BITS) if plain.autocast else 1
        nudged = _recorded(target, 1, settings, told(steps, "checked", ulps))
        shared = _recorded(target, devices, settings, told(steps, "checked"))
        verdict, reason = _judged(plain, nudged, shared)
        if verdict == "different" and judge.is_seldom_beyond_rounding(plain.numerics, nudged.numerics, shared.numerics):
            farther = _recorded(target, 1, settings, told(steps, "checked", ulps * judge.FARTHER))
            with_farther = judge.with_farther(plain.numerics, nudged.numerics, farther.numerics)
            verdict, reason = _judged(plain, replace(nudged, numerics=with_farther), shared)
    proof = DevicesProof(
        verdict=verdict,
        reason=reason,
        devices=devices,
        steps=steps,
        samples_equal=plain.order == shared.order,
        losses=plain.numerics.mean_losses(),
        losses_on_all=shared.numerics.mean_losses(),
        largest_loss_difference=judge.largest_loss_difference(plain.numerics, shared.numerics),
        rounding_loss_difference=judge.largest_loss_difference(plain.numerics, nudged.numerics),
        largest_gradient_difference=judge.largest_gradient_difference(shared.numerics),
        rounding_gradient_difference=judge.largest_gradient_difference(nudged.numerics),
        notes=_notes(plain),
    )
    return _Compared(proof=proof, random=shared.facts is not None and shared.facts.draws_in_model)


def _recorded(target: Target, devices: int, settings: Settings, recording: Recording) -> _Run:
    visible = settings.visible[:devices]
    told = replace(settings, recording=recording, visible=visible)
    with ranks_prepared(told, Path(recording.reference)) as folder:
        command = child_command("flatout.script.replicas.recorded", str(folder), *target.command)
        status = start_ranks(DevicesRequest(target=target, devices=devices, variables=QUIET), folder, command)
        if status == NO_STEPS:
            raise ScriptError(
                "no training step was seen", limit="steps are compared", remedy="prove a script that trains"
            )
        if status or not (folder / RECORD).exists():
            number = "one device" if devices == 1 else f"{devices} devices"
            raise ScriptError(f"the script failed on {number} (exit status {status})", remedy="see its error above")
        answer: Any = json.loads((folder / RECORD).read_text())  # as `recorded` wrote it
        parts = [json.loads((folder / f"{LOSSES}{rank}.json").read_text()) for rank in range(devices)]
        facts = Facts.read(folder)
    answer["losses"] = [
        [sum(values) / devices for values in zip(*step, strict=True)] for step in zip(*parts, strict=True)
    ]
    return _Run(numerics=Numerics.from_answer(answer), order=answer["order"], autocast=answer["autocast"], facts=facts)


def _judged(plain: _Run, nudged: _Run, shared: _Run) -> tuple[Verdict, str]:
    facts = shared.facts
    if facts is not None and facts.draws_in_model:
        return "not comparable", (
            "the model draws random numbers, also without dropout, and each rank draws its own: whether they train "
            "alike is not known"
        )
    if facts is not None and facts.batch_norms:
        return "not comparable", "batch norms see the share of each rank, so that it is another training"
    if facts is not None and facts.multiplied:
        return "not comparable", "with --batch per-device batches are larger than those of one device"
    if plain.order != shared.order:
        return "different", "batches had other samples than on one device"
    reason = judge.not_within_rounding(plain.numerics, nudged.numerics, shared.numerics)
    return ("equal to rounding", "") if reason is None else ("different", reason)


def _notes(plain: _Run) -> tuple[str, ...]:
    found = (
        ["the script computes in 16 bits: differences are those of 16-bit rounding errors"] if plain.autocast else []
    )
    seeds = plain.numerics.unseeded
    if seeds:
        found.append(f"not seeded by the script, and given one seed: {', '.join(seeds[:3])}")
    return tuple(found)
