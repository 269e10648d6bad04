"""What a tune found of several devices: what was tried, the result, the proof."""

from __future__ import annotations

from flatout.report.devices_text import proof_text
from flatout.search.lines import BudgetOption, ratio_text
from flatout.tuning.devices.found import DevicesTrial, DevicesTuned
from flatout.units import counted, format_bytes, format_seconds


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
