"""A Machine, its ceilings and what is wrong with it, as text for people."""

from __future__ import annotations

from collections.abc import Sequence

from flatout.diagnose.finding import Finding
from flatout.machine.bandwidth_peak import NO_GPU
from flatout.machine.ceilings import Ceilings, Peak
from flatout.machine.description import Cpu, Gpu, Machine
from flatout.machine.published_peaks import published_peaks
from flatout.machine.torch_builds import InstallAdvice
from flatout.units import counted, format_bytes, format_rate

_LABEL = 11
_RATE_NAMES = {
    "memory_read_bytes_per_second": "memory read",
    "memory_copy_bytes_per_second": "memory copy",
    "host_to_device_pinned_bytes_per_second": "to GPU, pinned",
    "host_to_device_pageable_bytes_per_second": "to GPU, pageable",
    "device_to_host_pinned_bytes_per_second": "from GPU, pinned",
    "device_to_host_pageable_bytes_per_second": "from GPU, pageable",
    "launches_per_second": "launches",
    "disk_read_bytes_per_second": "disk read",
}


def machine_line(machine: Machine) -> str:
    """In one line: '2 cores AMD EPYC (bf16), 23.5 GiB · ceilings: fp32 225 GFLOP/s, memory 46.5 GB/s'."""
    fast = ", ".join(d for d in machine.cpu.fast_dtypes if d != "fp32")
    cpu = f"{counted(machine.cpu.available_cores, 'core')} {machine.cpu.name}" + (f" ({fast})" if fast else "")
    gpus = "".join(f", {gpu.name}" for gpu in machine.usable_gpus)
    ceilings = f" · ceilings: {_ceilings_line(machine.ceilings)}" if machine.ceilings else ""
    return f"{cpu}, {format_bytes(machine.memory_total_bytes)}{gpus}{ceilings}"


def _ceilings_line(ceilings: Ceilings) -> str:
    shown = ("fp32", "tf32", "bf16")
    parts = [f"{d} {format_rate(p.value, p.unit)}" for d, p in ceilings.gemm_flops_per_second.items() if d in shown]
    if (read := ceilings.memory_read_bytes_per_second) is not None:
        parts.append(f"memory {format_rate(read.value, read.unit)}")
    return ", ".join(parts) + (" (too low: others used it)" if ceilings.contended else "")


def check_text(machine: Machine, findings: Sequence[Finding]) -> str:
    """What `flatout check` prints."""
    sections = [_description(machine), _ceilings(machine.ceilings), _findings(findings)]
    return "\n".join(line for section in sections for line in section)


def _description(machine: Machine) -> list[str]:
    rows = [("processor", _cpu(machine.cpu)), ("", " ".join(machine.cpu.features)), ("memory", _memory(machine))]
    rows += [(f"gpu {gpu.index}", _gpu(gpu)) for gpu in machine.devices]
    if not machine.devices:
        rows.append(("gpu", f"none: {machine.no_devices_reason}"))
    rows += [("torch", _torch(machine)), ("system", _system(machine)), ("fingerprint", machine.fingerprint)]
    return [_row(label, text) for label, text in rows if text]


def _cpu(cpu: Cpu) -> str:
    cores = counted(cpu.logical_cores, "core")
    usable = f"{cpu.available_cores} of {cores} ({cpu.limited_by})" if cpu.limited_by else cores
    return f"{cpu.name}, {usable}; fast in {', '.join(cpu.fast_dtypes)}"


def _memory(machine: Machine) -> str:
    total, available = format_bytes(machine.memory_total_bytes), format_bytes(machine.memory_available_bytes)
    return f"{total}, {available} available" + (f" ({machine.memory_limited_by})" if machine.memory_limited_by else "")


def _system(machine: Machine) -> str:
    v = machine.versions
    driver = f", driver {v.driver} (CUDA up to {v.driver_cuda})" if v.driver else ""
    return f"Python {v.python}, {v.operating_system}{driver}"


def _gpu(gpu: Gpu) -> str:
    parts = [gpu.name]
    if gpu.compute_capability is not None:
        parts.append("compute capability " + ".".join(map(str, gpu.compute_capability)))
    if gpu.multiprocessors is not None:
        parts.append(f"{gpu.multiprocessors} multiprocessors")
    if gpu.memory_total_bytes is not None and gpu.memory_free_bytes is not None:
        parts.append(f"{format_bytes(gpu.memory_total_bytes)}, {format_bytes(gpu.memory_free_bytes)} free")
    text = ", ".join(parts) + (f"; fast in {', '.join(gpu.fast_dtypes)}" if gpu.fast_dtypes else "")
    return f"{text}{_published(gpu)}"


def _published(gpu: Gpu) -> str:
    """What its documents promise, where the catalogue has it."""
    entry, _ = published_peaks(gpu.name)
    if entry is None:
        return ""
    dtype = next((one for one in ("bf16", "fp16", "fp32") if one in entry.flops_per_second), None)
    figures = [format_rate(entry.memory_bytes_per_second, "B/s")]
    figures += [] if dtype is None else [f"{format_rate(entry.flops_per_second[dtype], 'FLOP/s')} in {dtype}"]
    figures += [] if entry.watts is None else [f"{entry.watts:.0f} W"]
    return f"; published: {', '.join(figures)}"


def _torch(machine: Machine) -> str:
    v = machine.versions
    if v.torch is None:
        return "not installed"
    build = [
        f"{name} {version}" for name, version in (("CUDA", v.cuda), ("cuDNN", v.cudnn), ("NCCL", v.nccl)) if version
    ]
    return f"{v.torch}, {', '.join(build) if build else 'a build for the CPU only'}"


def _ceilings(ceilings: Ceilings | None) -> list[str]:
    if ceilings is None:
        return [_row("ceilings", "not measured yet: flatout check --measure")]
    how = f"measured {ceilings.measured_at} on {ceilings.device}, {counted(ceilings.threads, 'thread')}"
    lines = [_row("ceilings", how + (", quickly" if ceilings.quick else ""))]
    if ceilings.contended:
        lines.append(
            _row("", "other processes used the CPU or the GPU: these may be too low; measure again on an idle machine")
        )
    lines.append(f"  {'':<18} {'best quarter':>16}  {'slow to best':<13} {'samples':>7}  work")
    lines += [_peak(f"{dtype} product", peak) for dtype, peak in ceilings.gemm_flops_per_second.items()]
    lines += [_peak(_RATE_NAMES[name], peak) for name, peak in ceilings.rates().items() if peak is not None]
    return lines + [f"  {text}" for text in _missing(ceilings)]


def _peak(name: str, peak: Peak) -> str:
    spread = f"{peak.low / peak.value - 1:+.0%} to {peak.high / peak.value - 1:+.0%}"
    return f"  {name:<18} {format_rate(peak.value, peak.unit):>16}  {spread:<13} {peak.samples:>7}  {peak.how}"


def _missing(ceilings: Ceilings) -> list[str]:
    """Grouped by reason, so that four ways to an absent GPU are one line."""
    by_reason: dict[str, dict[str, None]] = {}
    for name, reason in ceilings.reasons.items():
        shown = _RATE_NAMES.get(name, name.removeprefix("gemm ") + " product")
        transfer = reason == NO_GPU and "GPU" in shown
        by_reason.setdefault(reason, {})["to and from a GPU" if transfer else shown] = None
    return [f"not measured: {'; '.join(names)} ({reason})" for reason, names in by_reason.items()]


def _findings(findings: Sequence[Finding]) -> list[str]:
    lines: list[str] = []
    for finding in findings:
        lines += [_row(finding.severity, finding.title), _row("", finding.evidence), _row("", f"do: {finding.remedy}")]
        if finding.next_command:
            lines.append(_row("", f"next: {finding.next_command}"))
    return [*lines, _row("verdict", verdict(findings))]


def verdict(findings: Sequence[Finding]) -> str:
    """In a few words; `exit_code` says the same in a number."""
    warnings = sum(finding.severity == "warning" for finding in findings)
    if any(finding.severity == "unusable" for finding in findings):
        return "unusable until that is fixed"
    return f"usable, with {counted(warnings, 'problem')} to fix" if warnings else "fine"


def exit_code(findings: Sequence[Finding]) -> int:
    """0 fine (notes are fine), 1 unusable, 2 something should be fixed."""
    severities = {finding.severity for finding in findings}
    return 1 if "unusable" in severities else 2 if "warning" in severities else 0


def _row(label: str, text: str) -> str:
    return f"{label:<{_LABEL}} {text}"


def install_text(advice: InstallAdvice) -> str:
    """The lines that install torch, with what they are for as comments: they can be pasted into a shell."""
    if not advice.lines:
        return f"# torch {advice.torch}: unknown, because {advice.reason}"
    return "\n".join(
        [f"# torch {advice.torch}: {advice.reason}", *advice.lines, *(f"# source: {one}" for one in advice.sources)]
    )
