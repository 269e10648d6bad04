"""What is said of a script that ran on several devices, what a tune found of them, and the proof that it trains there
as on one."""

from __future__ import annotations

from flatout.script.replicas.settings import Facts, Settings
from flatout.search.lines import BudgetOption, ratio_text
from flatout.tuning.devices.found import DevicesTrial, DevicesTuned
from flatout.tuning.devices_proof import SEEDS, DevicesProof
from flatout.units import counted, format_bytes, format_seconds


def sharing_lines(facts: Facts | None, settings: Settings) -> list[str]:
    """What a user has to know of such a run, a line each."""
    if facts is None:
        return []
    if not facts.updates or facts.samples is None:
        return [f"nothing was shared: no training step was seen, and all {facts.ranks} ranks ran the whole script"]
    ranks = f"{facts.ranks} ranks"
    lines = [
        f"{ranks} trained, each on its share of every batch ({facts.own_samples} of {facts.samples} samples); the loss "
        "and other figures of training batches are those of rank 0's share, and so are sums over samples: one that is "
        "divided by the size of the whole data set is too small"
    ]
    if settings.batch == "per-device":
        lines.append(
            f"a batch has {facts.samples} samples, {facts.ranks} times the script's, and an epoch fewer steps, at the "
            "script's learning rate (often multiplied by the number of devices, after a warm-up)"
            if facts.multiplied
            else "no batch size was changed: no training loader was made with shuffle=True or a sampler"
        )
    if facts.uneven:
        lines.append(f"{facts.uneven} of {facts.batches} batches were shared unevenly; their losses count by samples")
    if settings.loss is not None:
        meaning = {
            "mean": "a mean over samples, by their number",
            "sum": "a sum over samples: gradients were added",
            "terms": "a mean over targets, by their number or weight",
        }
        lines.append(f"the loss counted as {meaning[settings.loss]}")
    if facts.batch_norms:
        layers = "batch norm" if facts.batch_norms == 1 else f"{facts.batch_norms} batch norms"
        lines.append(f"{layers}: mean and variance of each rank's share; the running ones are rank 0's")
    if facts.draws_in_model:
        lines.append(
            "the model draws random numbers on the CPU, each rank its own: they, and the order of later epochs, are "
            "not those of one device"
        )
    if facts.realigned:
        times = "once" if facts.realigned == 1 else f"{facts.realigned} times"
        lines.append(f"the ranks' random numbers had come apart {times}, and were set to rank 0's before an epoch")
    if facts.unseeded:
        lines.append(f"not seeded by the script, and given one seed on all ranks: {', '.join(facts.unseeded[:3])}")
    return lines


def proof_text(proof: DevicesProof) -> str:
    on = f"on {proof.devices} devices"
    without = " without dropout" if proof.without_dropout else ""
    heads = {
        "equal to rounding": f"equal to rounding{without}: {proof.steps} steps {on} train as on one",
        "different": f"different{without}: {on} the script does not train as on one: {proof.reason}",
        "alike": f"alike: {proof.steps} steps {on} reach the losses of one device, over {SEEDS} seeds",
        "not comparable": f"not comparable: {proof.reason}",
    }
    notes = [*_over_seeds(proof), *(f"  {note}" for note in proof.notes)]
    if proof.verdict == "not comparable":
        return "\n".join([heads[proof.verdict], *notes])
    samples = "the same samples in every batch" if proof.samples_equal else "other samples in some batches"
    lines = [heads[proof.verdict], f"  data       {samples}"]
    if proof.verdict == "alike":
        return "\n".join([*lines, *notes])
    lines += _figures("losses", proof.largest_loss_difference, proof.rounding_loss_difference)
    lines += _figures("gradients", proof.largest_gradient_difference, proof.rounding_gradient_difference)
    first, last = proof.losses[0], proof.losses[-1]
    first_on_all, last_on_all = proof.losses_on_all[0], proof.losses_on_all[-1]
    if None not in (first, last, first_on_all, last_on_all):
        lines.append(
            f"  loss       {first:.6g} to {last:.6g} on one device, {first_on_all:.6g} to {last_on_all:.6g} {on}"
        )
    if proof.without_dropout:
        lines.append("  dropout    left out of these comparisons: each rank draws masks of its own, unlike one device")
    return "\n".join([*lines, *notes])


def _over_seeds(proof: DevicesProof) -> list[str]:
    found = proof.over_seeds
    if found is None:
        return []
    seeds = f"over {found.pairs} seeds" + (", with dropout" if proof.without_dropout else "")
    off = f"losses of the later half are {found} off those on one device, {seeds}"
    return [f"  seeds      {off}; up to {found.resolution:.1%} counts as alike"]


def _figures(name: str, found: float | None, rounding: float | None) -> list[str]:
    if found is None or rounding is None:
        return []
    return [f"  {name:10} differ by at most {found:.1e}; by {rounding:.1e} where every weight is rounded once"]


# a tune


def tuned_lines(found: DevicesTuned, option: BudgetOption) -> list[tuple[str, str]]:
    """What a tune found of several devices, as rows with a label: what was tried, the result, the proof. option: how
    more time is asked for."""
    rows = [("devices", _exchange(found))]
    width = max((len(_number(one.devices)) for one in found.trials), default=0)
    for one in found.trials:
        rows += [("", line) for line in _trial(one, width)]
    rows.append(("result", _result(found)))
    if found.enough_seconds is not None:
        rows.append(("", f"not all were reached: try {option(found.enough_seconds)} (about)"))
    if found.left_out:
        rows += [("", f"left out in ranks: {', '.join(f'{name} ({why})' for name, why in found.left_out.items())}")]
    if found.proof is not None:
        rows += [("", line) for line in proof_text(found.proof).splitlines()]
    return rows


def _exchange(found: DevicesTuned) -> str:
    kind = "which share the cores of the CPU" if found.kind == "cpu" else "a GPU each"
    if found.exchange is None:
        return f"up to {found.most}, {kind}; what they exchange was not measured, so nothing is predicted"
    size, seconds = format_bytes(found.exchange.size_bytes), format_seconds(found.exchange.all_reduce_seconds)
    return (
        f"up to {found.most}, {kind}; an all_reduce of {size} takes {seconds} between {found.exchange.ranks} (measured)"
    )


def _trial(one: DevicesTrial, width: int) -> list[str]:
    head = f"{one.outcome:<12}{_number(one.devices):<{width}}  "
    told = one.predicted
    predicted = "" if told is None else f"(predicted {told.least:.2f} to {told.most:.2f})"
    if one.comparison is None or one.baseline_seconds is None or one.candidate_seconds is None:
        lines = [head + " ".join(filter(None, [one.reason, predicted]))]
    else:
        times = f"{format_seconds(one.baseline_seconds)} -> {format_seconds(one.candidate_seconds)}"
        reason = "" if one.reason == "faster" else one.reason
        lines = [head + "  ".join(filter(None, [f"{times:<21} {ratio_text(one.comparison)}", predicted, reason]))]
    if told is not None:
        lines.append(f"{'':<12}predicted: a step of {format_seconds(told.step_seconds)}: {told.reason}")
    return lines


def _result(found: DevicesTuned) -> str:
    if found.chosen > 1 and found.comparison is not None:
        times = f"{format_seconds(found.baseline_seconds or 0.0)} -> {format_seconds(found.candidate_seconds or 0.0)}"
        of = f"{times} a step of the same batch, fresh processes, {found.comparison.pairs} pairs"
        return f"{ratio_text(found.comparison)} on {_number(found.chosen)} over one ({of})"
    timed = [one for one in found.trials if one.comparison is not None]
    ratios = ", ".join(f"{_number(one.devices)} {ratio_text(one.comparison)}" for one in timed if one.comparison)
    return found.reason + f": {ratios}" * bool(ratios)


def _number(devices: int) -> str:
    return counted(devices, "device")
