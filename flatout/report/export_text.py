"""What an export came to, as a screen for people and as a document for programs."""

from __future__ import annotations

from flatout.infer.exporting.report import ExportCheck, ExportedFile, ExportFailure, ExportReport, SizeRange
from flatout.report.document import document
from flatout.terminal import printable
from flatout.units import format_bytes, format_seconds, labelled

KIND = "export"


def export_document(report: ExportReport) -> dict[str, object]:
    """Bytes and seconds; what is not known is null."""
    return document(KIND, report.to_json())


def export_text(report: ExportReport) -> str:
    """One screen: the model, then for each format its file and how it was verified, or why there is none."""
    size = f"{report.parameters:,} parameters, {format_bytes(report.weight_bytes)}"
    rows = [("model", f"{report.model} · {size} · in eval mode · torch {report.torch_version}")]
    for file in report.files:
        rows += labelled(file.format, _failed(file.failure) if file.failure else _verified(file))
        rows += [("", note) for note in file.notes]
    rows += labelled("note", list(report.notes))
    good = sum(file.failure is None for file in report.files)
    rows.append(("verdict", f"{good} of {len(report.files)} exported and verified in {format_seconds(report.seconds)}"))
    return "\n".join(f"{label:<12}{printable(text)}" for label, text in rows)


def _failed(failure: ExportFailure) -> list[str]:
    at = [f"at {failure.line}"] if failure.line else []
    rest = "; ".join(part for part in (failure.limit, failure.remedy) if part)
    return [f"not exported: {failure.what}", *at, *([rest] if rest else [])]


def _verified(file: ExportedFile) -> list[str]:
    sizes = f"dynamic {' and '.join(file.dynamic)}" if file.dynamic else "fixed sizes"
    took = format_seconds(file.seconds)
    ranges = [text for one in file.ranges if (text := _range(one))]
    return [f"{file.path} · {format_bytes(file.bytes or 0)} · {sizes} · {took}", _how(file), *ranges]


def _range(found: SizeRange) -> str:
    """'batch 1 to 64 (x.size()[0] <= 64); the file refuses 65'."""
    tested = f"{found.name} tested from {found.tested[0]} to {found.tested[-1]}" if found.tested else ""
    if found.smallest is None:
        return f"{tested}; nothing is known beyond" if tested else ""
    if found.largest is None and found.smallest == 1:
        return f"{tested}; no bound was found" if tested else ""
    upper = f"to {found.largest}" if found.largest is not None else "and up"
    refused = f"; the file refuses {', '.join(map(str, found.refused))}" if found.refused else ""
    return f"{found.name} {found.smallest} {upper} ({found.reason}){refused}"


def _how(file: ExportedFile) -> str:
    batches = sorted({check.batch for check in file.checks if check.batch is not None})
    lengths = sorted({check.length for check in file.checks if check.length is not None})
    both = (("batch", batches), ("length", lengths))
    sizes = [f"{name} {', '.join(map(str, found))}" for name, found in both if found]
    if "length" not in file.dynamic:
        sizes = sizes[:1]
    fresh = sum(check.inputs != "example" for check in file.checks)
    text = f"verified on the example and {fresh} {_kind(file.checks)} inputs"
    text += f" ({', '.join(sizes)})" if sizes else ""
    if file.bit_identical:
        return f"{text}: bit-identical"
    largest = max(check.largest_output for check in file.checks)
    return (
        f"{text}: largest difference {file.largest_difference:.2g} in outputs up to {largest:.3g} "
        f"(allowed: {file.tolerance:.0e} of the largest, at least of 1)"
    )


def _kind(checks: tuple[ExportCheck, ...]) -> str:
    return "fresh" if any(check.inputs == "fresh" for check in checks) else "resampled"
