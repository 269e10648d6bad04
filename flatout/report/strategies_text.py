"""What the choice of a parallel strategy found, as a screen for people and as a document for programs."""

from __future__ import annotations

from flatout.machine.description import Machine
from flatout.report.document import document
from flatout.report.machine_text import machine_line
from flatout.search.lines import BudgetOption, ratio_text, seconds_argument
from flatout.strategies.facts import ALONE
from flatout.strategies.found import StrategiesFound, StrategyProof, StrategyTrial
from flatout.terminal import printable
from flatout.units import counted, format_bytes, format_number, format_seconds

KIND = "strategies"


def strategies_text(found: StrategiesFound, machine: Machine, option: BudgetOption = seconds_argument) -> str:
    """The whole result on one screen; `option`: how more time is asked for."""
    rows = [("machine", machine_line(machine)), ("training", _training(found)), ("ranks", _ranks(found))]
    label = "tried"
    for one in found.trials:
        for line in _trial(one, found):
            rows.append((label, line))
            label = ""
    rows.append(("result", _result(found)))
    if found.enough_seconds is not None:
        rows.append(("", f"not all were reached: try {option(found.enough_seconds)} (about)"))
    rows += [("", line) for line in ([] if found.proof is None else _proof(found.proof, found.ranks))]
    rows += [("note", text) for text in found.warnings]
    return "\n".join(f"{label:<10}{printable(text)}" for label, text in rows)


def strategies_document(
    found: StrategiesFound, machine: Machine, *, include_private: bool = False
) -> dict[str, object]:
    payload = {"machine": machine.to_json(), **found.to_json()}
    return document(KIND, payload, include_private=include_private)


def _training(found: StrategiesFound) -> str:
    facts = found.facts
    batch = "batches of unknown size" if facts.samples is None else f"batches of {facts.samples}"
    alone = "it does not fit into one process" if facts.step_seconds is None else _one_process(found)
    model = f"{facts.model} with {format_number(facts.parameters)} parameters"
    return f"{found.spec}: {model}, {batch}; {alone}"


def _one_process(found: StrategiesFound) -> str:
    memory = found.facts.memory[ALONE].bytes
    takes = "" if memory is None else f", {format_bytes(memory)} (forecast)"
    threads = "" if found.facts.threads is None else f" with {counted(found.facts.threads, 'thread')}"
    return f"{ALONE} takes {format_seconds(found.facts.step_seconds or 0.0)} a step{threads}{takes}"


def _ranks(found: StrategiesFound) -> str:
    kind = "which share the cores of the CPU" if found.facts.on_cpu else "a GPU each"
    limit = "" if found.limit_bytes is None else f"; each may take {format_bytes(found.limit_bytes)}"
    exchange = "; what they exchange was not measured"
    if found.exchange_seconds is not None:
        size = format_bytes(found.facts.parameter_bytes)
        exchange = f"; an all_reduce of {size} takes {format_seconds(found.exchange_seconds)} between them (measured)"
    return f"{found.ranks}, {kind}{limit}{exchange}"


def _trial(one: StrategyTrial, found: StrategiesFound) -> list[str]:
    head = f"{one.outcome:<12}{one.strategy:<11} "
    if one.comparison is None or one.baseline_seconds is None or one.step_seconds is None:
        lines = [head + one.reason]
    else:
        times = f"{format_seconds(one.baseline_seconds)} -> {format_seconds(one.step_seconds)}"
        reason = "" if one.reason == "slower" else one.reason
        lines = [
            head + "  ".join(filter(None, [f"{times:<18} {ratio_text(one.comparison)}", _memory(one, found), reason]))
        ]
    memory = found.facts.memory.get(one.strategy)
    if one.peak_bytes is None and memory is not None and memory.bytes is None and memory.reason:
        lines.append(f"{'':<12}memory of a rank: unknown, because {memory.reason}")
    if one.predicted is not None:
        seconds = format_seconds(one.predicted.step_seconds)
        lines.append(f"{'':<12}predicted: a step of {seconds}: {one.predicted.reason}")
    return lines


def _memory(one: StrategyTrial, found: StrategiesFound) -> str:
    """Of a rank."""
    if one.peak_bytes is not None:
        return f"{format_bytes(one.peak_bytes)} a rank"
    memory = found.facts.memory.get(one.strategy)
    return "" if memory is None or memory.bytes is None else f"{format_bytes(memory.bytes)} a rank (forecast)"


def _result(found: StrategiesFound) -> str:
    if found.chosen is None:
        return found.reason
    on = f"{found.chosen} on {counted(found.ranks, 'rank')}"
    if found.comparison is None or found.baseline_seconds is None or found.step_seconds is None:
        return f"{on}: {ALONE} does not fit, and no other strategy was faster"
    times = f"{format_seconds(found.baseline_seconds)} -> {format_seconds(found.step_seconds)}"
    of = f"{times} a step of the same batch, fresh processes, {found.comparison.pairs} pairs"
    return f"{ratio_text(found.comparison)}: {on} over {found.baseline} ({of})"


def _proof(proof: StrategyProof, ranks: int) -> list[str]:
    without = " (dropout left out)" * proof.without_dropout
    head = f"{proof.verdict}: {proof.steps} steps of {ranks} ranks train as one process{without}"
    lines = [head]
    for name, found, rounding in (
        ("losses", proof.loss_difference, proof.rounding_loss_difference),
        ("weights", proof.weight_difference, proof.rounding_weight_difference),
    ):
        if found is not None and rounding is not None:
            lines.append(
                f"  {name:<9}differ by {found:.1e} of the largest; by {rounding:.1e} where every weight is rounded once"
            )
    return lines
