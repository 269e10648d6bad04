"""A model that was built but not run, and what is wrong with it, as text and as a document."""

from __future__ import annotations

from collections.abc import Sequence

from flatout.diagnose.finding import Finding
from flatout.diagnose.model_facts import ModelFacts
from flatout.report.document import document
from flatout.report.machine_text import verdict
from flatout.report.profile_text import finding_texts, rows_text
from flatout.units import format_bytes, labelled

KIND = "model-check"


def model_document(name: str, model: ModelFacts, findings: Sequence[Finding]) -> dict[str, object]:
    """What `flatout check net.py:make --json` prints."""
    found: dict[str, object] = {
        "name": name,
        "verdict": verdict(findings),
        "model": model.to_json(),
        "findings": [one.to_json() for one in findings],
    }
    return document(KIND, found, include_private=False)


def model_text(name: str, model: ModelFacts, findings: Sequence[Finding]) -> str:
    """What `flatout check net.py:make` prints."""
    frozen = "all" if model.trainable == model.parameters else f"{model.trainable:,}"
    counted = f"{model.parameters:,} parameters" + (f", {frozen} of them trainable" if model.parameters else "")
    dtypes = ", ".join(f"{format_bytes(size)} {dtype}" for dtype, size in model.bytes_by_dtype.items()) or "none"
    buffers = "unknown, because a lazy layer's have no shape yet"
    if model.buffer_bytes is not None:
        buffers = format_bytes(model.buffer_bytes)
    rows = [("model", f"{model.kind} ({name}) · {counted}"), ("memory", f"parameters {dtypes} · buffers {buffers}")]
    for one in findings:
        rows += labelled(one.severity, finding_texts(one))
    if model.without_source:
        rows.append(("note", f"not checked, because a ScriptModule has no source: {', '.join(model.without_source)}"))
    return rows_text([*rows, ("verdict", f"{verdict(findings)} (built, not run)")])
