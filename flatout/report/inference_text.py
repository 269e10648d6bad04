"""What generate and predict made: for people, as JSON documents and as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from flatout.infer.generation.generated import Generation
from flatout.infer.prediction.predicted import Figures
from flatout.report.document import document
from flatout.units import format_seconds
from flatout.whole_files import errors_named, written_whole


def generation_document(made: Generation) -> dict[str, object]:
    """Everything: tokens, texts, reasons, figures."""
    return document("generation", made.to_json())


def generation_text(made: Generation) -> str:
    """Every prompt's text, or its token ids without a tokenizer, under a line that names the prompt."""
    parts = []
    for index, (tokens, reason) in enumerate(zip(made.tokens, made.reasons, strict=True)):
        parts.append(f"--- prompt {index} ({reason})")
        parts.append(made.texts[index] if made.texts is not None else " ".join(map(str, tokens)))
    return "\n".join(parts)


def write_lines(path: Path, made: Generation) -> None:
    """One JSON object a prompt, in their order: prompt, tokens, text (null without a tokenizer), reason."""
    texts: Sequence[str | None] = made.texts or [None] * len(made.tokens)
    rows = zip(made.tokens, texts, made.reasons, strict=True)
    lines = [
        json.dumps({"prompt": index, "tokens": tokens, "text": text, "reason": reason}, ensure_ascii=False)
        for index, (tokens, text, reason) in enumerate(rows)
    ]
    with errors_named(path, "name a place you may write"), written_whole(path) as temporary:
        temporary.write_text("\n".join(lines) + "\n", encoding="utf-8", errors="backslashreplace")


def predict_document(
    figures: Figures, *, out: str, done_before: int, failed: int, first: list[str]
) -> dict[str, object]:
    """`done_before`: inputs of an earlier run that was gone on with; `failed`: of all, `first` of them in words."""
    payload = {"out": out, "done_before": done_before, "failed_in_all": failed, "first_failures": first}
    return document("predict", {**payload, "figures": figures.to_json()})


def predict_text(figures: Figures, *, out: str, done_before: int, failed: int) -> str:
    """Some lines: how much, how fast, at which share of the ceiling, what went wrong."""
    before = f" ({done_before} more from an earlier run)" if done_before else ""
    lines = [f"{figures.items} inputs in {format_seconds(figures.seconds)}{before} -> {out}"]
    if figures.items_per_second and figures.tokens:
        batches = ", ".join(f"{count} {name}" for name, count in figures.batches.items() if count)
        speed = f"{figures.items_per_second:,.1f} inputs/s"
        if figures.tokens_per_second:
            padding = f"padding {figures.padding_share:.1%} of what was computed"
            speed += f", {figures.tokens_per_second:,.0f} tokens/s, {padding}"
        lines.append(f"speed     {speed}; batches: {batches or 'none'}")
    share = figures.share_of_ceiling
    if share is not None and figures.ceiling_flops_per_second:
        ceiling = figures.ceiling_flops_per_second / 1e12
        lines.append(f"ceiling   {share:.1%} of the measured {ceiling:.2f} TFLOP/s in {figures.ceiling_dtype}")
    elif figures.items:
        lines.append(f"ceiling   unknown in {figures.ceiling_dtype}: measure it with `flatout check --measure`")
    lines += [f"note      {note}" for note in figures.notes]
    if failed:
        lines.append(f"failed    {failed} inputs; the results say which and why")
    return "\n".join(lines)
