"""The machine on which it was measured, and how to get the same again."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping

from flatout.private_details import LEFT_OUT
from flatout.report.html.blocks import Block, Cell, Code, Details, Facts, Section, Table, Text
from flatout.report.html.reading import Part, Sources, clean
from flatout.report.html.tables import heads
from flatout.units import format_bytes, format_rate


def machine(sources: Sources) -> Section | None:
    """Each machine of the documents; usually one."""
    found: dict[str, Part] = {}
    for doc in sources.values():
        one = doc.at("machine")
        if one:
            found.setdefault(one.text("fingerprint"), one)
    if not found:
        return None
    blocks: list[Block] = []
    if len(found) > 1:
        blocks.append(
            Text(text="The documents are from different machines: do not compare their times.", tone="caution")
        )
    for one in found.values():
        blocks += [_machine(one), *_ceilings(one.at("ceilings"))]
    return Section(id="machine", title="Machine", blocks=tuple(blocks))


def _machine(one: Part) -> Facts:
    cpu, versions = one.at("cpu"), one.at("versions")
    cores = cpu.number("available_cores")
    fast = ", ".join(cpu.texts("fast_dtypes"))
    total = one.number("memory_total_bytes")
    rows = [
        ("processor", cpu.text("name"), f"{cores:.0f} cores; fast in {fast}" if cores else ""),
        ("memory", format_bytes(total) if total else "unknown", one.text("memory_limited_by")),
    ]
    for gpu in one.parts("devices"):
        size = gpu.number("memory_total_bytes")
        rows.append(("GPU", gpu.text("name"), format_bytes(size) if size else ""))
    if not one.parts("devices"):
        rows.append(("GPU", "none", one.text("no_devices_reason")))
    named = (("torch", "torch"), ("CUDA", "cuda"), ("cuDNN", "cudnn"), ("Python", "python"), ("", "operating_system"))
    software = [f"{label} {versions.text(key)}".strip() for label, key in named if versions.text(key)]
    rows.append(("software", ", ".join(software), ""))
    rows.append(("fingerprint", one.text("fingerprint"), "results with the same one can be compared"))
    return Facts(rows=tuple(rows))


def _ceilings(ceilings: Part) -> list[Block]:
    if not ceilings:
        return [Text(text="Its ceilings were not measured (flatout check --measure).")]
    products = ceilings.at("gemm_flops_per_second")
    rows = [_peak(f"{dtype} product", products.at(dtype)) for dtype in products.names()]
    for name in ceilings.names():
        if name.endswith("_per_second") and name != "gemm_flops_per_second" and ceilings.at(name):
            rows.append(_peak(name.removesuffix("_bytes_per_second").removesuffix("_per_second"), ceilings.at(name)))
    named = heads("work", "best quarter", "slow to best", "how", numeric=("best quarter", "slow to best"))
    contended = "; others used it, so they may be too low" if ceilings.flag("contended") else ""
    measured = f"Ceilings, measured {ceilings.text('measured_at')} on {ceilings.text('device')}{contended}"
    table = Table(caption=measured, heads=named, rows=tuple(rows))
    return [Details(summary="What this machine can do", blocks=(table,))]


def _peak(name: str, peak: Part) -> tuple[Cell, ...]:
    value, low, high, unit = peak.number("value"), peak.number("low"), peak.number("high"), peak.text("unit")
    spread = f"{low / value - 1:+.0%} to {high / value - 1:+.0%}" if value and low and high else "unknown"
    rate = format_rate(value, unit) if value is not None else "unknown"
    return Cell(text=clean(name.replace("_", " "))), Cell(text=rate), Cell(text=spread), Cell(text=peak.text("how"))


def reproduce(sources: Sources, files: Mapping[str, str]) -> Section:
    """Commands and the plan. `files`: kind of document -> its file's name."""
    blocks: list[Block] = []
    planned = bool(sources["tune"] or sources["run"].at("plan"))
    commands = {
        "tune": ("Tune it again", "flatout tune"),
        "run": ("Run it by its plan" if planned else "Run it", "flatout run"),
        "profile": ("Profile it", "flatout profile"),
        "memory": ("Watch its memory", "flatout memory"),
    }
    hidden = False
    for kind, (label, verb) in commands.items():
        script = (sources[kind] or sources["tune" if kind == "run" else kind]).at("script")
        if name := script.text("name"):
            arguments, left_out = _arguments(script)
            hidden = hidden or left_out
            blocks.append(Code(label=label, text=" ".join([verb, _target(name), *arguments])))
    if spec := sources["strategies"].text("spec"):
        ranks = sources["strategies"].number("ranks") or 0
        blocks.append(Code(label="Choose again", text=f"flatout tune --devices {ranks:.0f} {shlex.quote(spec)}"))
    if hidden:
        digests = dict.fromkeys(doc.at("script").text("arguments_digest") for doc in sources.values())
        known = ", ".join(filter(None, digests))
        blocks.append(
            Text(text=f"{LEFT_OUT} stands for the script's arguments, which the documents leave out ({known}).")
        )
    for kind in ("tune", "strategies"):
        if plan := sources[kind].at("plan"):
            blocks.append(Code(label="The plan's choices (flatout.toml)", text=_plan(plan)))
    rows = []
    for kind, doc in sources.items():
        header = doc.at("flatout")
        version = f"Flatout {header.text('version')}, schema {header.number('schema') or 0:.0f}"
        rows.append((f"{kind} document", clean(files[kind]), version))
    blocks.append(Facts(rows=tuple(rows)))
    return Section(id="reproduce", title="How to reproduce this", blocks=tuple(blocks))


def _target(name: str) -> str:
    """Quoted for a shell: a file, or '-m package.module'. The home directory, which documents write as ~, is one for a
    shell too only where it is not quoted."""
    for plain in ("-m ", "~/"):
        if name.startswith(plain):
            return plain + shlex.quote(name.removeprefix(plain))
    return shlex.quote(name)


def _arguments(script: Part) -> tuple[list[str], bool]:
    """Quoted for a shell; (what stands for them, True) where the document leaves them out."""
    if script.at("arguments").value is None:
        return ([LEFT_OUT], True) if script.text("arguments_digest") else ([], False)
    return [shlex.quote(one) for one in script.texts("arguments")], False


def _plan(plan: Part) -> str:
    """As in the plan's file, whose values are written as in JSON."""
    return "\n".join(
        f"{clean(name)} = {clean(json.dumps(plan.at(name).value, ensure_ascii=False))}" for name in plan.names()
    )
