"""Does a script train on several devices as on one? The same steps on one and on all of them, as trials, compared.

    proof = prove_devices(target, 2, settings)
    proof.verdict, proof.reason

Three runs from the same seed: on one device, which writes its state at some steps; on one device with every weight
moved by one rounding error, which shows how much of a difference rounding explains; and on all devices. At the steps
that are compared each run continues from the first one's state, and gradients, updates and losses are compared as in a
tune's proof (`flatout.tuning.proof`), with the same limits. The samples in every batch are compared by their indices.

Where steps cannot be equal (dropout, batch norms on shares, other random numbers in the model), losses are compared
over several seeds: each seed is run on one device and on all, and the verdict is statistical.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from flatout.errors import ScriptError
from flatout.script.child_command import child_command
from flatout.script.entry import Target
from flatout.script.replicas.settings import LOSSES, RECORD, Facts, Recording, Settings
from flatout.script.replicas.starting import QUIET, ranks_prepared, start_ranks
from flatout.script.replicas.trial_rank import NO_STEPS
from flatout.script.trial.answers import Answer
from flatout.script.work_folder import work_folder
from flatout.tuning import numerics
from flatout.tuning import proof as judge
from flatout.tuning.numerics import LevelDifference, Numerics

STEPS, CHECK_EVERY = 40, 8
SEEDS = 5
"""Of the comparison of losses over seeds."""
REPEATED = (("PYTHONWARNINGS", "ignore"),)
"""Of runs after the first, which has printed the script's warnings."""
Verdict = Literal["equal to rounding", "alike", "different", "not comparable"]
Progress = Callable[[str], None]


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
    """Was dropout left out where steps were compared, because ranks draw other masks than one device?"""
    over_seeds: LevelDifference | None = None
    """Of the losses on all devices from those on one, dropout included; None: not needed."""
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        found = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}
        return {**found, "over_seeds": None if self.over_seeds is None else self.over_seeds._asdict()}


@dataclass(frozen=True, kw_only=True)
class _Run:
    numerics: Numerics
    order: int
    autocast: bool
    """Does the script compute in 16 bits?"""
    facts: Facts


def prove_devices(
    target: Target,
    devices: int,
    settings: Settings,
    *,
    steps: int = STEPS,
    over_seeds: bool = True,
    progress: Progress = lambda text: None,
) -> DevicesProof:
    """over_seeds: where steps cannot be equal, compare losses from several seeds, which takes ten more runs.

    Raises ScriptError where the script fails or trains nothing, and what a rank raises that refuses to go on.
    """
    progress(f"comparing {steps} steps on one device and on {devices}")
    proof, facts = _compared(target, devices, settings, steps, without_dropout=False)
    if facts.draws_in_model:
        progress("comparing them without dropout")
        without, facts_without = _compared(target, devices, settings, steps, without_dropout=True)
        if not facts_without.draws_in_model:
            proof = replace(without, without_dropout=True)
    shares = facts.batch_norms > 0 and not facts.multiplied  # of which they see mean and variance
    if proof.verdict == "different" or not over_seeds or not (facts.draws_in_model or shares):
        return proof
    return _with_seeds(proof, target, settings, progress)


def _with_seeds(proof: DevicesProof, target: Target, settings: Settings, progress: Progress) -> DevicesProof:
    """The verdict on what steps cannot show, from the losses over several seeds."""

    def losses(devices: int, seed: int) -> Numerics:
        progress(f"seed {seed + 1} of {SEEDS} on {'one device' if devices == 1 else f'{devices} devices'}")
        with work_folder() as unused:
            recording = Recording(steps=proof.steps, role="free", seeds_moved=seed, reference=str(unused), checks=())
            return _recorded(target, devices, settings, recording).numerics

    runs = [(losses(1, seed), losses(proof.devices, seed)) for seed in range(SEEDS)]
    plains, shared = [plain for plain, _ in runs], [other for _, other in runs]
    if not all(run.stays_finite() for run in plains):
        reason = "its numbers become infinite or NaN on one device"
        return replace(proof, verdict="not comparable", reason=reason)
    if not all(run.stays_finite() for run in shared):
        return replace(proof, verdict="different", reason="its numbers become infinite or NaN on several devices")
    found = numerics.paired_difference(plains, shared)
    if found is None:
        return proof
    proof = replace(proof, over_seeds=found)
    over = f"losses of the later half over {found.pairs} seeds"
    if found.half_width > numerics.STATISTICAL_RESOLUTION:
        reason = f"{over} vary so much that a difference of {found.half_width:.0%} would not be detected"
        return replace(proof, verdict="not comparable", reason=reason)
    if abs(found.mean) > found.resolution:
        return replace(proof, verdict="different", reason=f"{over} are {found} off those on one device")
    return proof if proof.verdict == "equal to rounding" else replace(proof, verdict="alike", reason="")


def _compared(
    target: Target, devices: int, settings: Settings, steps: int, *, without_dropout: bool
) -> tuple[DevicesProof, Facts]:
    """(the verdict on the steps, what the first of all ranks saw)"""

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
    notes = ["the script computes in 16 bits: differences are those of 16-bit rounding errors"] * plain.autocast
    if seeds := plain.numerics.unseeded:
        notes.append(f"not seeded by the script, and given one seed: {', '.join(seeds[:3])}")
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
        notes=tuple(notes),
    )
    return proof, shared.facts


def _recorded(target: Target, devices: int, settings: Settings, recording: Recording) -> _Run:
    visible = settings.visible[:devices]
    told = replace(settings, recording=recording, is_trial=True, visible=visible)
    with ranks_prepared(told, Path(recording.reference)) as folder:
        command = child_command("flatout.script.replicas.trial_rank", str(folder), *target.command)
        variables = QUIET if recording.role == "reference" else QUIET + REPEATED
        status = start_ranks(command, devices, folder, variables=variables)
        if status == NO_STEPS:
            raise ScriptError(
                "no training step was seen", limit="steps are compared", remedy="prove a script that trains"
            )
        if status or not (folder / RECORD).exists():
            number = "one device" if devices == 1 else f"{devices} devices"
            raise ScriptError(f"the script failed on {number} (exit status {status})", remedy="see its error above")
        answer: Answer = json.loads((folder / RECORD).read_text())  # as `trial_rank` wrote it
        parts = [json.loads((folder / f"{LOSSES}{rank}.json").read_text()) for rank in range(devices)]
        facts = Facts.read(folder) or Facts(ranks=devices)
    answer["losses"] = [
        [sum(values) / devices for values in zip(*step, strict=True)] for step in zip(*parts, strict=True)
    ]
    return _Run(numerics=Numerics.from_answer(answer), order=answer["order"], autocast=answer["autocast"], facts=facts)


def _judged(plain: _Run, nudged: _Run, shared: _Run) -> tuple[Verdict, str]:
    facts = shared.facts
    if facts.draws_in_model:
        return "not comparable", (
            "the model draws random numbers, also without dropout, and each rank draws its own: whether they train "
            "alike is not known"
        )
    if facts.batch_norms:
        return "not comparable", "batch norms see the share of each rank, so that it is another training"
    if facts.multiplied:
        return "not comparable", "with --batch per-device batches are larger than those of one device"
    if plain.order != shared.order:
        return "different", "batches had other samples than on one device"
    reason = judge.not_within_rounding(plain.numerics, nudged.numerics, shared.numerics)
    return ("equal to rounding", "") if reason is None else ("different", reason)
